// Plain C++: the definition that every other target is compared with, byte by byte.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../code_tables.h"
#include "../interleave.h"

namespace ondevice {
namespace scalar {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};

#define ONDEVICE_EACH(expression) \
  for (int i = 0; i < 16; ++i) {  \
    r.v[i] = expression;          \
  }                               \
  return r

ONDEVICE_INLINE F load(const float* p) {
  F r;
  ONDEVICE_EACH(p[i]);
}
ONDEVICE_INLINE void store(float* p, F a) { memcpy(p, a.v, sizeof(a.v)); }
ONDEVICE_INLINE F set1(float x) {
  F r;
  ONDEVICE_EACH(x);
}
ONDEVICE_INLINE F zero() { return set1(0.0f); }
ONDEVICE_INLINE F add(F a, F b) {
  F r;
  ONDEVICE_EACH(a.v[i] + b.v[i]);
}
ONDEVICE_INLINE F sub(F a, F b) {
  F r;
  ONDEVICE_EACH(a.v[i] - b.v[i]);
}
ONDEVICE_INLINE F mul(F a, F b) {
  F r;
  ONDEVICE_EACH(a.v[i] * b.v[i]);
}
ONDEVICE_INLINE F div(F a, F b) {
  F r;
  ONDEVICE_EACH(a.v[i] / b.v[i]);
}
ONDEVICE_INLINE F fma(F a, F b, F c) {
  F r;
  ONDEVICE_EACH(fmaf(a.v[i], b.v[i], c.v[i]));
}
ONDEVICE_INLINE F max(F a, F b) {
  F r;
  ONDEVICE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
ONDEVICE_INLINE F min(F a, F b) {
  F r;
  ONDEVICE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
// Lanes of x that are above those of limit, or NaN; zeros for the others.
ONDEVICE_INLINE F above_or_zero(F x, F limit) {
  for (int i = 0; i < 16; ++i) x.v[i] = x.v[i] <= limit.v[i] ? 0.0f : x.v[i];
  return x;
}
ONDEVICE_INLINE F abs(F a) {
  F r;
  ONDEVICE_EACH(fabsf(a.v[i]));
}
ONDEVICE_INLINE int32_t magnitude_bits(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits & 0x7fffffff;
}
// The larger of |b| and a non-negative a, compared as integers: infinity and NaN are larger than any number.
ONDEVICE_INLINE F max_magnitude(F a, F b) {
  F r;
  ONDEVICE_EACH(magnitude_bits(a.v[i]) > magnitude_bits(b.v[i]) ? a.v[i] : fabsf(b.v[i]));
}
ONDEVICE_INLINE F round_even(F a) {
  F r;
  ONDEVICE_EACH(rintf(a.v[i]));
}
ONDEVICE_INLINE float pow2(float n) {
  const int32_t bits = ((n == n ? static_cast<int32_t>(n) : 0) + 127) << 23;
  float f;
  memcpy(&f, &bits, sizeof(f));
  return f;
}
ONDEVICE_INLINE F scale_by_pow2(F a, F n) {
  F r;
  ONDEVICE_EACH(a.v[i] * pow2(n.v[i]));
}

ONDEVICE_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = sign | 0x7f800000u | (magnitude << 13);
  } else if (magnitude >= 0x0400u) {
    bits = sign | ((magnitude << 13) + 0x38000000u);
  } else {
    const float f = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
    memcpy(&bits, &f, sizeof(bits));
    bits |= sign;
  }
  float f;
  memcpy(&f, &bits, sizeof(f));
  return f;
}
// Round to nearest even; overflow becomes infinity.
ONDEVICE_INLINE uint16_t float_to_half(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {
    float magnitude;
    memcpy(&magnitude, &bits, sizeof(magnitude));
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(rintf(magnitude * 16777216.0f)));
  }
  const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}
ONDEVICE_INLINE F load_half(const uint16_t* p) {
  F r;
  ONDEVICE_EACH(half_to_float(p[i]));
}
ONDEVICE_INLINE void store_half(uint16_t* p, F a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
ONDEVICE_INLINE void store_int8(int8_t* p, F a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(rintf(a.v[i]));
}

ONDEVICE_INLINE I int_zero() {
  I r;
  ONDEVICE_EACH(0);
}
ONDEVICE_INLINE I widen_int8(const int8_t* p) {
  I r;
  ONDEVICE_EACH(p[i]);
}
ONDEVICE_INLINE I widen_uint8(const uint8_t* p) {
  I r;
  ONDEVICE_EACH(p[i]);
}
ONDEVICE_INLINE I set1_int(int32_t x) {
  I r;
  ONDEVICE_EACH(x);
}
ONDEVICE_INLINE I add_int(I a, I b) {
  I r;
  ONDEVICE_EACH(a.v[i] + b.v[i]);
}
// Those bits of each lane, a byte's value, that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE I pick_int(I a) {
  I r;
  ONDEVICE_EACH(a.v[i] >> RIGHT & MASK);
}
// acc + factor * sum, of sums and factors that fit 16 bits; factor_of makes a factor of an integer.
ONDEVICE_INLINE I factor_of(I a) { return a; }
ONDEVICE_INLINE I multiply_add(I acc, I sum, I factor) {
  I r;
  ONDEVICE_EACH(acc.v[i] + factor.v[i] * sum.v[i]);
}
// Two integers of 16 bits in each lane, and acc + a * x + b * y.
struct Pair {
  I a, b;
};
ONDEVICE_INLINE Pair pair_of(I a, I b) { return {a, b}; }
ONDEVICE_INLINE I dot_pair(I acc, Pair p, int32_t x, int32_t y) {
  I r;
  ONDEVICE_EACH(acc.v[i] + p.a.v[i] * x + p.b.v[i] * y);
}
ONDEVICE_INLINE F to_float(I a) {
  F r;
  ONDEVICE_EACH(static_cast<float>(a.v[i]));
}
ONDEVICE_INLINE B load_bytes(const uint8_t* p) {
  B r;
  memcpy(r.v, p, 64);
  return r;
}
ONDEVICE_INLINE B join_quarters(const Bytes16* q) {
  B r;
  memcpy(r.v, q, 64);
  return r;
}
// Those bits of each byte that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B pick_bits(B a) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] >> RIGHT & MASK);
  return a;
}
// The entries of a table of 16 bytes.
ONDEVICE_INLINE B look_up(B nibbles, const uint8_t* table) {
  for (int i = 0; i < 64; ++i) nibbles.v[i] = table[nibbles.v[i]];
  return nibbles;
}
// 2^(s - 127) of 16 bytes s below 255.
ONDEVICE_INLINE F load_powers(const uint8_t* p) {
  F r;
  for (int i = 0; i < 16; ++i) {
    // 2^-127 has no exponent of its own: it is a subnormal number.
    const uint32_t bits = p[i] ? static_cast<uint32_t>(p[i]) << 23 : 1u << 22;
    memcpy(&r.v[i], &bits, sizeof(bits));
  }
  return r;
}
// The codes, with those bits of the other's bytes that are in `MASK` once they are RIGHT places further
// right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B with_bits(B codes, B other) {
  for (int i = 0; i < 64; ++i)
    codes.v[i] |=
        (RIGHT > 0 ? other.v[i] >> (RIGHT > 0 ? RIGHT : 0) : other.v[i] << (RIGHT > 0 ? 0 : -RIGHT)) & MASK;
  return codes;
}
ONDEVICE_INLINE I dot_q4(I acc, B codes, const int8_t* quad) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) acc.v[i] += codes.v[4 * i + k] * quad[k];
  return acc;
}
ONDEVICE_INLINE I dot_q8(I acc, B codes, const int8_t* quad) { return dot_q4(acc, codes, quad); }
ONDEVICE_INLINE I finish_q8(I acc, int32_t) { return acc; }
// Adds lanes i and i + 8, then i and i + 4, and so on.
ONDEVICE_INLINE float reduce_add(F a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
  return a.v[0];
}
// The bits of the largest of 16 non-negative lanes, compared as max_magnitude compares.
ONDEVICE_INLINE int32_t reduce_magnitude(F a) {
  int32_t largest = 0;
  for (float x : a.v) largest = magnitude_bits(x) > largest ? magnitude_bits(x) : largest;
  return largest;
}
// Bit i is set if lane i isn't zero.
ONDEVICE_INLINE uint32_t nonzero_lanes(F a) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(a.v[i] != 0.0f) << i;
  return bits;
}
// Rounds 64 values of at most 127 to int8. sums: of each 16. nibble_order: each 8 in the order 0 2 4 6 1 3 5
// 7.
ONDEVICE_INLINE void store_codes(int8_t* codes, F a, F b, F c, F d, bool nibble_order, int32_t sums[4]) {
  const F values[4] = {a, b, c, d};
  for (int i = 0; i < 64; ++i) {
    const int32_t code = static_cast<int32_t>(rintf(values[i / 16].v[i % 16]));
    sums[i / 16] = code + (i % 16 ? sums[i / 16] : 0);
    const int k = i % 8;
    codes[nibble_order ? i - k + (k % 2) * 4 + k / 2 : i] = static_cast<int8_t>(code);
  }
}
ONDEVICE_INLINE void prefetch(const void*) {}

#undef ONDEVICE_EACH

// Chains of additions that products are spread over at most.
constexpr int kMostChains = 8;
constexpr int kTokenTile = 2;
constexpr int kScaledTokens = 4;  // whose sums stay in registers beside those that scales multiply
// Most tokens of a pass over two tiles side by side. It brings nothing here, but every machine tests it.
constexpr int kPairedTokens = 4;

}  // namespace scalar
}  // namespace ondevice
