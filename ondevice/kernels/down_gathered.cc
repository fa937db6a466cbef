#include "interleave.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// The sums of feed_forward.cc, block by block, for neurons that fire alone and rows as they are stored.

typedef float Floats16 __attribute__((vector_size(64)));

// c of one block's neurons that fire for 16 groups side by side: what ScaledBlock is for all neurons and one
// group. A group is a lane, so nothing is reduced across lanes; neurons at zero would change nothing.
struct GatheredScales {
  int8_t codes[kGroup / 4][kTile][4];  // of four neurons, then of group; zeros up to the next four
  float scale[kTile];
  float sum[kTile];
};

// First n (0 to 16) halves as floats.
F load_halves(const uint8_t* p, int64_t n) {
  uint16_t v[kTile] = {0};
  memcpy(v, p, static_cast<size_t>(n < kTile ? n : kTile) * sizeof(uint16_t));
  return load_half(v);
}

// Scales and their inverses from the largest magnitudes of 16 lanes, as quantize_group has them of one.
void lane_scales(F magnitude, float* scale, float* inverse) {
  float lanes[kTile];
  store(lanes, magnitude);
  const Floats16 m = load_vector<Floats16>(lanes);
  const Floats16 zeros = {}, nans = zeros + __builtin_nanf("");
  const auto number = m < __builtin_inff();
  const Floats16 inverses = number & (m >= 0x1p-120f) ? 127.0f / m : zeros;
  const Floats16 scales = (number ? m : nans) / 127.0f;
  memcpy(inverse, &inverses, sizeof(inverses));
  memcpy(scale, &scales, sizeof(scales));
}

// lanes: (16, groups), lane n % 16 of group g at [n % 16][g], from the first of `live` groups on.
template <int BITS>
void scale_gathered(const GatheredBlock& block, int64_t groups, int64_t g0, int64_t live, const float* h,
                    float* lanes, GatheredScales* out) {
  constexpr float kMiddle = BITS == 4 ? 8.0f : 128.0f;
  const int64_t affine = groups * kGroup * BITS / 8;
  float c[kGroup][kTile];
  F magnitude = zero();
  for (int64_t k = 0; k < block.count; ++k) {
    const uint8_t* scales = block.rows[k] + affine + 2 * g0;
    const F s = load_halves(scales, live);
    const F offset = fma(s, set1(kMiddle), load_halves(scales + 2 * groups, live));
    const F v = set1(h[block.index[k]]);
    float* lane = lanes + block.index[k] % kTile * groups + g0;
    store_partial(lane, fma(v, offset, load_partial(lane, live)), live);
    const F scaled = mul(v, s);
    store(c[k], scaled);
    magnitude = max_magnitude(magnitude, scaled);
  }
  float inverse[kTile];
  lane_scales(magnitude, out->scale, inverse);
  const float largest = largest_magnitude(magnitude);
  if (largest != largest)
    // No value is converted that has no integer.
    for (int64_t k = 0; k < block.count; ++k)
      for (int64_t i = 0; i < kTile; ++i)
        if (out->scale[i] != out->scale[i]) c[k][i] = 0.0f;
  const F inverses = load(inverse);
  F sum = zero();
  for (int64_t k = 0; k < block.count; k += 4) {
    int8_t codes[4][kTile] = {};
    for (int64_t r = 0; r < 4 && k + r < block.count; ++r) {
      const F code = round_even(mul(load(c[k + r]), inverses));
      sum = add(sum, code);
      store_int8(codes[r], code);
    }
    Bytes16 quads[4];
    interleave_bytes(load_vector<Bytes16>(codes[0]), load_vector<Bytes16>(codes[1]),
                     load_vector<Bytes16>(codes[2]), load_vector<Bytes16>(codes[3]), quads);
    memcpy(out->codes[k / 4], quads, sizeof(quads));
  }
  store(out->sum, sum);
}

// W pieces of 16 bytes of every row, from number `piece` on. At 4 bits a byte has two outputs, so `low` and
// `high` are outputs of the same 16 bytes.
template <int BITS, int TT, int W>
void add_pieces(const uint8_t* const* rows, int64_t quads, int64_t piece, int64_t g0,
                const GatheredScales* scaled, float* y, int64_t y_stride) {
  constexpr int64_t kPieces = kGroup * BITS / 128, kOutputs = 128 / BITS;
  constexpr float kMiddle = BITS == 4 ? 8.0f : 128.0f;
  const int64_t first = piece / kPieces - g0, last = (piece + W - 1) / kPieces - g0;
  I low[TT][W], high[TT][W];
  for (int t = 0; t < TT; ++t)
    for (int w = 0; w < W; ++w) low[t][w] = high[t][w] = int_zero();
  for (int64_t q = 0; q < quads; ++q) {
    B raw[W];
    interleave_rows(rows + 4 * q, piece * 16, raw);
    for (int t = 0; t < TT; ++t) {
      const Quads x = two_quads(scaled[t].codes[q][first], scaled[t].codes[q][last]);
      for (int w = 0; w < W; ++w) {
        low[t][w] = BITS == 4 ? dot_q4(low[t][w], low_nibbles(raw[w]), x) : dot_q8(low[t][w], raw[w], x);
        if (BITS == 4) high[t][w] = dot_q4(high[t][w], high_nibbles(raw[w]), x);
      }
    }
  }
  for (int t = 0; t < TT; ++t) {
    order_pieces(low[t]);
    if (BITS == 4) order_pieces(high[t]);
    for (int w = 0; w < W; ++w) {
      const int64_t i = (piece + w) / kPieces - g0;
      const float sum = scaled[t].sum[i];
      const F scale = set1(scaled[t].scale[i]), middle = set1(kMiddle * sum);
      float* out = y + t * y_stride + (piece + w) * kOutputs;
      if (BITS == 8) low[t][w] = finish_q8(low[t][w], static_cast<int32_t>(sum));
      store(out, fma(scale, sub(to_float(low[t][w]), middle), load(out)));
      if (BITS == 4) store(out + kTile, fma(scale, sub(to_float(high[t][w]), middle), load(out + kTile)));
    }
  }
}

template <int BITS, int TT>
void gathered_tokens(const GatheredBlock& block, const GatheredBlock* next, int64_t groups, int64_t g_begin,
                     int64_t g_end, const float* h, int64_t h_stride, float* y, int64_t y_stride,
                     float* lanes, int64_t lanes_stride) {
  constexpr int64_t kPieces = kGroup * BITS / 128, kLine = 4;  // pieces of 16 bytes
  const int64_t quads = (block.count + 3) / 4;
  const uint8_t* rows[kGroup];
  // Rows that fill up the last four meet activations of 0.
  for (int64_t k = 0; k < quads * 4; ++k) rows[k] = block.rows[k < block.count ? k : 0];
  for (int64_t g0 = g_begin; g0 < g_end; g0 += kTile) {
    const int64_t live = g_end - g0 < kTile ? g_end - g0 : kTile;
    GatheredScales scaled[TT];
    for (int t = 0; t < TT; ++t)
      scale_gathered<BITS>(block, groups, g0, live, h + t * h_stride, lanes + t * lanes_stride, scaled + t);
    int64_t piece = g0 * kPieces;
    const int64_t end = piece + live * kPieces;
    for (; piece + kRowPieces <= end; piece += kRowPieces) {
      if (next && piece % kLine == 0)
        for (int64_t k = 0; k < next->count; ++k) prefetch(next->rows[k] + piece * 16);
      add_pieces<BITS, TT, kRowPieces>(rows, quads, piece, g0, scaled, y, y_stride);
    }
    for (; piece < end; ++piece) add_pieces<BITS, TT, 1>(rows, quads, piece, g0, scaled, y, y_stride);
  }
}

template <int BITS>
void gathered_all(const GatheredBlock* blocks, int64_t count, int64_t groups, int64_t g_begin, int64_t g_end,
                  const float* h, int64_t h_stride, int64_t tokens, float* y, int64_t y_stride, float* lanes,
                  int64_t lanes_stride) {
  // Sums of two tokens and of four pieces fill the registers.
  constexpr int64_t kTogether = kRowPieces == 1 ? kTokenTile : 2;
  for (int64_t b = 0; b < count; ++b) {
    const GatheredBlock* next = b + 1 < count ? blocks + b + 1 : nullptr;
    const float* values = h + b * kGroup;
    int64_t t = 0;
    for (; t + kTogether <= tokens; t += kTogether)
      gathered_tokens<BITS, kTogether>(blocks[b], next, groups, g_begin, g_end, values + t * h_stride,
                                       h_stride, y + t * y_stride, y_stride, lanes + t * lanes_stride,
                                       lanes_stride);
    for (; kTogether > 2 && t + 2 <= tokens; t += 2)
      gathered_tokens<BITS, 2>(blocks[b], next, groups, g_begin, g_end, values + t * h_stride, h_stride,
                               y + t * y_stride, y_stride, lanes + t * lanes_stride, lanes_stride);
    if (t < tokens)
      gathered_tokens<BITS, 1>(blocks[b], next, groups, g_begin, g_end, values + t * h_stride, h_stride,
                               y + t * y_stride, y_stride, lanes + t * lanes_stride, lanes_stride);
  }
}

}  // namespace

void down_gathered(int bits, const GatheredBlock* blocks, int64_t count, int64_t groups, int64_t g_begin,
                   int64_t g_end, const float* h, int64_t h_stride, int64_t tokens, float* y,
                   int64_t y_stride, float* bias_lanes, int64_t lanes_stride) {
  if (bits == 4)
    gathered_all<4>(blocks, count, groups, g_begin, g_end, h, h_stride, tokens, y, y_stride, bias_lanes,
                    lanes_stride);
  else
    gathered_all<8>(blocks, count, groups, g_begin, g_end, h, h_stride, tokens, y, y_stride, bias_lanes,
                    lanes_stride);
}

void unzip_outputs(float* y, int64_t groups) {
  for (float* half = y; half < y + groups * kGroup; half += 2 * kTile) {
    float zipped[2 * kTile];
    memcpy(zipped, half, sizeof(zipped));
    for (int64_t i = 0; i < kTile; ++i) {
      half[2 * i] = zipped[i];
      half[2 * i + 1] = zipped[kTile + i];
    }
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
