// AVX-512 (F, BW, DQ, VL, VNNI): one register is sixteen lanes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "../code_tables.h"
#include "../interleave.h"

namespace ondevice {
namespace ONDEVICE_NS {

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct B {  // 64 unsigned bytes
  __m512i v;
};

ONDEVICE_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
ONDEVICE_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
ONDEVICE_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
ONDEVICE_INLINE F zero() { return {_mm512_setzero_ps()}; }
ONDEVICE_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
ONDEVICE_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
ONDEVICE_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
ONDEVICE_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
ONDEVICE_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where a is not the larger, as the comparison a > b ? a : b.
ONDEVICE_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
ONDEVICE_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
// Lanes of x that are above those of limit, or NaN; zeros for the others.
ONDEVICE_INLINE F above_or_zero(F x, F limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLE_UQ), x.v)};
}
ONDEVICE_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
// The larger of |b| and a non-negative a, compared as integers: infinity and NaN are larger than any number.
ONDEVICE_INLINE F max_magnitude(F a, F b) {
  return {_mm512_castsi512_ps(
      _mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(_mm512_abs_ps(b.v))))};
}
ONDEVICE_INLINE F round_even(F a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
ONDEVICE_INLINE F scale_by_pow2(F a, F n) {
  const __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
}
ONDEVICE_INLINE F load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
ONDEVICE_INLINE void store_half(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
#define ONDEVICE_MASKS
// First n (0 to 16) values, zeros behind them.
ONDEVICE_INLINE __mmask16 first_lanes(int64_t n) { return _cvtu32_mask16((1u << (n < 16 ? n : 16)) - 1); }
ONDEVICE_INLINE F load_partial(const float* p, int64_t n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
ONDEVICE_INLINE void store_partial(float* p, F a, int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
ONDEVICE_INLINE F load_half_partial(const uint16_t* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
// Rounds to nearest even and stores the low byte; |a| <= 127.
ONDEVICE_INLINE void store_int8(int8_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

ONDEVICE_INLINE I int_zero() { return {_mm512_setzero_si512()}; }
ONDEVICE_INLINE I widen_int8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
ONDEVICE_INLINE I widen_uint8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
ONDEVICE_INLINE I set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
ONDEVICE_INLINE I add_int(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
// Those bits of each lane, a byte's value, that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE I pick_int(I a) {
  if constexpr (0xff >> RIGHT == MASK) return {_mm512_srli_epi32(a.v, RIGHT)};
  return {_mm512_and_si512(_mm512_srli_epi32(a.v, RIGHT), _mm512_set1_epi32(MASK))};
}
// acc + factor * sum, of sums and factors that fit 16 bits; factor_of makes a factor of an integer: its upper
// half is zero, so that the sign of a sum, which is the upper half of its lane, doesn't count.
ONDEVICE_INLINE I factor_of(I a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }
ONDEVICE_INLINE I multiply_add(I acc, I sum, I factor) {
  return {_mm512_dpwssd_epi32(acc.v, sum.v, factor.v)};
}
// Two integers of 16 bits in each lane, and acc + a * x + b * y.
struct Pair {
  __m512i v;
};
ONDEVICE_INLINE Pair pair_of(I a, I b) {
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, a.v, _mm512_slli_epi32(b.v, 16))};
}
ONDEVICE_INLINE I dot_pair(I acc, Pair p, int32_t x, int32_t y) {
  return {_mm512_dpwssd_epi32(acc.v, p.v, _mm512_set1_epi32((x & 0xffff) | y * 65536))};
}
ONDEVICE_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
ONDEVICE_INLINE B load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
ONDEVICE_INLINE B join_quarters(const Bytes16* q) {
  const __m512i low = _mm512_inserti32x4(_mm512_castsi128_si512((__m128i)q[0]), (__m128i)q[1], 1);
  return {_mm512_inserti32x4(_mm512_inserti32x4(low, (__m128i)q[2], 2), (__m128i)q[3], 3)};
}
// Those bits of each byte that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B pick_bits(B a) {
  if constexpr (RIGHT == 0) return {_mm512_and_si512(a.v, _mm512_set1_epi8(MASK))};
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, RIGHT), _mm512_set1_epi8(MASK))};
}
// The entries of a table of 16 bytes.
ONDEVICE_INLINE B look_up(B nibbles, const uint8_t* table) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), nibbles.v)};
}
// 2^(s - 127) of 16 bytes s below 255.
ONDEVICE_INLINE F load_powers(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  // 2^-127 has no exponent of its own: it is a subnormal number.
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(bytes, 23), _mm512_set1_epi32(1 << 22)))};
}
// The codes, with those bits of the other's bytes that are in `MASK` once they are RIGHT places further
// right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B with_bits(B codes, B other) {
  const __m512i moved = RIGHT > 0 ? _mm512_srli_epi16(other.v, RIGHT > 0 ? RIGHT : 0)
                                  : _mm512_slli_epi16(other.v, RIGHT > 0 ? 0 : -RIGHT);
  // 0xf8: a | (b & c)
  return {_mm512_ternarylogic_epi64(codes.v, moved, _mm512_set1_epi8(MASK), 0xf8)};
}
// Lane i gains the dot product of its four codes with the four activations at `quad`.
ONDEVICE_INLINE I dot_q4(I acc, B codes, const int8_t* quad) {
  return {_mm512_dpbusd_epi32(acc.v, codes.v, _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(quad)))};
}
ONDEVICE_INLINE I dot_q8(I acc, B codes, const int8_t* quad) { return dot_q4(acc, codes, quad); }

// 64 bytes of each of four rows -> quads with a byte of each row. out[0] has the first four bytes of every
// 16, out[1] the next four, and so on.
#define ONDEVICE_WIDE_ROWS
constexpr int kRowPieces = 4;
ONDEVICE_INLINE void interleave_rows(const uint8_t* const* rows, int64_t at, B (&out)[kRowPieces]) {
  const __m512i a = _mm512_loadu_si512(rows[0] + at), b = _mm512_loadu_si512(rows[1] + at);
  const __m512i c = _mm512_loadu_si512(rows[2] + at), d = _mm512_loadu_si512(rows[3] + at);
  const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
  out[0].v = _mm512_unpacklo_epi16(ab_low, cd_low);
  out[1].v = _mm512_unpackhi_epi16(ab_low, cd_low);
  out[2].v = _mm512_unpacklo_epi16(ab_high, cd_high);
  out[3].v = _mm512_unpackhi_epi16(ab_high, cd_high);
}
// Sums of products of interleave_rows -> the order of the rows: p[i] has the i-th 16 bytes.
ONDEVICE_INLINE void order_pieces(I (&p)[kRowPieces]) {
  const __m512i low01 = _mm512_shuffle_i32x4(p[0].v, p[1].v, 0x44);
  const __m512i high01 = _mm512_shuffle_i32x4(p[0].v, p[1].v, 0xee);
  const __m512i low23 = _mm512_shuffle_i32x4(p[2].v, p[3].v, 0x44);
  const __m512i high23 = _mm512_shuffle_i32x4(p[2].v, p[3].v, 0xee);
  p[0].v = _mm512_shuffle_i32x4(low01, low23, 0x88);
  p[1].v = _mm512_shuffle_i32x4(low01, low23, 0xdd);
  p[2].v = _mm512_shuffle_i32x4(high01, high23, 0x88);
  p[3].v = _mm512_shuffle_i32x4(high01, high23, 0xdd);
}
// Four values of at most 127 in each lane -> four int8 side by side. Returns their sum in each lane.
ONDEVICE_INLINE F store_quads(int8_t* out, const F (&v)[4]) {
  const __m512i a = _mm512_cvtps_epi32(v[0].v), b = _mm512_cvtps_epi32(v[1].v);
  const __m512i c = _mm512_cvtps_epi32(v[2].v), d = _mm512_cvtps_epi32(v[3].v);
  __m512i bytes = _mm512_mask_blend_epi8(0x2222222222222222, a, _mm512_slli_epi32(b, 8));
  bytes = _mm512_mask_blend_epi8(0x4444444444444444, bytes, _mm512_slli_epi32(c, 16));
  _mm512_storeu_si512(out, _mm512_mask_blend_epi8(0x8888888888888888, bytes, _mm512_slli_epi32(d, 24)));
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d)))};
}
// Four activations for the lower eight lanes and four for the upper eight.
struct Quads {
  __m512i v;
};
ONDEVICE_INLINE Quads two_quads(const int8_t* first, const int8_t* second) {
  return {_mm512_inserti64x4(_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(first)),
                             _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(second)), 1)};
}
ONDEVICE_INLINE I dot_q4(I acc, B codes, Quads x) { return {_mm512_dpbusd_epi32(acc.v, codes.v, x.v)}; }
ONDEVICE_INLINE I dot_q8(I acc, B codes, Quads x) { return dot_q4(acc, codes, x); }

// Adds 128 times the activations' sum back on targets that re-centre codes to fit signed bytes; not this one.
ONDEVICE_INLINE I finish_q8(I acc, int32_t) { return acc; }
// Adds lanes i and i + 8, then i and i + 4, and so on.
ONDEVICE_INLINE float reduce_add(F a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// The bits of the largest of 16 non-negative lanes, compared as max_magnitude compares.
ONDEVICE_INLINE int32_t reduce_magnitude(F a) { return _mm512_reduce_max_epi32(_mm512_castps_si512(a.v)); }
// Bit i is set if lane i isn't zero.
ONDEVICE_INLINE uint32_t nonzero_lanes(F a) {
  return _cvtmask16_u32(_mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_NEQ_UQ));
}
// Rounds 64 values of at most 127 to int8. sums: of each 16. nibble_order: each 8 in the order 0 2 4 6 1 3 5
// 7.
ONDEVICE_INLINE void store_codes(int8_t* codes, F a, F b, F c, F d, bool nibble_order, int32_t sums[4]) {
  const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(a.v), _mm512_cvtps_epi32(b.v));
  const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(c.v), _mm512_cvtps_epi32(d.v));
  // Packing works within 128-bit lanes; this puts the quads back in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
  __m512i added = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
  added = _mm512_add_epi32(added, _mm512_shuffle_epi32(added, _MM_PERM_BADC));
  added = _mm512_add_epi32(added, _mm512_shuffle_epi32(added, _MM_PERM_CDAB));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums),
                   _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, added)));
  if (nibble_order)
    bytes = _mm512_shuffle_epi8(
        bytes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)));
  _mm512_storeu_si512(codes, bytes);
}
// Into the second cache: on the way to the first, prefetches hold up loads that miss it.
ONDEVICE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// Chains of additions that products are spread over at most.
constexpr int kMostChains = 8;
constexpr int kTokenTile = 8;
constexpr int kScaledTokens = 4;  // whose sums stay in registers beside those that scales multiply
// Most tokens of a pass over two tiles side by side; 0 where that brings nothing.
constexpr int kPairedTokens = 4;

}  // namespace ONDEVICE_NS
}  // namespace ondevice
