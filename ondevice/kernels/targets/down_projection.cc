#include "../interleave.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// The down projection: y gains h[n] * row n for each neuron n.
//
// A neuron's down row is quantised along the model dimension, so the scale varies inside a sum over neurons.
// We multiply the activation by it: c = h * scale, quantised to int8 per block of 64 stored neurons, zeros
// included. A block's sum is then an exact integer dot product, and blocks are added in ascending order by
// fused multiply-adds. Codes are taken as offsets from their middle, 8 to 128; otherwise the rounding errors
// of c would shift all outputs of a group in the same direction. What the biases add, the sum of h * (bias +
// middle * scale), is equal for all 64 outputs of a group: it is summed in 16 lanes by neuron % 16 and added
// last.
//
// Layout of a (group, block): four tiles of 16 outputs x 64 neurons, then 64 scales, then 64 biases.
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
  constexpr float kMiddle = 1 << (BITS - 1);
  F s[4], offset[4];
  for (int i = 0; i < 4; ++i) {
    s[i] = load_half(scales + 16 * i);
    offset[i] = fma(s[i], set1(kMiddle), load_half(scales + kGroup + 16 * i));
  }
  for (int t = 0; t < TT; ++t) {
    F c[4];
    for (int i = 0; i < 4; ++i) {
      const F v = load(h + t * h_stride + 16 * i);
      bias_sum[t] = fma(v, offset[i], bias_sum[t]);
      c[i] = mul(v, s[i]);
    }
    out->scale[t] = scale_to_int8<4>(c);
    int32_t sums[4];
    store_codes(out->codes[t], c[0], c[1], c[2], c[3], NIBBLE_ORDER, sums);
    out->sum[t] = sums[0] + sums[1] + sums[2] + sums[3];
  }
}

// Adds one block's part to 16 outputs. Centring is exact: both terms are integers below 2^24.
template <int BITS>
void add_centred(F sums, int32_t code_sum, float scale, float* out) {
  constexpr float kMiddle = 1 << (BITS - 1);
  const F centred = sub(sums, set1(kMiddle * static_cast<float>(code_sum)));
  store(out, fma(set1(scale), centred, load(out)));
}

// N tiles of outputs side by side, which share the loads of activations.
template <int BITS, int TT, int N>
void down_tokens(const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride, float* y,
                 int64_t y_stride, float* lanes, int64_t lanes_stride) {
  constexpr int64_t kTileBytes = kTile * kGroup * BITS / 8;
  // Quantising is a chain of dependent steps, so with few tokens several blocks are quantised side by side.
  constexpr int64_t kBlocksAhead = TT >= 4 ? 1 : 2;
  F bias_sum[TT];
  for (int t = 0; t < TT; ++t) bias_sum[t] = load(lanes + t * lanes_stride);
  for (int64_t first = 0; first < blocks; first += kBlocksAhead) {
    const int64_t count = blocks - first < kBlocksAhead ? blocks - first : kBlocksAhead;
    const uint8_t* block = group + first * down_block_bytes<BITS>();
    ScaledBlock<TT> scaled[kBlocksAhead];
    for (int64_t b = 0; b < count; ++b)
      scale_block<BITS, TT, (BITS < 8)>(
          reinterpret_cast<const uint16_t*>(block + b * down_block_bytes<BITS>() +
                                            kTilesPerGroup * kTileBytes),
          h + (first + b) * kGroup, h_stride, bias_sum, scaled + b);
    for (int64_t b = 0; b < count; ++b, block += down_block_bytes<BITS>()) {
      for (int64_t tile = 0; tile < kTilesPerGroup; tile += N) {
        const uint8_t* blocks_of[N];
        for (int n = 0; n < N; ++n) blocks_of[n] = block + (tile + n) * kTileBytes;
        F sums[N][TT];
        dot_blocks<Integers<BITS>, TT, N>(blocks_of, scaled[b].codes[0], kGroup, scaled[b].sum, sums);
        for (int n = 0; n < N; ++n)
          for (int t = 0; t < TT; ++t)
            add_centred<BITS>(sums[n][t], scaled[b].sum[t], scaled[b].scale[t],
                              y + t * y_stride + (tile + n) * kTile);
      }
    }
  }
  for (int t = 0; t < TT; ++t) store(lanes + t * lanes_stride, bias_sum[t]);
}

template <int BITS>
void down_all(const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride, int64_t tokens,
              float* y, int64_t y_stride, float* lanes, int64_t lanes_stride) {
  int64_t t = 0;
  const auto add = [&](auto together, auto side_by_side) {
    constexpr int TT = together.value;
    down_tokens<BITS, TT, side_by_side.value>(group, blocks, h + t * h_stride, h_stride, y + t * y_stride,
                                              y_stride, lanes + t * lanes_stride, lanes_stride);
    t += TT;
  };
  static_assert(kPairedTokens == 0 || kPairedTokens == 4, "three and four tokens are paired");
  constexpr Count<kPairedTokens ? 2 : 1> kSide{};
  while (t + kTokenTile <= tokens) add(Count<kTokenTile>(), Count<1>());
  if (kTokenTile > 4 && t + 4 <= tokens) add(Count<4>(), kSide);
  if (kTokenTile > 3 && t + 3 <= tokens) add(Count<3>(), kSide);
  while (t + 2 <= tokens) add(Count<2>(), Count<1>());
  if (t < tokens) add(Count<1>(), Count<1>());
}

}  // namespace

void down_quantized(int bits, const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride,
                    int64_t tokens, float* y, int64_t y_stride, float* bias_lanes, int64_t lanes_stride) {
  const auto all = bits == 4 ? down_all<4> : bits == 5 ? down_all<5> : bits == 6 ? down_all<6> : down_all<8>;
  all(group, blocks, h, h_stride, tokens, y, y_stride, bias_lanes, lanes_stride);
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

void add_bias_lanes(const float* y, const float* lanes, const float* added, float* out, int64_t n) {
  for (int64_t j = 0; j < n; j += 16) {
    F sum = add(load(y + j), set1(reduce_add(load(lanes + j / kGroup * 16))));
    if (added) sum = add(load_partial(added + j, n - j), sum);
    store_partial(out + j, sum, n - j);
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
