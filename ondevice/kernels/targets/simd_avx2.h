// AVX2 with FMA and F16C, and AVX-VNNI where ONDEVICE_TARGET_AVXVNNI is defined: two registers are sixteen
// lanes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "../code_tables.h"
#include "../interleave.h"

namespace ondevice {
namespace ONDEVICE_NS {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct B {
  __m256i a, b;
};

ONDEVICE_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ONDEVICE_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
ONDEVICE_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ONDEVICE_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ONDEVICE_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
ONDEVICE_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
ONDEVICE_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
ONDEVICE_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
ONDEVICE_INLINE F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
ONDEVICE_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
ONDEVICE_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
// Lanes of x that are above those of limit, or NaN; zeros for the others.
ONDEVICE_INLINE F above_or_zero(F x, F limit) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_LE_OQ), x.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_LE_OQ), x.b)};
}
ONDEVICE_INLINE F abs(F x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
ONDEVICE_INLINE __m256 max_magnitude(__m256 x, __m256 y) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(x), bits));
}
// The larger of |y| and a non-negative x, compared as integers: infinity and NaN are larger than any number.
ONDEVICE_INLINE F max_magnitude(F x, F y) { return {max_magnitude(x.a, y.a), max_magnitude(x.b, y.b)}; }
ONDEVICE_INLINE F round_even(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
ONDEVICE_INLINE __m256 pow2(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
ONDEVICE_INLINE F scale_by_pow2(F x, F n) {
  return {_mm256_mul_ps(x.a, pow2(n.a)), _mm256_mul_ps(x.b, pow2(n.b))};
}
ONDEVICE_INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
ONDEVICE_INLINE F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
ONDEVICE_INLINE void store_half(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
ONDEVICE_INLINE void store_int8(int8_t* p, F x) {
  const __m256i words =
      _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

ONDEVICE_INLINE I int_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
ONDEVICE_INLINE I widen_int8(const int8_t* p) {
  const __m128i bytes = load128(p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
ONDEVICE_INLINE I widen_uint8(const uint8_t* p) {
  const __m128i bytes = load128(p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
ONDEVICE_INLINE I set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
ONDEVICE_INLINE I add_int(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
// Those bits of each lane, a byte's value, that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE I pick_int(I x) {
  if constexpr (0xff >> RIGHT == MASK) return {_mm256_srli_epi32(x.a, RIGHT), _mm256_srli_epi32(x.b, RIGHT)};
  const __m256i mask = _mm256_set1_epi32(MASK);
  return {_mm256_and_si256(_mm256_srli_epi32(x.a, RIGHT), mask),
          _mm256_and_si256(_mm256_srli_epi32(x.b, RIGHT), mask)};
}
// Two integers of 16 bits in each lane, and acc + a * x + b * y.
struct Pair {
  __m256i a, b;
};
ONDEVICE_INLINE Pair pair_of(I x, I y) {
  return {_mm256_blend_epi16(x.a, _mm256_slli_epi32(y.a, 16), 0xaa),
          _mm256_blend_epi16(x.b, _mm256_slli_epi32(y.b, 16), 0xaa)};
}
// acc + the sum of two products of 16 bits in each lane.
ONDEVICE_INLINE __m256i add_word_products(__m256i acc, __m256i x, __m256i y) {
#if defined(ONDEVICE_TARGET_AVXVNNI)
  return _mm256_dpwssd_avx_epi32(acc, x, y);
#else
  return _mm256_add_epi32(acc, _mm256_madd_epi16(x, y));
#endif
}
ONDEVICE_INLINE I dot_pair(I acc, Pair p, int32_t x, int32_t y) {
  const __m256i both = _mm256_set1_epi32((x & 0xffff) | y * 65536);
  return {add_word_products(acc.a, p.a, both), add_word_products(acc.b, p.b, both)};
}
// acc + factor * sum, of sums and factors that fit 16 bits; factor_of makes a factor of an integer: its upper
// half is zero, so that the sign of a sum, which is the upper half of its lane, doesn't count.
ONDEVICE_INLINE I factor_of(I x) {
  return {_mm256_blend_epi16(x.a, _mm256_setzero_si256(), 0xaa),
          _mm256_blend_epi16(x.b, _mm256_setzero_si256(), 0xaa)};
}
ONDEVICE_INLINE I multiply_add(I acc, I sum, I factor) {
  return {add_word_products(acc.a, sum.a, factor.a), add_word_products(acc.b, sum.b, factor.b)};
}
ONDEVICE_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
ONDEVICE_INLINE B load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
ONDEVICE_INLINE B join_quarters(const Bytes16* q) {
  return {_mm256_set_m128i((__m128i)q[1], (__m128i)q[0]), _mm256_set_m128i((__m128i)q[3], (__m128i)q[2])};
}
// Those bits of each byte that are in `MASK` once they are RIGHT places further right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B pick_bits(B x) {
  const __m256i mask = _mm256_set1_epi8(MASK);
  if constexpr (RIGHT == 0) return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, RIGHT), mask),
          _mm256_and_si256(_mm256_srli_epi16(x.b, RIGHT), mask)};
}
// The entries of a table of 16 bytes.
ONDEVICE_INLINE B look_up(B nibbles, const uint8_t* table) {
  const __m256i entries = _mm256_broadcastsi128_si256(load128(table));
  return {_mm256_shuffle_epi8(entries, nibbles.a), _mm256_shuffle_epi8(entries, nibbles.b)};
}
// 2^(s - 127) of 16 bytes s below 255.
ONDEVICE_INLINE F load_powers(const uint8_t* p) {
  const __m128i bytes = load128(p);
  // 2^-127 has no exponent of its own: it is a subnormal number.
  const __m256i least = _mm256_set1_epi32(1 << 22);
  const __m256i low = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
  const __m256i high = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), 23);
  return {_mm256_castsi256_ps(_mm256_max_epi32(low, least)),
          _mm256_castsi256_ps(_mm256_max_epi32(high, least))};
}
template <int RIGHT, int MASK>
ONDEVICE_INLINE __m256i with_bits(__m256i codes, __m256i other) {
  other = RIGHT > 0 ? _mm256_srli_epi16(other, RIGHT > 0 ? RIGHT : 0)
                    : _mm256_slli_epi16(other, RIGHT > 0 ? 0 : -RIGHT);
  return _mm256_or_si256(codes, _mm256_and_si256(other, _mm256_set1_epi8(MASK)));
}
// The codes, with those bits of the other's bytes that are in `MASK` once they are RIGHT places further
// right.
template <int RIGHT, int MASK>
ONDEVICE_INLINE B with_bits(B codes, B other) {
  return {with_bits<RIGHT, MASK>(codes.a, other.a), with_bits<RIGHT, MASK>(codes.b, other.b)};
}
#if defined(ONDEVICE_TARGET_AVXVNNI)
// Lane i gains the dot product of its four codes with the four activations at `quad`.
ONDEVICE_INLINE I dot_q4(I acc, B codes, const int8_t* quad) {
  const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
  return {_mm256_dpbusd_avx_epi32(acc.a, codes.a, x), _mm256_dpbusd_avx_epi32(acc.b, codes.b, x)};
}
ONDEVICE_INLINE I dot_q8(I acc, B codes, const int8_t* quad) { return dot_q4(acc, codes, quad); }
ONDEVICE_INLINE I finish_q8(I acc, int32_t) { return acc; }
#else
// Pairs of products fit 16 bits for codes up to 63 (2 * 63 * 127), so nothing saturates.
ONDEVICE_INLINE I dot_q4(I acc, B codes, const int8_t* quad) {
  const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.a, x), ones)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.b, x), ones))};
}
// Codes up to 255 would saturate. Those of code - 128 have magnitudes up to 128, whose pairs of products fit
// (2 * 128 * 127), with the signs at the activations; finish_q8 adds the difference back.
ONDEVICE_INLINE __m256i dot_q8(__m256i acc, __m256i codes, __m256i x) {
  codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  const __m256i words = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
ONDEVICE_INLINE I dot_q8(I acc, B codes, const int8_t* quad) {
  const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
  return {dot_q8(acc.a, codes.a, x), dot_q8(acc.b, codes.b, x)};
}
ONDEVICE_INLINE I finish_q8(I acc, int32_t activation_sum) {
  return add_int(acc, set1_int(128 * activation_sum));
}
// Of codes up to 15, eight sums of dot_q4 fit 16 bits too (16 * 15 * 127). They need half of the
// multiplications, which several tokens wait for.
#define ONDEVICE_WORD_SUMS
struct Words {
  __m256i a, b;
};
ONDEVICE_INLINE Words words_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
ONDEVICE_INLINE Words dot_words(Words acc, B codes, const int8_t* quad) {
  const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
  acc = {_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(codes.a, x)),
         _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(codes.b, x))};
  // Additions stay in this order: GCC would add products first, for which there are too few registers.
  asm("" : "+x"(acc.a), "+x"(acc.b));
  return acc;
}
ONDEVICE_INLINE Words words_set1(int16_t x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
ONDEVICE_INLINE I add_words(I acc, Words sums, Words weights) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(sums.a, weights.a)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(sums.b, weights.b))};
}
// Each lane's integer in both of its words.
ONDEVICE_INLINE Words words_of(I x) {
  const Pair both = pair_of(x, x);
  return {both.a, both.b};
}
#endif
// Adds lanes i and i + 8, then i and i + 4, and so on.
ONDEVICE_INLINE float reduce_add(F x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// The bits of the largest of 16 non-negative lanes, compared as max_magnitude compares.
ONDEVICE_INLINE int32_t reduce_magnitude(F x) {
  const __m256i eight = _mm256_max_epi32(_mm256_castps_si256(x.a), _mm256_castps_si256(x.b));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// Bit i is set if lane i isn't zero.
ONDEVICE_INLINE uint32_t nonzero_lanes(F x) {
  const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, _mm256_setzero_ps(), _CMP_NEQ_UQ));
  const int b = _mm256_movemask_ps(_mm256_cmp_ps(x.b, _mm256_setzero_ps(), _CMP_NEQ_UQ));
  return static_cast<uint32_t>(a | b << 8);
}
ONDEVICE_INLINE __m256i sum_quads(__m256i bytes) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
}
// Rounds 64 values of at most 127 to int8. sums: of each 16. nibble_order: each 8 in the order 0 2 4 6 1 3 5
// 7.
ONDEVICE_INLINE void store_codes(int8_t* codes, F x, F y, F z, F w, bool nibble_order, int32_t sums[4]) {
  store_int8(codes, x);
  store_int8(codes + 16, y);
  store_int8(codes + 32, z);
  store_int8(codes + 48, w);
  __m256i added[2];
  for (int i = 0; i < 2; ++i) {
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i));
    added[i] = sum_quads(bytes);
    if (nibble_order)
      bytes = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                             0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32 * i), bytes);
  }
  __m256i four = _mm256_hadd_epi32(added[0], added[1]);
  four = _mm256_hadd_epi32(four, four);  // in the low half of the first 16 and the third, then the others
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums),
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
}
// Into the second cache: on the way to the first, prefetches hold up loads that miss it.
ONDEVICE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// Chains of additions that products are spread over at most.
#if defined(ONDEVICE_TARGET_AVXVNNI)
constexpr int kMostChains = 4;
#else
constexpr int kMostChains = 8;
#endif
constexpr int kTokenTile = 4;
constexpr int kScaledTokens = 4;  // whose sums stay in registers beside those that scales multiply
// Most tokens of a pass over two tiles side by side; 0 where that brings nothing.
constexpr int kPairedTokens = 0;

}  // namespace ONDEVICE_NS
}  // namespace ondevice
