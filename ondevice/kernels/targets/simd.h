// Sixteen float or int32 lanes, the same on every target.
//
// A kernel is written once over these types and compiled once per target; since the lanes are always
// sixteen and every operation below is exact or correctly rounded, all targets give the same bits.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(ONDEVICE_TARGET_AMX)
#define ONDEVICE_NS amx
#include "simd_avx512.h"
#elif defined(ONDEVICE_TARGET_AVX512)
#define ONDEVICE_NS avx512
#include "simd_avx512.h"
#elif defined(ONDEVICE_TARGET_AVXVNNI)
#define ONDEVICE_NS avxvnni
#include "simd_avx2.h"
#elif defined(ONDEVICE_TARGET_AVX2)
#define ONDEVICE_NS avx2
#include "simd_avx2.h"
#elif defined(ONDEVICE_TARGET_I8MM)
#define ONDEVICE_NS i8mm
#include "simd_neon.h"
#elif defined(ONDEVICE_TARGET_NEON)
#define ONDEVICE_NS neon
#include "simd_neon.h"
#else
#define ONDEVICE_NS scalar
#include "simd_scalar.h"
#endif

namespace ondevice {
namespace ONDEVICE_NS {

ONDEVICE_INLINE F load_int8(const int8_t* p) { return to_float(widen_int8(p)); }
ONDEVICE_INLINE F load_uint8(const uint8_t* p) { return to_float(widen_uint8(p)); }

ONDEVICE_INLINE B low_nibbles(B codes) { return pick_bits<0, 15>(codes); }
ONDEVICE_INLINE B high_nibbles(B codes) { return pick_bits<4, 15>(codes); }

// 16 bytes of each of four rows -> 16 quads with a byte of each row.
ONDEVICE_INLINE void interleave_rows(const uint8_t* const* rows, int64_t at, B (&out)[1]) {
  Bytes16 quads[4];
  interleave_bytes(load_vector<Bytes16>(rows[0] + at), load_vector<Bytes16>(rows[1] + at),
                   load_vector<Bytes16>(rows[2] + at), load_vector<Bytes16>(rows[3] + at), quads);
  out[0] = join_quarters(quads);
}
ONDEVICE_INLINE void order_pieces(I (&)[1]) {}

#if !defined(ONDEVICE_WIDE_ROWS)
// Pieces of 16 bytes of a row that are computed at once.
constexpr int kRowPieces = 1;
typedef const int8_t* Quads;
ONDEVICE_INLINE Quads two_quads(const int8_t* first, const int8_t*) { return first; }

// Four values of at most 127 in each lane -> four int8 side by side. Returns their sum in each lane.
ONDEVICE_INLINE F store_quads(int8_t* out, const F (&v)[4]) {
  Bytes16 rows[4], quads[4];
  F sum = zero();
  for (int r = 0; r < 4; ++r) {
    const F code = round_even(v[r]);
    int8_t codes[16];
    store_int8(codes, code);
    rows[r] = load_vector<Bytes16>(codes);
    sum = add(sum, code);
  }
  interleave_bytes(rows[0], rows[1], rows[2], rows[3], quads);
  memcpy(out, quads, sizeof(quads));
  return sum;
}
#endif

#if !defined(ONDEVICE_MASKS)
// Copies the first n (0 to 15) elements by moves of fixed sizes, which cost less than a call of memcpy.
template <class T>
ONDEVICE_INLINE void copy_first(T* to, const T* from, int64_t n) {
#define ONDEVICE_COPY(count)                 \
  if (n & count) {                           \
    memcpy(to, from, (count) * sizeof(*to)); \
    to += count;                             \
    from += count;                           \
  }
  ONDEVICE_COPY(8)
  ONDEVICE_COPY(4)
  ONDEVICE_COPY(2)
  ONDEVICE_COPY(1)
#undef ONDEVICE_COPY
}

// First n (0 to 16) floats, zeros behind them.
ONDEVICE_INLINE F load_partial(const float* p, int64_t n) {
  if (n >= 16) return load(p);
  float v[16] = {0};
  copy_first(v, p, n);
  return load(v);
}

ONDEVICE_INLINE F load_half_partial(const uint16_t* p, int64_t n) {
  if (n >= 16) return load_half(p);
  uint16_t v[16] = {0};
  copy_first(v, p, n);
  return load_half(v);
}

ONDEVICE_INLINE void store_partial(float* p, F a, int64_t n) {
  if (n >= 16) {
    store(p, a);
    return;
  }
  float v[16];
  store(v, a);
  copy_first(p, v, n);
}
#endif

// Sums of products that fit 16 bits: kWordProducts of each quad are in one. add_words: acc + weights * sums.
#if defined(ONDEVICE_WORD_SUMS)
constexpr int kWordProducts = 2;
#else
constexpr int kWordProducts = 4;
using Words = I;
ONDEVICE_INLINE Words words_zero() { return int_zero(); }
ONDEVICE_INLINE Words dot_words(Words acc, B codes, const int8_t* quad) { return dot_q4(acc, codes, quad); }
ONDEVICE_INLINE Words words_of(I x) { return factor_of(x); }
ONDEVICE_INLINE I add_words(I acc, Words sums, Words weights) { return multiply_add(acc, sums, weights); }
#endif

// e^x, relative error below 2e-7 on [-87, 88]; arguments are clamped to that range. NaN stays NaN, because
// min and max return their second operand if either is NaN. Cody-Waite reduction, degree-6 polynomial in
// Horner form with fused multiply-adds.
ONDEVICE_INLINE F exp_lanes(F x) {
  x = min(set1(88.0f), max(set1(-87.0f), x));
  const F n = round_even(mul(x, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693145751953125f), x);
  r = fma(n, set1(-1.42860682030941723212e-6f), r);
  F p = set1(1.3981999507e-3f);
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  p = add(p, set1(1.0f));
  return scale_by_pow2(p, n);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
