#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

void rope(float* x, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const F a = load_partial(x + i, left), b = load_partial(x + half + i, left);
    const F c = load_partial(cos + i, left), s = load_partial(sin + i, left);
    store_partial(x + i, fma(sub(zero(), b), s, mul(a, c)), left);
    store_partial(x + half + i, fma(a, s, mul(b, c)), left);
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
