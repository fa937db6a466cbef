#include <math.h>

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

// Symmetric int8: scale = max|x| / 127 of the columns that share it, code = round_even(x * (127 / max|x|)).
// Columns with an infinity or a NaN among them have the scale NaN and the codes 0.
void quantize_activations(const float* x, int64_t cols, bool nibble_order, const QuantizedRows& out,
                          int64_t t) {
  for (int64_t g = 0; g < out.groups; ++g) {
    F v[4];
    for (int i = 0; i < 4; ++i) {
      const int64_t left = cols - g * kGroup - 16 * i;
      v[i] = left > 0 ? load_partial(x + g * kGroup + 16 * i, left) : zero();
    }
    const int64_t at = out.at(t, g);
    float* scales = out.scales + out.scaled * at;
    if (out.scaled == 2) {
      scales[0] = scale_to_int8<2>(v);
      scales[1] = scale_to_int8<2>(v + 2);
    } else {
      scales[0] = scale_to_int8<4>(v);
    }
    int32_t sums[4];
    store_codes(out.codes + at * kGroup, v[0], v[1], v[2], v[3], nibble_order, sums);
    for (int64_t part = 0, i = 0; part < out.parts; ++part) {
      int32_t sum = 0;
      for (const int64_t end = i + 4 / out.parts; i < end; ++i) sum += sums[i];
      out.int_sums[out.parts * at + part] = sum;
      if (out.scaled == out.parts) out.sums[out.parts * at + part] = scales[part] * static_cast<float>(sum);
    }
  }
}

// MLX's scale and bias: codes 0 to top span the range, one end is the bias, and zero has a code of its own.
static inline void span(float low, float high, float top, float* scale, float* bias) {
  const bool low_end = fabsf(low) > fabsf(high);
  *scale = (high - low) / top;
  *scale = low_end ? *scale : -*scale;
  *bias = low_end ? low : high;
  const float whole = rintf(*bias / (*scale != 0.0f ? *scale : 1.0f)), q0 = *scale != 0.0f ? whole : 0.0f;
  const float exact = *bias / (q0 != 0.0f ? q0 : 1.0f);
  *scale = q0 != 0.0f ? exact : *scale;
}

// A row at 8 bits.
// The scale and bias are rounded to float16 before the codes are chosen with them.
static bool quantize_row(int64_t size, const float* x, int64_t cols, uint8_t* codes, uint16_t* scales,
                         uint16_t* biases) {
  const float top = 255.0f;
  const int64_t groups = groups_of(cols) * kGroup / size;
  bool finite = true;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t n = cols - g * size < size ? cols - g * size : size;
    const float* w = x + g * size;
    if (n <= 0) {  // padding alone
      scales[g] = biases[g] = 0;
      memset(codes + g * size, 0, static_cast<size_t>(size));
      continue;
    }
    float low = w[0], high = w[0];
    for (int64_t i = 0; i < n; ++i) {
      finite &= isfinite(w[i]) != 0;
      low = w[i] < low ? w[i] : low;
      high = w[i] > high ? w[i] : high;
    }
    float scale, bias;
    span(low, high, top, &scale, &bias);
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
    memcpy(codes + g * size, q, static_cast<size_t>(size));
  }
  return finite;
}

// At 4 to 6 bits a lane is a row: what follows works on one group of 16 rows, w being (n, 16).

constexpr float kCuts[] = {0.0f, 0.04f, 0.08f};  // shares of the range that a start leaves out at an end
constexpr int kFits = 4;
constexpr int kTogether = 5;  // starts in one pass over the weights

struct Best {
  float error[16], scale[16], bias[16];
};

// What the scale and bias of least squares follow from, t being w - bias and q its code.
struct Sums {
  F q, qq, t, qt;
};

static inline F as_half(F x) {
  uint16_t halves[16];
  store_half(halves, x);
  return load_half(halves);
}

static inline F inverse_of(F scale) {
  float v[16];
  store(v, scale);
  // No branches, so that the compiler divides all lanes at once.
  for (float& x : v) {
    const float inverse = 1.0f / (x != 0.0f ? x : 1.0f);
    x = x != 0.0f ? inverse : 0.0f;
  }
  return load(v);
}

// The code of t = w - bias. NaN has the code 0.
static inline F code_of(F t, F inverse, float top) {
  return round_even(min(max(mul(t, inverse), zero()), set1(top)));
}

// Keeps a scale and bias where their squared error is the least so far; one that isn't finite never is.
static inline void keep_better(F error, F scale, F bias, Best* best) {
  float e[16], s[16], b[16];
  store(e, error);
  store(s, scale);
  store(b, bias);
  for (int k = 0; k < 16; ++k) {
    const bool better = e[k] < best->error[k];
    best->error[k] = better ? e[k] : best->error[k];
    best->scale[k] = better ? s[k] : best->scale[k];
    best->bias[k] = better ? b[k] : best->bias[k];
  }
}

// Tries out kStarts scales and biases in their order. They share the loads, and their sums overlap.
template <int kStarts>
static inline void try_starts(const float* w, int64_t n, float top, const F* scales, const F* biases,
                              Best* best) {
  F inverses[kStarts], errors[kStarts];
  for (int s = 0; s < kStarts; ++s) inverses[s] = inverse_of(scales[s]), errors[s] = zero();
  for (int64_t i = 0; i < n; ++i) {
    const F v = load(w + 16 * i);
    for (int s = 0; s < kStarts; ++s) {
      const F t = sub(v, biases[s]), off = sub(mul(scales[s], code_of(t, inverses[s], top)), t);
      errors[s] = add(errors[s], mul(off, off));
    }
  }
  for (int s = 0; s < kStarts; ++s) keep_better(errors[s], scales[s], biases[s], best);
}

static inline Sums try_out(const float* w, int64_t n, float top, F scale, F bias, Best* best) {
  const F inverse = inverse_of(scale);
  F error = zero();
  Sums sums = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < n; ++i) {
    const F t = sub(load(w + 16 * i), bias), q = code_of(t, inverse, top), off = sub(mul(scale, q), t);
    error = add(error, mul(off, off));
    sums = {add(sums.q, q), add(sums.qq, mul(q, q)), add(sums.t, t), add(sums.qt, mul(q, t))};
  }
  keep_better(error, scale, bias, best);
  return sums;
}

// Searches scale and bias: from the best of nine cuts of the range and the whole range with a code for zero,
// least squares and codes in turn.
static void fit(const float* w, int64_t n, float top, F low, F high, Best* best) {
  const F range = abs(sub(high, low)), count = set1(static_cast<float>(n));
  for (float& error : best->error) error = HUGE_VALF;
  constexpr int kStarts = 10;
  F scales[kStarts], biases[kStarts];
  int start = 0;
  for (const float cut_low : kCuts)
    for (const float cut_high : kCuts) {
      scales[start] = as_half(div(mul(range, set1(1.0f - cut_low - cut_high)), set1(top)));
      biases[start++] = as_half(add(low, mul(set1(cut_low), range)));
    }
  float lows[16], highs[16], spans[16], ends[16];
  store(lows, low);
  store(highs, high);
  for (int k = 0; k < 16; ++k) span(lows[k], highs[k], top, spans + k, ends + k);
  scales[start] = as_half(load(spans));
  biases[start] = as_half(load(ends));
  for (start = 0; start < kStarts; start += kTogether)
    try_starts<kTogether>(w, n, top, scales + start, biases + start, best);
  F scale = load(best->scale), bias = load(best->bias);
  for (int i = 0; i <= kFits; ++i) {
    const Sums sums = try_out(w, n, top, scale, bias, best);
    const F last_scale = scale, last_bias = bias;
    scale = as_half(
        div(sub(mul(count, sums.qt), mul(sums.q, sums.t)), sub(mul(count, sums.qq), mul(sums.q, sums.q))));
    bias = as_half(add(bias, div(sub(sums.t, mul(scale, sums.q)), count)));
    // Another turn would give the same again.
    if (!(nonzero_lanes(sub(scale, last_scale)) | nonzero_lanes(sub(bias, last_bias)))) break;
  }
}

// Columns [start, start + n) of up to 16 rows -> (n, 16), zeros behind the last row.
static void load_lanes(const float* x, int64_t rows, int64_t cols, int64_t start, int64_t n, float* w) {
  if (rows < 16 || n % 4) {
    memset(w, 0, static_cast<size_t>(n) * 16 * sizeof(float));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < n; ++i) w[16 * i + r] = x[r * cols + start + i];
    return;
  }
  for (int64_t r = 0; r < 16; r += 4)
    for (int64_t i = 0; i < n; i += 4) {
      const uint8_t* from[4];
      for (int64_t k = 0; k < 4; ++k)
        from[k] = reinterpret_cast<const uint8_t*>(x + (r + k) * cols + start + i);
      transpose_words(from[0], from[1], from[2], from[3], reinterpret_cast<uint8_t*>(w + 16 * i + r));
    }
}

// The codes of a group of 16 rows, two in a byte, by its scales and biases: `pairs` is (size / 2, 16), in
// which columns from n on are 0.
static void pack_nibbles(const float* w, int64_t n, int64_t size, F scale, F bias, uint8_t* pairs) {
  const F inverse = inverse_of(scale);
  for (int64_t k = 0; k < size / 2; ++k) {
    int8_t even[16] = {0}, odd[16] = {0};
    if (2 * k < n) store_int8(even, code_of(sub(load(w + 32 * k), bias), inverse, 15.0f));
    if (2 * k + 1 < n) store_int8(odd, code_of(sub(load(w + 32 * k + 16), bias), inverse, 15.0f));
    const Bytes16 both = load_vector<Bytes16>(even) | load_vector<Bytes16>(odd) << 4;
    memcpy(pairs + 16 * k, &both, 16);
  }
}

// (size / 2, 16) bytes -> the first `rows` of 16 rows of size / 2 bytes, `stride` apart.
static void store_lanes(const uint8_t* pairs, int64_t size, int64_t rows, int64_t stride, uint8_t* codes) {
  for (int64_t k = 0; k < size / 2; k += 4) {
    uint8_t quads[64];
    interleave_bytes(load_vector<Bytes16>(pairs + 16 * k), load_vector<Bytes16>(pairs + 16 * k + 16),
                     load_vector<Bytes16>(pairs + 16 * k + 32), load_vector<Bytes16>(pairs + 16 * k + 48),
                     quads);
    for (int64_t r = 0; r < rows; ++r) memcpy(codes + r * stride + k, quads + 4 * r, 4);
  }
}

// The codes of a group of up to 16 rows at 4 to 6 bits, the rows `stride` bytes apart.
static void store_group(const float* w, int64_t n, const RowFormat& format, F scale, F bias, int64_t rows,
                        int64_t stride, uint8_t* codes) {
  if (format.bits == 4) {
    uint8_t pairs[kGroup / 2 * 16];
    pack_nibbles(w, n, format.group, scale, bias, pairs);
    store_lanes(pairs, format.group, rows, stride, codes);
    return;
  }
  const F inverse = inverse_of(scale);
  const float top = static_cast<float>((1 << format.bits) - 1);
  uint8_t found[16][kGroup] = {};
  for (int64_t i = 0; i < n; ++i) {
    float values[16];
    store(values, code_of(sub(load(w + 16 * i), bias), inverse, top));
    for (int64_t r = 0; r < rows; ++r) found[r][i] = static_cast<uint8_t>(values[r]);
  }
  for (int64_t r = 0; r < rows; ++r) pack_codes(found[r], format.group, format.bits, codes + r * stride);
}

// Up to 16 rows at 4 to 6 bits, a group of which `load_group` writes to w (n, 16) when it is given its first
// column and n. Each sum runs over the columns in order, so that all targets give the same bits.
template <class Load>
static bool quantize_rows(const RowFormat& format, const Load& load_group, int64_t rows, int64_t cols,
                          uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  const int64_t size = format.group, group_bytes = size * format.bits / 8;
  const int64_t groups = groups_of(cols) * kGroup / size;
  const float top = static_cast<float>((1 << format.bits) - 1);
  float w[kGroup * 16];
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t n = cols - g * size < size ? cols - g * size : size;
    if (n <= 0) {  // padding alone
      for (int64_t r = 0; r < rows; ++r) {
        scales[r * groups + g] = biases[r * groups + g] = 0;
        memset(codes + (r * groups + g) * group_bytes, 0, static_cast<size_t>(group_bytes));
      }
      continue;
    }
    load_group(g * size, n, w);
    F low = load(w), high = low, magnitude = zero();
    for (int64_t i = 0; i < n; ++i) {
      const F v = load(w + 16 * i);
      low = min(low, v);
      high = max(high, v);
      magnitude = max_magnitude(magnitude, v);
    }
    uint16_t halves[16];
    store_half(halves, magnitude);
    for (const uint16_t half : halves)
      if ((half & 0x7c00u) == 0x7c00u) return false;
    Best best{};
    fit(w, n, top, low, high, &best);
    const F bias = load(best.bias), scale = load(best.scale);
    store_half(halves, scale);
    for (int64_t r = 0; r < rows; ++r) scales[r * groups + g] = halves[r];
    store_half(halves, bias);
    for (int64_t r = 0; r < rows; ++r) biases[r * groups + g] = halves[r];
    store_group(w, n, format, scale, bias, rows, groups * group_bytes, codes + g * group_bytes);
  }
  return true;
}

bool quantize_lanes(const RowFormat& format, const float* x, int64_t stride, int64_t rows, int64_t cols,
                    uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  const auto load_group = [&](int64_t start, int64_t n, float* w) {
    for (int64_t i = 0; i < n; ++i) store(w + 16 * i, load(x + (start + i) * stride));
  };
  return quantize_rows(format, load_group, rows, cols, codes, scales, biases);
}

bool quantize_block(const RowFormat& format, const float* x, int64_t rows, int64_t cols, uint8_t* codes,
                    uint16_t* scales, uint16_t* biases) {
  const int64_t size = format.group, groups = groups_of(cols) * format.scales();
  if (format.bits < 8) {
    const auto load_group = [&](int64_t start, int64_t n, float* w) {
      load_lanes(x, rows, cols, start, n, w);
    };
    return quantize_rows(format, load_group, rows, cols, codes, scales, biases);
  }
  bool finite = true;
  for (int64_t r = 0; r < rows; ++r)
    finite &= quantize_row(size, x + r * cols, cols, codes + r * groups * size, scales + r * groups,
                           biases + r * groups);
  return finite;
}

// A group's codes as stored -> one a byte.
template <int BITS>
static void unpack_codes(const uint8_t* codes, int64_t size, uint8_t* out) {
  for (int64_t k = 0; k < size; k += 8, codes += BITS) {
    uint64_t raw = 0;
    memcpy(&raw, codes, BITS);
    raw = spread_codes(raw, BITS);
    memcpy(out + k, &raw, 8);
  }
}

// w = scale * code, both floats; exact unless it overflows.
static void dequantize_mxfp4_row(const uint8_t* codes, const uint8_t* scales, int64_t count, float* out) {
  constexpr int64_t size = 32;
  for (int64_t g = 0; g < count; ++g) {
    uint8_t same[16], q[size];
    memset(same, scales[g], sizeof(same));
    const F scale = load_powers(same);
    unpack_codes<4>(codes + g * size / 2, size, q);
    for (int64_t i = 0; i < size; i += 16) {
      float values[16];
      for (int64_t k = 0; k < 16; ++k) values[k] = kE2m1[q[i + k]];
      store(out + g * size + i, mul(scale, load(values)));
    }
  }
}

// w = scale * code + bias, one fused multiply-add each.
void dequantize_row(const RowFormat& format, const uint8_t* codes, const void* scale_bytes,
                    const uint16_t* biases, int64_t groups, float* out) {
  const int64_t count = groups * format.scales();
  if (format.mxfp4())
    return dequantize_mxfp4_row(codes, static_cast<const uint8_t*>(scale_bytes), count, out);
  const uint16_t* scales = static_cast<const uint16_t*>(scale_bytes);
  const int64_t size = format.group;
  const float zero_code = static_cast<float>(1 << (format.bits - 1));
  const auto unpack = format.bits == 4   ? unpack_codes<4>
                      : format.bits == 5 ? unpack_codes<5>
                      : format.bits == 6 ? unpack_codes<6>
                                         : unpack_codes<8>;
  for (int64_t g = 0; g < count; ++g) {
    uint16_t halves[16] = {scales[g], format.implied() ? uint16_t{0} : biases[g]};
    float rounded[16];
    store(rounded, load_half(halves));
    const F scale = set1(rounded[0]), bias = set1(format.implied() ? -zero_code * rounded[0] : rounded[1]);
    uint8_t q[kGroup];
    unpack(codes + g * size * format.bits / 8, size, q);
    for (int i = 0; i < size / 16; ++i)
      store(out + g * size + 16 * i, fma(scale, load_uint8(q + 16 * i), bias));
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
