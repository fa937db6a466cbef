#include "interleave.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// A neuron's down column is quantised along the model dimension, so its scale varies inside a sum over
// neurons. It moves to the activation: c = h * scale, quantised to int8 per block of 64 stored neurons
// (zeros included); then a block's sum is an exact integer dot product, and blocks are added in ascending
// order by fused multiply-adds. Codes count from their middle, 8 or 128, lest the rounding of c shift all
// outputs of a group alike; the biases move with it. Their share, sum of h * (bias + middle * scale), is the
// same for all 64 outputs of a group: it is kept in 16 lanes by neuron % 16 and added last.
//
// Layout of (group, block): four tiles of 16 outputs x 64 neurons, then 64 scales, then 64 biases.
constexpr int64_t kTilesPerGroup = kGroup / kTile;

template <int BITS>
constexpr int64_t down_block_bytes() {
  return kGroup * kGroup * BITS / 8 + 4 * kGroup;
}

// c of one block, quantised, for TT tokens.
template <int TT>
struct ScaledBlock {
  int8_t codes[TT][kGroup];
  float scale[TT];
  int32_t sum[TT];
};

template <int BITS, int TT, bool NIBBLE_ORDER>
void scale_block(const uint16_t* scales, const float* h, int64_t h_stride, F* bias_sum,
                 ScaledBlock<TT>* out) {
  constexpr float kMiddle = BITS == 4 ? 8.0f : 128.0f;
  F s[4], offset[4];
  for (int i = 0; i < 4; ++i) {
    s[i] = load_half(scales + 16 * i);
    offset[i] = fma(s[i], set1(kMiddle), load_half(scales + kGroup + 16 * i));
  }
  for (int t = 0; t < TT; ++t) {
    F c[4];
    F magnitude = zero();
    for (int i = 0; i < 4; ++i) {
      const F v = load(h + t * h_stride + 16 * i);
      bias_sum[t] = fma(v, offset[i], bias_sum[t]);
      c[i] = mul(v, s[i]);
      magnitude = max_magnitude(magnitude, c[i]);
    }
    quantize_group(c, largest_magnitude(magnitude), NIBBLE_ORDER, out->codes[t], out->scale + t,
                   out->sum + t);
  }
}

// One block's part of 16 outputs. Centring is exact: both terms are integers below 2^24.
template <int BITS>
void add_centred(F sums, int32_t code_sum, float scale, float* out) {
  constexpr float kMiddle = BITS == 4 ? 8.0f : 128.0f;
  const F centred = sub(sums, set1(kMiddle * static_cast<float>(code_sum)));
  store(out, fma(set1(scale), centred, load(out)));
}

template <int BITS, int TT>
void down_tokens(const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride, float* y,
                 int64_t y_stride, float* lanes, int64_t lanes_stride) {
  constexpr int64_t kTileBytes = kTile * kGroup * BITS / 8;
  // Quantising is a chain of dependent steps: with few tokens, several blocks go through it side by side.
  constexpr int64_t kAhead = TT >= 4 ? 1 : 2;
  F bias_sum[TT];
  for (int t = 0; t < TT; ++t) bias_sum[t] = load(lanes + t * lanes_stride);
  for (int64_t first = 0; first < blocks; first += kAhead) {
    const int64_t count = blocks - first < kAhead ? blocks - first : kAhead;
    const uint8_t* block = group + first * down_block_bytes<BITS>();
    ScaledBlock<TT> scaled[kAhead];
    for (int64_t b = 0; b < count; ++b)
      scale_block<BITS, TT, BITS == 4>(
          reinterpret_cast<const uint16_t*>(block + b * down_block_bytes<BITS>() +
                                            kTilesPerGroup * kTileBytes),
          h + (first + b) * kGroup, h_stride, bias_sum, scaled + b);
    for (int64_t b = 0; b < count; ++b, block += down_block_bytes<BITS>()) {
      const int8_t* x[TT];
      for (int t = 0; t < TT; ++t) x[t] = scaled[b].codes[t];
      for (int64_t tile = 0; tile < kTilesPerGroup; ++tile) {
        F sums[TT];
        dot_block<BITS, TT>(block + tile * kTileBytes, x, scaled[b].sum, sums);
        for (int t = 0; t < TT; ++t)
          add_centred<BITS>(sums[t], scaled[b].sum[t], scaled[b].scale[t], y + t * y_stride + tile * kTile);
      }
    }
  }
  for (int t = 0; t < TT; ++t) store(lanes + t * lanes_stride, bias_sum[t]);
}

template <int BITS>
void down_all(const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride, int64_t tokens,
              float* y, int64_t y_stride, float* lanes, int64_t lanes_stride) {
  int64_t t = 0;
  for (; t + kTokenTile <= tokens; t += kTokenTile)
    down_tokens<BITS, kTokenTile>(group, blocks, h + t * h_stride, h_stride, y + t * y_stride, y_stride,
                                  lanes + t * lanes_stride, lanes_stride);
  for (; t + 2 <= tokens; t += 2)
    down_tokens<BITS, 2>(group, blocks, h + t * h_stride, h_stride, y + t * y_stride, y_stride,
                         lanes + t * lanes_stride, lanes_stride);
  for (; t < tokens; ++t)
    down_tokens<BITS, 1>(group, blocks, h + t * h_stride, h_stride, y + t * y_stride, y_stride,
                         lanes + t * lanes_stride, lanes_stride);
}

// c of one block's neurons that fire for 16 groups side by side: what ScaledBlock is for all neurons and one
// group. A group is a lane, so nothing is reduced across lanes; neurons at zero would change nothing.
struct GatheredScales {
  int8_t codes[kTile][kGroup];  // of group, then of neuron; zeros up to the next four
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
bool lane_scales(F magnitude, float* scale, float* inverse) {
  store(scale, magnitude);
  bool finite = true;
  for (int64_t i = 0; i < kTile; ++i) {
    const float m = scale[i];
    const bool number = m < __builtin_inff();
    inverse[i] = number ? int8_inverse(m) : 0.0f;
    scale[i] = (number ? m : __builtin_nanf("")) / 127.0f;
    finite = finite && number;
  }
  return finite;
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
  if (!lane_scales(magnitude, out->scale, inverse))
    // No value is converted that has no integer.
    for (int64_t k = 0; k < block.count; ++k)
      for (int64_t i = 0; i < kTile; ++i)
        if (out->scale[i] != out->scale[i]) c[k][i] = 0.0f;
  const F inverses = load(inverse);
  F sum = zero();
  int8_t codes[kGroup][kTile];
  for (int64_t k = 0; k < block.count; ++k) {
    const F code = round_even(mul(load(c[k]), inverses));
    sum = add(sum, code);
    store_int8(codes[k], code);
  }
  store(out->sum, sum);
  const int64_t padded = (block.count + 3) / 4 * 4;
  for (int64_t i = 0; i < kTile; ++i)
    for (int64_t k = 0; k < padded; ++k) out->codes[i][k] = k < block.count ? codes[k][i] : int8_t{0};
}

// 16 bytes of each of four rows as they lie: a byte of each of the four side by side.
B interleaved(const uint8_t* const* rows, int64_t at) {
  Bytes16 quads[4];
  interleave_bytes(load_vector<Bytes16>(rows[0] + at), load_vector<Bytes16>(rows[1] + at),
                   load_vector<Bytes16>(rows[2] + at), load_vector<Bytes16>(rows[3] + at), quads);
  return join_quarters(quads);
}

// At 4 bits a byte has two outputs of its neuron, so `low` and `high` are outputs of the same 16 bytes.
template <int BITS, int TT>
void gathered_tokens(const GatheredBlock& block, const GatheredBlock* next, int64_t groups, int64_t g_begin,
                     int64_t g_end, const float* h, int64_t h_stride, float* y, int64_t y_stride,
                     float* lanes, int64_t lanes_stride) {
  constexpr int64_t kRowBytes = kGroup * BITS / 8, kPiece = 16, kPieces = kRowBytes / kPiece;
  constexpr float kMiddle = BITS == 4 ? 8.0f : 128.0f;
  const int64_t quads = (block.count + 3) / 4;
  const uint8_t* rows[kGroup];
  // Rows that fill up the last four meet activations of 0.
  for (int64_t k = 0; k < quads * 4; ++k) rows[k] = block.rows[k < block.count ? k : 0];
  for (int64_t g0 = g_begin; g0 < g_end; g0 += kTile) {
    const int64_t live = g_end - g0 < kTile ? g_end - g0 : kTile;
    GatheredScales scaled[TT];
    for (int t = 0; t < TT; ++t)
      scale_gathered<BITS>(block, groups, g0, live, h + t * h_stride, lanes + t * lanes_stride, scaled + t);
    for (int64_t i = 0; i < live; ++i) {
      const int64_t g = g0 + i;
      if (next)
        for (int64_t k = 0; k < next->count; ++k) prefetch(next->rows[k] + g * kRowBytes);
      for (int64_t p = 0; p < kPieces; ++p) {
        I low[TT], high[TT];
        for (int t = 0; t < TT; ++t) low[t] = high[t] = int_zero();
        for (int64_t q = 0; q < quads; ++q) {
          const B raw = interleaved(rows + 4 * q, g * kRowBytes + p * kPiece);
          for (int t = 0; t < TT; ++t) {
            const int8_t* x = scaled[t].codes[i] + 4 * q;
            low[t] = BITS == 4 ? dot_q4(low[t], low_nibbles(raw), x) : dot_q8(low[t], raw, x);
            if (BITS == 4) high[t] = dot_q4(high[t], high_nibbles(raw), x);
          }
        }
        for (int t = 0; t < TT; ++t) {
          const float sum = scaled[t].sum[i];
          const F scale = set1(scaled[t].scale[i]), middle = set1(kMiddle * sum);
          float* out = y + t * y_stride + g * kGroup + p * kPiece * 8 / BITS;
          if (BITS == 8) low[t] = finish_q8(low[t], static_cast<int32_t>(sum));
          store(out, fma(scale, sub(to_float(low[t]), middle), load(out)));
          if (BITS == 4) store(out + kTile, fma(scale, sub(to_float(high[t]), middle), load(out + kTile)));
        }
      }
    }
  }
}

template <int BITS>
void gathered_all(const GatheredBlock* blocks, int64_t count, int64_t groups, int64_t g_begin, int64_t g_end,
                  const float* h, int64_t h_stride, int64_t tokens, float* y, int64_t y_stride, float* lanes,
                  int64_t lanes_stride) {
  for (int64_t b = 0; b < count; ++b) {
    const GatheredBlock* next = b + 1 < count ? blocks + b + 1 : nullptr;
    const float* values = h + b * kGroup;
    int64_t t = 0;
    for (; t + kTokenTile <= tokens; t += kTokenTile)
      gathered_tokens<BITS, kTokenTile>(blocks[b], next, groups, g_begin, g_end, values + t * h_stride,
                                        h_stride, y + t * y_stride, y_stride, lanes + t * lanes_stride,
                                        lanes_stride);
    for (; t + 2 <= tokens; t += 2)
      gathered_tokens<BITS, 2>(blocks[b], next, groups, g_begin, g_end, values + t * h_stride, h_stride,
                               y + t * y_stride, y_stride, lanes + t * lanes_stride, lanes_stride);
    if (t < tokens)
      gathered_tokens<BITS, 1>(blocks[b], next, groups, g_begin, g_end, values + t * h_stride, h_stride,
                               y + t * y_stride, y_stride, lanes + t * lanes_stride, lanes_stride);
  }
}

}  // namespace

void down_quantized(int bits, const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride,
                    int64_t tokens, float* y, int64_t y_stride, float* bias_lanes, int64_t lanes_stride) {
  if (bits == 4)
    down_all<4>(group, blocks, h, h_stride, tokens, y, y_stride, bias_lanes, lanes_stride);
  else
    down_all<8>(group, blocks, h, h_stride, tokens, y, y_stride, bias_lanes, lanes_stride);
}

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

void down_half(const uint16_t* rows, int64_t stride, int64_t neurons, const float* h, int64_t h_stride,
               int64_t tokens, float* y, int64_t y_stride, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += 16)
    for (int64_t t = 0; t < tokens; ++t) {
      F acc = load(y + t * y_stride + j);
      const float* a = h + t * h_stride;
      for (int64_t n = 0; n < neurons; ++n) acc = fma(set1(a[n]), load_half(rows + n * stride + j), acc);
      store(y + t * y_stride + j, acc);
    }
}

void add_bias_lanes(const float* y, const float* lanes, float* out, int64_t n) {
  for (int64_t j = 0; j < n; j += 16)
    store_partial(out + j, add(load(y + j), set1(reduce_add(load(lanes + j / kGroup * 16)))), n - j);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
