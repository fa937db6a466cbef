// Sums of products for rounding with error feedback. Each output has one order of operations, none fused, so
// that all targets give the same bits; the compiler makes vectors of the loops over outputs.
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

constexpr int64_t kSpan = 64;  // outputs that are in registers while the products are added

template <class T, int kSign>
static inline void add(const T* a, int64_t count, const T* b, int64_t b_stride, T* out, int64_t n) {
  int64_t j = 0;
  for (; j + kSpan <= n; j += kSpan) {
    T sums[kSpan];
    for (int64_t i = 0; i < kSpan; ++i) sums[i] = out[j + i];
    for (int64_t k = 0; k < count; ++k)
      for (int64_t i = 0; i < kSpan; ++i) sums[i] += kSign * a[k] * b[k * b_stride + j + i];
    for (int64_t i = 0; i < kSpan; ++i) out[j + i] = sums[i];
  }
  for (; j < n; ++j)
    for (int64_t k = 0; k < count; ++k) out[j] += kSign * a[k] * b[k * b_stride + j];
}

void add_products(const float* a, int64_t count, const float* b, int64_t b_stride, float* out, int64_t n) {
  add<float, 1>(a, count, b, b_stride, out, n);
}

void subtract_products(const double* a, int64_t count, const double* b, int64_t b_stride, double* out,
                       int64_t n) {
  add<double, -1>(a, count, b, b_stride, out, n);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
