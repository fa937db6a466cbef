#include <math.h>

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

// out = (x * 1 / sqrt(mean(x^2) + eps)) * weight; squares are summed in 16 lanes.
void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  F squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F v = load_partial(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / sqrtf(reduce_add(squares) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; i += 16)
    store_partial(out + i, mul(mul(load_partial(x + i, n - i), set1(scale)), load_partial(weight + i, n - i)),
                  n - i);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
