// Declares the kernels of the target being compiled, and defines what several of them share. Include after
// simd.h.
#pragma once

#include <string.h>

#include <type_traits>

#include "../interleave.h"
#include "../kernel_table.h"
#include "simd.h"

namespace ondevice {
namespace ONDEVICE_NS {

void quantize_activations(const float* x, int64_t cols, bool nibble_order, const QuantizedRows& out,
                          int64_t t);
void linear_quantized(const RowFormat& format, const uint8_t* tiles, const QuantizedRows& x, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                      int64_t begin, int64_t end);
void linear_two_level(const RowFormat& format, const uint8_t* tiles, const QuantizedRows& x, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                      int64_t begin, int64_t end);
void linear_gathered(const RowFormat& format, const uint8_t* const* rows, const uint8_t* const* next,
                     const uint8_t* affine, const QuantizedRows& x, float* out);
void linear_half(const uint16_t* weights, int64_t padded_cols, const float* x, int64_t tokens,
                 const float* bias, const float* added, float* out, int64_t out_stride, int64_t begin,
                 int64_t end);
void linear_high(const RowFormat& format, const uint8_t* planes, const QuantizedRows& x, int64_t tokens,
                 const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                 int64_t begin, int64_t end);
void join_codes(int bits, const uint8_t* high, const uint8_t* low, uint8_t* codes);
void activate(const GateForm& form, const float* gate, const float* up, float* h, int64_t n);
void down_quantized(int bits, const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride,
                    int64_t tokens, float* y, int64_t y_stride, float* bias_lanes, int64_t lanes_stride);
void down_selected(int bits, const SelectedRows& neurons, int64_t groups, int64_t g_begin, int64_t g_end,
                   const float* h, int64_t h_stride, int64_t tokens, float* y, int64_t y_stride,
                   float* bias_lanes, int64_t lanes_stride);
void unzip_outputs(float* y, int64_t groups);
void down_half(const uint16_t* rows, int64_t stride, int64_t neurons, const float* h, int64_t h_stride,
               int64_t tokens, float* y, int64_t y_stride, int64_t begin, int64_t end);
void add_bias_lanes(const float* y, const float* lanes, const float* added, float* out, int64_t n);
void norm(const float* x, const Norm& norm, int64_t n, float* out);
void soft_cap(float* x, float cap, int64_t n);
void rope(float* x, const float* cos, const float* sin, int64_t head_dim);
void kv_write(const KvView& kv, int64_t position, const float* k, const float* v);
void kv_move(const KvView& kv, int64_t from, int64_t to);
void attention(const AttentionArgs& args, int64_t head, int64_t q_begin, int64_t q_end, float* scratch);
void gated_delta(const DeltaArgs& args, int64_t tokens, int64_t begin, int64_t end, float* scratch);
void short_conv(const ConvArgs& args, int64_t tokens, int64_t begin, int64_t end);
void mamba2(const MixerArgs& args, int64_t tokens, int64_t begin, int64_t end, float* scratch);
void mixer_gate(const MixerArgs& args, const float* gates, int64_t first, int64_t n, float* out);
void sigmoid_gate(const float* gates, float* x, int64_t n);
void dequantize_row(const RowFormat& format, const uint8_t* codes, const void* scales, const uint16_t* biases,
                    int64_t groups, float* out);
bool quantize_block(const RowFormat& format, const float* x, int64_t rows, int64_t cols, uint8_t* codes,
                    uint16_t* scales, uint16_t* biases);
bool quantize_lanes(const RowFormat& format, const float* x, int64_t stride, int64_t rows, int64_t cols,
                    uint8_t* codes, uint16_t* scales, uint16_t* biases);
void half_to_float(const uint16_t* in, float* out, int64_t n);
bool float_to_half(const float* in, uint16_t* out, int64_t n);
void largest(const float* x, int64_t n, int64_t count, int32_t* ids, float* best);
float sum_of_exps(const float* x, int64_t n, float top);
void add_products(const float* a, int64_t count, const float* b, int64_t b_stride, float* out, int64_t n);
void subtract_products(const double* a, int64_t count, const double* b, int64_t b_stride, double* out,
                       int64_t n);

// The largest of 16 lanes from max_magnitude. NaN if one of them isn't finite.
ONDEVICE_INLINE float largest_magnitude(F lanes) {
  constexpr int32_t kInfinity = 0x7f800000, kNan = 0x7fc00000;
  const int32_t largest = reduce_magnitude(lanes), bits = largest < kInfinity ? largest : kNan;
  float magnitude;
  memcpy(&magnitude, &bits, sizeof(magnitude));
  return magnitude;
}

// 127 / magnitude, which maps values to int8 codes. 0 for magnitudes below 2^-120, where it could overflow.
ONDEVICE_INLINE float int8_inverse(float magnitude) {
  return magnitude >= 0x1p-120f ? 127.0f / magnitude : 0.0f;
}

// Makes COUNT times 16 values multiples of a scale, from -127 to 127, and returns that. If one of them isn't
// finite, the scale is NaN and they become 0: no integer can represent them, and every output is NaN.
template <int COUNT>
ONDEVICE_INLINE float scale_to_int8(F* v) {
  F lanes = zero();
  for (int i = 0; i < COUNT; ++i) lanes = max_magnitude(lanes, v[i]);
  const float magnitude = largest_magnitude(lanes), inverse = int8_inverse(magnitude);
  for (int i = 0; i < COUNT; ++i) v[i] = magnitude == magnitude ? mul(v[i], set1(inverse)) : zero();
  return magnitude / 127.0f;
}

// cap * tanh(x / cap), as cap * (1 - 2 / (1 + e^(2 x / cap))). NaN and infinity become NaN.
ONDEVICE_INLINE F soft_cap_lanes(F x, F cap) {
  const F one = set1(1.0f), doubled = mul(set1(2.0f), div(x, cap));
  const F tanh = sub(one, div(set1(2.0f), add(one, exp_lanes(doubled))));
  return fma(x, zero(), mul(tanh, cap));
}

// A number of tokens or of tiles that are computed together.
template <int N>
using Count = std::integral_constant<int, N>;

// Bytes between what is multiplied and what is prefetched.
constexpr int64_t kAhead = 4096;

// Codes of BITS bits as dot products take them: unsigned bytes.
template <int BITS>
struct Integers {
  static constexpr int kBits = BITS, kTop = (1 << BITS) - 1;
  static B of(B codes) { return codes; }
};

// E2M1 codes: twice their values, which are integers from -12 to 12, and 12 more.
struct Floats4 {
  static constexpr int kBits = 4, kTop = 24, kZero = 12;
  static B of(B nibbles) { return look_up(nibbles, kE2m1Integers); }
};

// Codes of kTableBytes, integers from -127 to 113 and 128 more.
struct Table4 {
  static constexpr int kBits = 4, kTop = 255, kZero = 128;
  static B of(B nibbles) { return look_up(nibbles, kTableBytes); }
};

// Adds products of codes with activations, less some on targets that re-centre codes that don't fit signed
// bytes; `finish_codes` adds them back.
template <class CODES>
ONDEVICE_INLINE I dot_codes(I acc, B codes, const int8_t* quad) {
  return CODES::kTop > 127 ? dot_q8(acc, codes, quad) : dot_q4(acc, codes, quad);
}
template <class CODES>
ONDEVICE_INLINE I finish_codes(I sum, int32_t activation_sum) {
  return CODES::kTop > 127 ? finish_q8(sum, activation_sum) : sum;
}

// Calls run(Count<0>()) to run(Count<N - 1>()).
template <int N, class Run>
ONDEVICE_INLINE void each(const Run& run) {
  if constexpr (N > 0) {
    each<N - 1>(run);
    run(Count<N - 1>());
  }
}

#if defined(ONDEVICE_WORD_SUMS)
// Adds the products of COUNT vectors of a block's codes to total, WEIGHT times: of codes of 4 bits, or of the
// low nibbles of 8, or with a WEIGHT of 16 of the high ones.
template <class CODES, int TT, int COUNT, int WEIGHT>
ONDEVICE_INLINE void add_nibbles(const uint8_t* block, const int8_t* x, int64_t stride, I* total) {
  constexpr int BITS = CODES::kBits;
  Words words[TT];
  for (int t = 0; t < TT; ++t) words[t] = words_zero();
  // The loop stays one: unrolled, GCC keeps more values than there are registers.
#pragma GCC unroll 1
  for (int v = 0; v < COUNT; ++v) {
    const B raw = load_bytes(block + 64 * v),
            codes = CODES::of(WEIGHT > 1 ? high_nibbles(raw) : low_nibbles(raw));
    if (WEIGHT == 1) prefetch(block + 64 * v + kAhead);
    for (int t = 0; t < TT; ++t) words[t] = dot_words(words[t], codes, x + t * stride + 32 / BITS * v);
    if (BITS == 8) continue;
    const B odd = CODES::of(high_nibbles(raw));
    for (int t = 0; t < TT; ++t) words[t] = dot_words(words[t], odd, x + t * stride + 8 * v + 4);
  }
  for (int t = 0; t < TT; ++t) total[t] = add_words(total[t], words[t], words_set1(WEIGHT));
}

// dot_blocks of one block, by sums of eight in 16 bits, of four where codes may exceed 15. Codes of 8 bits
// are multiplied as two of 4, one after the other: accumulators of both are more than there are registers.
template <class CODES, int TT, int COLS>
ONDEVICE_INLINE void dot_block_words(const uint8_t* block, const int8_t* x, int64_t stride, F* sums) {
  constexpr int BITS = CODES::kBits, kPart = BITS == 4 && CODES::kTop > 15 ? 16 : 32;  // columns
  constexpr int kParts = COLS / kPart, kVectors = BITS * kPart / 32;                   // 64 bytes each
  I total[TT];
  for (int t = 0; t < TT; ++t) total[t] = int_zero();
#pragma GCC unroll 1
  for (int part = 0; part < kParts; ++part, block += 64 * kVectors, x += kPart) {
    add_nibbles<CODES, TT, kVectors, 1>(block, x, stride, total);
    if (BITS == 8) add_nibbles<CODES, TT, kVectors, 16>(block, x, stride, total);
  }
  for (int t = 0; t < TT; ++t) sums[t] = to_float(total[t]);
}
#endif

// The codes of four columns of 16 rows: quad PLACE of the eight of a half block; see interleave.h.
template <int BITS, int PLACE>
ONDEVICE_INLINE B quad_codes(const uint8_t* half_block) {
  constexpr int kLow = low_plane_bits(BITS), kHigh = BITS - kLow;
  constexpr int kRight = PLACE * kLow % 8, kMask = (1 << kLow) - 1;
  const B low = pick_bits<kRight, kMask>(load_bytes(half_block + 64 * (PLACE * kLow / 8)));
  if constexpr (kHigh > 0) {
    const B plane = load_bytes(half_block + 64 * (kLow + PLACE * kHigh / 8));
    return with_bits<PLACE * kHigh % 8 - kLow, ((1 << kHigh) - 1) << kLow>(low, plane);
  }
  return low;
}

// The codes of columns 4 QUAD to 4 QUAD + 3 of a block of 16 rows, as dot products take them.
template <class CODES, int QUAD>
ONDEVICE_INLINE B block_quad(const uint8_t* block) {
  constexpr int BITS = CODES::kBits;
  if constexpr (BITS == 8)
    return load_bytes(block + 64 * QUAD);
  else
    return CODES::of(quad_codes<BITS, QUAD % 8>(block + QUAD / 8 * half_block_bytes(BITS)));
}

// Fetches what is multiplied soon: `bytes` bytes, kAhead behind `at`.
ONDEVICE_INLINE void prefetch_ahead(const uint8_t* at, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) prefetch(at + line + kAhead);
}

// dot_blocks at 5 and 6 bits. Codes are below 64, so that dot_q4 is exact.
template <int BITS, int TT, int N, int COLS>
ONDEVICE_INLINE void dot_high_blocks(const uint8_t* const* blocks, const int8_t* x, int64_t stride,
                                     F (*sums)[TT]) {
  constexpr bool kTwoChains = N * TT <= kMostChains / 2;
  I a[N][TT], b[N][TT];
  for (int n = 0; n < N; ++n)
    for (int t = 0; t < TT; ++t) a[n][t] = b[n][t] = int_zero();
  for (int half = 0; half < COLS / 32; ++half) {
    const int64_t at = half * half_block_bytes(BITS);
    for (int n = 0; n < N; ++n) prefetch_ahead(blocks[n] + at, half_block_bytes(BITS));
#if defined(ONDEVICE_WORD_SUMS)
    if constexpr (TT > 1) {
      constexpr int kRun = BITS > 5 ? 2 : 4;  // quads whose sums fit 16 bits
      for (int n = 0; n < N; ++n)
        each<8 / kRun>([&](auto run) ONDEVICE_INLINED {
          Words words[TT];
          for (int t = 0; t < TT; ++t) words[t] = words_zero();
          each<kRun>([&](auto place) ONDEVICE_INLINED {
            constexpr int kPlace = decltype(run)::value * kRun + decltype(place)::value;
            const B codes = quad_codes<BITS, kPlace>(blocks[n] + at);
            for (int t = 0; t < TT; ++t)
              words[t] = dot_words(words[t], codes, x + t * stride + 32 * half + 4 * kPlace);
          });
          for (int t = 0; t < TT; ++t) a[n][t] = add_words(a[n][t], words[t], words_set1(1));
        });
      continue;
    }
#endif
    each<8>([&](auto place) ONDEVICE_INLINED {
      constexpr int kPlace = decltype(place)::value;
      B codes[N];
      for (int n = 0; n < N; ++n) codes[n] = quad_codes<BITS, kPlace>(blocks[n] + at);
      for (int t = 0; t < TT; ++t)
        for (int n = 0; n < N; ++n) {
          I& chain = kTwoChains && kPlace % 2 ? b[n][t] : a[n][t];
          chain = dot_q4(chain, codes[n], x + t * stride + 32 * half + 4 * kPlace);
        }
    });
  }
  for (int n = 0; n < N; ++n)
    for (int t = 0; t < TT; ++t) sums[n][t] = to_float(kTwoChains ? add_int(a[n][t], b[n][t]) : a[n][t]);
}

// Sums of the code products of N blocks of 16 rows and COLS columns, 32 or 64, with TT tokens, whose codes
// are `stride` bytes apart (addresses in an array cost AVX-512 a seventh of a prompt's products). They are
// exact, so their order doesn't matter: with few tokens, each has two chains of additions, because one would
// leave the multiplier idle. ahead: bytes from what is multiplied to what is fetched.
template <class CODES, int TT, int N, int COLS = kGroup>
ONDEVICE_INLINE void dot_blocks(const uint8_t* const* blocks, const int8_t* x, int64_t stride,
                                const int32_t* int_sums, F (*sums)[TT], int64_t ahead = kAhead) {
  constexpr int BITS = CODES::kBits;
  if constexpr (in_planes(BITS)) return dot_high_blocks<BITS, TT, N, COLS>(blocks, x, stride, sums);
#if defined(ONDEVICE_WORD_SUMS)
  if (TT > 1 && (BITS == 8 || CODES::kTop < 32)) {
    for (int n = 0; n < N; ++n) dot_block_words<CODES, TT, COLS>(blocks[n], x, stride, sums[n]);
    return;
  }
#endif
  constexpr bool kTwoChains = N * TT <= kMostChains / 2;
  I a[N][TT], b[N][TT];
  for (int n = 0; n < N; ++n)
    for (int t = 0; t < TT; ++t) a[n][t] = b[n][t] = int_zero();
  // Eight columns at a time.
  for (int v = 0; v < COLS / 8; ++v) {
    B low[N], high[N];
    for (int n = 0; n < N; ++n) {
      const uint8_t* at = blocks[n] + 16 * BITS * v;
      const B raw = load_bytes(at);
      prefetch(at + ahead);
      if (BITS == 8) prefetch(at + 64 + ahead);
      low[n] = BITS == 4 ? CODES::of(low_nibbles(raw)) : raw;
      high[n] = BITS == 4 ? CODES::of(high_nibbles(raw)) : load_bytes(at + 64);
    }
    for (int t = 0; t < TT; ++t)
      for (int n = 0; n < N; ++n) {
        I& second = kTwoChains ? b[n][t] : a[n][t];
        a[n][t] = dot_codes<CODES>(a[n][t], low[n], x + t * stride + 8 * v);
        second = dot_codes<CODES>(second, high[n], x + t * stride + 8 * v + 4);
      }
  }
  for (int n = 0; n < N; ++n)
    for (int t = 0; t < TT; ++t) {
      if (kTwoChains) a[n][t] = add_int(a[n][t], b[n][t]);
      sums[n][t] = to_float(finish_codes<CODES>(a[n][t], int_sums[t]));
    }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
