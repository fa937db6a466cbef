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

void half_to_float(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    if (n - i >= 16) {
      store(out + i, load_half(in + i));
      continue;
    }
    uint16_t tail[16] = {0};
    memcpy(tail, in + i, static_cast<size_t>(n - i) * 2);
    store_partial(out + i, load_half(tail), n - i);
  }
}

// False if a value isn't finite as float16.
bool float_to_half(const float* in, uint16_t* out, int64_t n) {
  bool finite = true;
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i < 16 ? n - i : 16;
    uint16_t halves[16];
    store_half(halves, load_partial(in + i, left));
    for (int64_t k = 0; k < left; ++k) finite &= (halves[k] & 0x7c00u) != 0x7c00u;
    memcpy(out + i, halves, static_cast<size_t>(left) * 2);
  }
  return finite;
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
