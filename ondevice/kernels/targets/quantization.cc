#include <math.h>

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

// Symmetric int8 per group of 64: scale = max|x| / 127, code = round_even(x * (127 / max|x|)).
// A group with an infinity or a NaN has the scale NaN and the codes 0.
void quantize_activations(const float* x, int64_t cols, bool nibble_order, const QuantizedRows& out,
                          int64_t t) {
  for (int64_t g = 0; g < out.groups; ++g) {
    F v[4];
    F magnitude = zero();
    for (int i = 0; i < 4; ++i) {
      const int64_t left = cols - g * kGroup - 16 * i;
      v[i] = left > 0 ? load_partial(x + g * kGroup + 16 * i, left) : zero();
      magnitude = max_magnitude(magnitude, v[i]);
    }
    quantize_group(v, largest_magnitude(magnitude), nibble_order, out.codes + (t * out.groups + g) * kGroup,
                   out.scales + t * out.groups + g, out.int_sums + t * out.groups + g);
    out.sums[t * out.groups + g] =
        out.scales[t * out.groups + g] * static_cast<float>(out.int_sums[t * out.groups + g]);
  }
}

// Group-affine, MLX's form: one end of the range is the bias, and zero has a code of its own.
// The scale and bias are rounded to float16 before the codes are chosen with them.
bool quantize_row(int bits, const float* x, int64_t cols, uint8_t* codes, uint16_t* scales,
                  uint16_t* biases) {
  const float top = bits == 4 ? 15.0f : 255.0f;
  const int64_t groups = (cols + kGroup - 1) / kGroup;
  bool finite = true;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t n = cols - g * kGroup < kGroup ? cols - g * kGroup : kGroup;
    const float* w = x + g * kGroup;
    float low = w[0], high = w[0];
    for (int64_t i = 0; i < n; ++i) {
      finite &= isfinite(w[i]) != 0;
      low = w[i] < low ? w[i] : low;
      high = w[i] > high ? w[i] : high;
    }
    const bool low_end = fabsf(low) > fabsf(high);
    float scale = (high - low) / top;
    scale = low_end ? scale : -scale;
    float bias = low_end ? low : high;
    const float q0 = scale != 0.0f ? rintf(bias / scale) : 0.0f;
    if (q0 != 0.0f) scale = bias / q0;
    uint16_t halves[16];
    store_half(halves, set1(scale));
    scales[g] = halves[0];
    store_half(halves, set1(bias));
    biases[g] = halves[0];
    finite &= (scales[g] & 0x7c00u) != 0x7c00u && (biases[g] & 0x7c00u) != 0x7c00u;
    halves[0] = scales[g];
    halves[1] = biases[g];
    float rounded[16];
    store(rounded, load_half(halves));
    uint8_t q[kGroup] = {0};
    if (finite && rounded[0] != 0.0f)
      for (int i = 0; i < 4 && 16 * i < n; ++i) {
        F code = div(sub(load_partial(w + 16 * i, n - 16 * i), set1(rounded[1])), set1(rounded[0]));
        code = min(max(round_even(code), zero()), set1(top));
        float values[16];
        store(values, code);
        for (int64_t k = 0; k < 16 && 16 * i + k < n; ++k) q[16 * i + k] = static_cast<uint8_t>(values[k]);
      }
    if (bits == 8) {
      memcpy(codes + g * kGroup, q, kGroup);
    } else {
      for (int k = 0; k < 32; ++k) codes[g * 32 + k] = static_cast<uint8_t>(q[2 * k] | (q[2 * k + 1] << 4));
    }
  }
  return finite;
}

// w = scale * code + bias, one fused multiply-add each.
void dequantize_row(int bits, const uint8_t* codes, const uint16_t* scales, const uint16_t* biases,
                    int64_t groups, float* out) {
  for (int64_t g = 0; g < groups; ++g) {
    uint16_t halves[16] = {scales[g], biases[g]};
    float rounded[16];
    store(rounded, load_half(halves));
    uint8_t q[kGroup];
    if (bits == 8) {
      memcpy(q, codes + g * kGroup, kGroup);
    } else {
      for (int k = 0; k < 32; ++k) {
        q[2 * k] = codes[g * 32 + k] & 0x0f;
        q[2 * k + 1] = codes[g * 32 + k] >> 4;
      }
    }
    for (int i = 0; i < 4; ++i)
      store(out + g * kGroup + 16 * i, fma(set1(rounded[0]), load_uint8(q + 16 * i), set1(rounded[1])));
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
