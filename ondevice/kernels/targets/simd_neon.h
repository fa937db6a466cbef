// NEON with the dot-product extension (ARMv8.2): four registers are sixteen lanes.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "../code_tables.h"
#include "../interleave.h"

namespace ondevice {
namespace ONDEVICE_NS {

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct B {
  uint8x16_t v[4];
};

#define ONDEVICE_EACH(expression) \
  for (int i = 0; i < 4; ++i) {   \
    r.v[i] = expression;          \
  }                               \
  return r

ONDEVICE_INLINE F load(const float* p) {
  F r;
  ONDEVICE_EACH(vld1q_f32(p + 4 * i));
}
ONDEVICE_INLINE void store(float* p, F a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
ONDEVICE_INLINE F set1(float x) {
  F r;
  ONDEVICE_EACH(vdupq_n_f32(x));
}
ONDEVICE_INLINE F zero() { return set1(0.0f); }
ONDEVICE_INLINE F add(F a, F b) {
  F r;
  ONDEVICE_EACH(vaddq_f32(a.v[i], b.v[i]));
}
ONDEVICE_INLINE F sub(F a, F b) {
  F r;
  ONDEVICE_EACH(vsubq_f32(a.v[i], b.v[i]));
}
ONDEVICE_INLINE F mul(F a, F b) {
  F r;
  ONDEVICE_EACH(vmulq_f32(a.v[i], b.v[i]));
}
ONDEVICE_INLINE F div(F a, F b) {
  F r;
  ONDEVICE_EACH(vdivq_f32(a.v[i], b.v[i]));
}
ONDEVICE_INLINE F fma(F a, F b, F c) {
  F r;
  ONDEVICE_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i]));
}
// Comparisons and selects, so that the second operand wins on ties as on x86.
ONDEVICE_INLINE F max(F a, F b) {
  F r;
  ONDEVICE_EACH(vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}
ONDEVICE_INLINE F min(F a, F b) {
  F r;
  ONDEVICE_EACH(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}
// Lanes of x that are above those of limit, or NaN; zeros for the others.
ONDEVICE_INLINE F above_or_zero(F x, F limit) {
  for (int i = 0; i < 4; ++i)
    x.v[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.v[i]), vcleq_f32(x.v[i], limit.v[i])));
  return x;
}
ONDEVICE_INLINE F abs(F a) {
  F r;
  ONDEVICE_EACH(vabsq_f32(a.v[i]));
}
// The larger of |b| and a non-negative a, compared as integers: infinity and NaN are larger than any number.
ONDEVICE_INLINE F max_magnitude(F a, F b) {
  F r;
  ONDEVICE_EACH(vreinterpretq_f32_s32(
      vmaxq_s32(vreinterpretq_s32_f32(a.v[i]), vreinterpretq_s32_f32(vabsq_f32(b.v[i])))));
}
ONDEVICE_INLINE F round_even(F a) {
  F r;
  ONDEVICE_EACH(vrndnq_f32(a.v[i]));
}
ONDEVICE_INLINE F scale_by_pow2(F a, F n) {
  F r;
  ONDEVICE_EACH(vmulq_f32(
      a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23))));
}
ONDEVICE_INLINE F load_half(const uint16_t* p) {
  F r;
  ONDEVICE_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
ONDEVICE_INLINE void store_half(uint16_t* p, F a) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
ONDEVICE_INLINE void store_int8(int8_t* p, F a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.v[0])), vmovn_s32(vcvtnq_s32_f32(a.v[1])));
  const int16x8_t high = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.v[2])), vmovn_s32(vcvtnq_s32_f32(a.v[3])));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

ONDEVICE_INLINE I int_zero() {
  I r;
  ONDEVICE_EACH(vdupq_n_s32(0));
}
ONDEVICE_INLINE I widen_int8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
           vmovl_s16(vget_high_s16(high))}};
}
ONDEVICE_INLINE I widen_uint8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
  const int16x8_t high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
           vmovl_s16(vget_high_s16(high))}};
}
ONDEVICE_INLINE I set1_int(int32_t x) {
  I r;
  ONDEVICE_EACH(vdupq_n_s32(x));
}
ONDEVICE_INLINE I add_int(I a, I b) {
  I r;
  ONDEVICE_EACH(vaddq_s32(a.v[i], b.v[i]));
}
// Those bits of each lane, a byte's value, that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE I pick_int(I a) {
  I r;
  ONDEVICE_EACH(vandq_s32(vshlq_s32(a.v[i], vdupq_n_s32(-RIGHT)), vdupq_n_s32(MASK)));
}
// acc + factor * sum, of sums and factors that fit 16 bits; factor_of makes a factor of an integer.
ONDEVICE_INLINE I factor_of(I a) { return a; }
ONDEVICE_INLINE I multiply_add(I acc, I sum, I factor) {
  I r;
  ONDEVICE_EACH(vmlaq_s32(acc.v[i], sum.v[i], factor.v[i]));
}
// Two integers of 16 bits in each lane, and acc + a * x + b * y.
struct Pair {
  I a, b;
};
ONDEVICE_INLINE Pair pair_of(I a, I b) { return {a, b}; }
ONDEVICE_INLINE I dot_pair(I acc, Pair p, int32_t x, int32_t y) {
  I r;
  ONDEVICE_EACH(vmlaq_n_s32(vmlaq_n_s32(acc.v[i], p.a.v[i], x), p.b.v[i], y));
}
ONDEVICE_INLINE F to_float(I a) {
  F r;
  ONDEVICE_EACH(vcvtq_f32_s32(a.v[i]));
}
ONDEVICE_INLINE B load_bytes(const uint8_t* p) {
  B r;
  ONDEVICE_EACH(vld1q_u8(p + 16 * i));
}
ONDEVICE_INLINE B join_quarters(const Bytes16* q) {
  B r;
  ONDEVICE_EACH((uint8x16_t)q[i]);
}
// Those bits of each byte that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B pick_bits(B a) {
  B r;
  if constexpr (RIGHT == 0) {
    ONDEVICE_EACH(vandq_u8(a.v[i], vdupq_n_u8(MASK)));
  } else if constexpr (0xff >> RIGHT == MASK) {
    ONDEVICE_EACH(vshrq_n_u8(a.v[i], RIGHT));
  } else {
    ONDEVICE_EACH(vandq_u8(vshrq_n_u8(a.v[i], RIGHT), vdupq_n_u8(MASK)));
  }
}
// The entries of a table of 16 bytes.
ONDEVICE_INLINE B look_up(B nibbles, const uint8_t* table) {
  const uint8x16_t entries = vld1q_u8(table);
  B r;
  ONDEVICE_EACH(vqtbl1q_u8(entries, nibbles.v[i]));
}
// 2^(s - 127) of 16 bytes s below 255.
ONDEVICE_INLINE F load_powers(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  const uint32x4_t words[4] = {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)),
                               vmovl_u16(vget_low_u16(high)), vmovl_u16(vget_high_u16(high))};
  F r;
  // 2^-127 has no exponent of its own: it is a subnormal number.
  ONDEVICE_EACH(vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(words[i], 23), vdupq_n_u32(1 << 22))));
}
// The codes, with those bits of the other's bytes that are in `MASK` once they are RIGHT places further
// right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B with_bits(B codes, B other) {
  B r;
  ONDEVICE_EACH(vorrq_u8(codes.v[i], vandq_u8(vshlq_u8(other.v[i], vdupq_n_s8(-RIGHT)), vdupq_n_u8(MASK))));
}
ONDEVICE_INLINE int8x16_t broadcast_quad(const int8_t* quad) {
  int32_t word;
  memcpy(&word, quad, sizeof(word));
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
ONDEVICE_INLINE I dot_q4(I acc, B codes, const int8_t* quad) {
  const int8x16_t x = broadcast_quad(quad);
  I r;
  ONDEVICE_EACH(vdotq_s32(acc.v[i], vreinterpretq_s8_u8(codes.v[i]), x));
}
// Codes are re-centred to code - 128, which fits a signed byte; finish_q8 adds the difference back.
ONDEVICE_INLINE I dot_q8(I acc, B codes, const int8_t* quad) {
  const int8x16_t x = broadcast_quad(quad);
  I r;
  ONDEVICE_EACH(vdotq_s32(acc.v[i], vreinterpretq_s8_u8(veorq_u8(codes.v[i], vdupq_n_u8(0x80))), x));
}
ONDEVICE_INLINE I finish_q8(I acc, int32_t activation_sum) {
  I r;
  ONDEVICE_EACH(vaddq_s32(acc.v[i], vdupq_n_s32(128 * activation_sum)));
}
// Adds lanes i and i + 8, then i and i + 4, and so on.
ONDEVICE_INLINE float reduce_add(F a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
// The bits of the largest of 16 non-negative lanes, compared as max_magnitude compares.
ONDEVICE_INLINE int32_t reduce_magnitude(F a) {
  const F low = max_magnitude(a, {{a.v[2], a.v[3], a.v[2], a.v[3]}});
  return vmaxvq_s32(vmaxq_s32(vreinterpretq_s32_f32(low.v[0]), vreinterpretq_s32_f32(low.v[1])));
}
// Bit i is set if lane i isn't zero.
ONDEVICE_INLINE uint32_t nonzero_lanes(F a) {
  const uint32_t places[4] = {1, 2, 4, 8};
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= vaddvq_u32(vbicq_u32(vld1q_u32(places), vceqzq_f32(a.v[i]))) << 4 * i;
  return bits;
}
// Rounds 64 values of at most 127 to int8. sums: of each 16. nibble_order: each 8 in the order 0 2 4 6 1 3 5
// 7.
ONDEVICE_INLINE void store_codes(int8_t* codes, F a, F b, F c, F d, bool nibble_order, int32_t sums[4]) {
  const F values[4] = {a, b, c, d};
  const uint8_t order[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  for (int i = 0; i < 4; ++i) {
    store_int8(codes + 16 * i, values[i]);
    int8x16_t bytes = vld1q_s8(codes + 16 * i);
    sums[i] = vaddlvq_s8(bytes);
    if (nibble_order) bytes = vqtbl1q_s8(bytes, vld1q_u8(order));
    vst1q_s8(codes + 16 * i, bytes);
  }
}
ONDEVICE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#undef ONDEVICE_EACH

// Chains of additions that products are spread over at most.
constexpr int kMostChains = 4;
constexpr int kTokenTile = 4;
constexpr int kScaledTokens = 2;  // whose sums stay in registers beside those that scales multiply
// Most tokens of a pass over two tiles side by side; 0 where that brings nothing.
constexpr int kPairedTokens = 0;

}  // namespace ONDEVICE_NS
}  // namespace ondevice
