#include <math.h>

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

// out = ((x - mean) * 1 / sqrt(mean((x - mean)^2) + eps)) * weight + bias. The mean is 0 unless centred. Sums
// are kept in 16 lanes.
void norm(const float* x, const Norm& norm, int64_t n, float* out) {
  if (norm.centred) {
    F sum = zero();
    for (int64_t i = 0; i < n; i += 16) sum = add(sum, load_partial(x + i, n - i));
    const F mean = set1(reduce_add(sum) / static_cast<float>(n));
    for (int64_t i = 0; i < n; i += 16) store_partial(out + i, sub(load_partial(x + i, n - i), mean), n - i);
    x = out;
  }
  F squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F v = load_partial(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const F scale = set1(1.0f / sqrtf(reduce_add(squares) / static_cast<float>(n) + norm.eps));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i;
    F v = mul(mul(load_partial(x + i, left), scale), load_partial(norm.weight + i, left));
    if (norm.bias) v = add(v, load_partial(norm.bias + i, left));
    store_partial(out + i, v, left);
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
