// AVX-512 (F, BW, DQ, VL, VNNI): one register is sixteen lanes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace ondevice {
namespace avx512 {

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct B {  // 64 unsigned bytes
  __m512i v;
};

static inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline F set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F zero() { return {_mm512_setzero_ps()}; }
static inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where a is not the larger, as the comparison a > b ? a : b.
static inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline F round_even(F a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline F scale_by_pow2(F a, F n) {
  const __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
}
static inline F load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline void store_half(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline F load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
static inline F load_uint8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Rounds to nearest even and stores the low byte; |a| <= 127.
static inline void store_int8(int8_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

static inline I int_zero() { return {_mm512_setzero_si512()}; }
static inline I add_int(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline B load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static inline B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(0x0f))}; }
static inline B high_nibbles(B a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0f))};
}
// Lane i gains the dot product of its four codes with the four activations at `quad`.
static inline I dot_q4(I acc, B codes, const int8_t* quad) {
  return {_mm512_dpbusd_epi32(acc.v, codes.v, _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(quad)))};
}
static inline I dot_q8(I acc, B codes, const int8_t* quad) { return dot_q4(acc, codes, quad); }
// Where codes had to be re-centred to fit signed bytes, adds 128 times the activations' sum back.
static inline I finish_q8(I acc, int32_t) { return acc; }
static inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

constexpr int kTokenTile = 8;

}  // namespace avx512
}  // namespace ondevice
