#include "../interleave.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// The sums of down_projection.cc, block by block, over the neurons that fire, from rows as they are stored.

typedef float Floats16 __attribute__((vector_size(64)));

// c of one block's neurons that fire, for 16 groups side by side; ScaledBlock holds the same of all neurons
// for one group. Each lane is a group, so nothing is reduced across lanes. Neurons at zero would change
// nothing.
struct SelectedScales {
  int8_t codes[kGroup / 4][kTile][4];  // by four neurons, then by group; filled up to four with zeros
  float scale[kTile];
  float sum[kTile];
};

// Columns [first, first + count) of h: the neurons of one block of 64 stored ids.
struct SelectedBlock {
  int64_t first, count;
};

SelectedBlock next_block(const SelectedRows& neurons, SelectedBlock block) {
  const int64_t first = block.first + block.count;
  int64_t end = first;
  while (end < neurons.count && neurons.ids[end] / kGroup == neurons.ids[first] / kGroup) ++end;
  return {first, end - first};
}

// Bit k is set if the block's neuron k fires for at least one of TT tokens.
template <int TT>
uint64_t firing_in(const SelectedBlock& block, const float* h, int64_t h_stride) {
  uint64_t bits = 0;
  for (int64_t k = 0; k < block.count; k += kTile)
    for (int t = 0; t < TT; ++t)
      bits |= static_cast<uint64_t>(nonzero_lanes(load(h + t * h_stride + block.first + k))) << k;
  // The next block follows in the same vector.
  return block.count < kGroup ? bits & ((uint64_t{1} << block.count) - 1) : bits;
}

// The neurons of a block that fire for at least one of TT tokens, and their activations.
template <int TT>
struct Firing {
  const uint8_t* rows[kGroup];
  uint8_t index[kGroup];
  float h[TT][kGroup];
  int64_t count;
};

template <int TT>
void find_firing(const SelectedRows& neurons, const SelectedBlock& block, const float* h, int64_t h_stride,
                 Firing<TT>* out) {
  int64_t n = 0;
  for (uint64_t bits = firing_in<TT>(block, h, h_stride); bits; bits &= bits - 1, ++n) {
    const int64_t column = block.first + __builtin_ctzll(bits);
    out->rows[n] = neurons.parts[column] + neurons.down;
    out->index[n] = static_cast<uint8_t>(neurons.ids[column] % kGroup);
    for (int t = 0; t < TT; ++t) out->h[t][n] = h[t * h_stride + column];
  }
  out->count = n;
  // The last four are filled up with rows whose activations are 0.
  for (; n % 4; ++n) out->rows[n] = out->rows[0];
}

// Prefetches the next block's rows into the cache: they are scattered, so the hardware doesn't.
template <int BITS, int TT>
void prefetch_firing(const SelectedRows& neurons, const SelectedBlock& block, int64_t g0, int64_t live,
                     const float* h, int64_t h_stride) {
  constexpr int64_t kGroupBytes = kGroup * BITS / 8;
  for (uint64_t bits = firing_in<TT>(block, h, h_stride); bits; bits &= bits - 1) {
    const uint8_t* row = neurons.parts[block.first + __builtin_ctzll(bits)] + neurons.down;
    for (int64_t at = g0 * kGroupBytes; at < (g0 + live) * kGroupBytes; at += 64) prefetch(row + at);
  }
}

// Scales and their inverses from the largest magnitude of each lane, as quantize_group computes them for one.
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

// Scales of neurons in 16 groups side by side, and bias + middle * scale, which is summed in the bias lanes.
struct SelectedAffines {
  float scale[kGroup][kTile], offset[kGroup][kTile];
};

// One token's c -> codes. lanes: (16, 16), where [n % 16][i] is lane n % 16 of the i-th group.
void scale_token(const SelectedAffines& affines, const float* h, const uint8_t* index, int64_t count,
                 float* lanes, SelectedScales* out) {
  float c[kGroup][kTile];
  F magnitude = zero();
  for (int64_t k = 0; k < count; ++k) {
    const F v = set1(h[k]);
    float* lane = lanes + index[k] % kTile * kTile;
    store(lane, fma(v, load(affines.offset[k]), load(lane)));
    const F scaled = mul(v, load(affines.scale[k]));
    store(c[k], scaled);
    magnitude = max_magnitude(magnitude, scaled);
  }
  for (int64_t k = count; k % 4; ++k) store(c[k], zero());
  float inverse[kTile];
  lane_scales(magnitude, out->scale, inverse);
  const F scale = load(out->scale);
  if (nonzero_lanes(sub(scale, scale)))
    // Values that no integer can represent must not be converted.
    for (int64_t k = 0; k < count; ++k)
      for (int64_t i = 0; i < kTile; ++i)
        if (out->scale[i] != out->scale[i]) c[k][i] = 0.0f;
  const F inverses = load(inverse);
  F sum = zero();
  for (int64_t k = 0; k < count; k += 4) {
    F quads[4];
    for (int r = 0; r < 4; ++r) quads[r] = mul(load(c[k + r]), inverses);
    sum = add(sum, store_quads(out->codes[k / 4][0], quads));
  }
  store(out->sum, sum);
}

template <int BITS, int TT>
void scale_selected(const Firing<TT>& firing, int64_t groups, int64_t g0, int64_t live, float* lanes,
                    int64_t lanes_stride, SelectedScales* out) {
  constexpr float kMiddle = BITS == 4 ? 8.0f : 128.0f;
  const int64_t affine = groups * kGroup * BITS / 8 + 2 * g0;
  SelectedAffines affines;
  for (int64_t k = 0; k < firing.count; ++k) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(firing.rows[k] + affine);
    const F scale = load_half_partial(scales, live);
    store(affines.scale[k], scale);
    store(affines.offset[k], fma(scale, set1(kMiddle), load_half_partial(scales + groups, live)));
  }
  for (int t = 0; t < TT; ++t)
    scale_token(affines, firing.h[t], firing.index, firing.count, lanes + t * lanes_stride, out + t);
}

// Adds the products of W pieces of 16 bytes of every row, from piece number `piece` on. At 4 bits a byte
// holds the codes of two outputs: `low` and `high` are the outputs of the same 16 bytes.
template <int BITS, int TT, int W>
void add_pieces(const uint8_t* const* rows, int64_t quads, int64_t piece, int64_t g0,
                const SelectedScales* scaled, float* y, int64_t y_stride) {
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
      const Quads x = two_quads(scaled[t].codes[q][first], scaled[t].codes[q][BITS == 8 ? first : last]);
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

// The same, but the bytes are put in order first: that pays with more tokens.
template <int BITS, int TT, int W>
void add_ordered(const uint8_t* const* rows, int64_t quads, int64_t piece, int64_t g0,
                 const SelectedScales* scaled, float* y, int64_t y_stride) {
  constexpr int64_t kPieces = kGroup * BITS / 128, kOutputs = 128 / BITS;
  constexpr float kMiddle = BITS == 4 ? 8.0f : 128.0f;
  B ordered[W][kGroup / 4];
  for (int64_t q = 0; q < quads; ++q) {
    B raw[W];
    interleave_rows(rows + 4 * q, piece * 16, raw);
    order_pieces(raw);
    for (int w = 0; w < W; ++w) ordered[w][q] = raw[w];
  }
  for (int w = 0; w < W; ++w) {
    const int64_t i = (piece + w) / kPieces - g0;
    I low[TT], high[TT];
    for (int t = 0; t < TT; ++t) low[t] = high[t] = int_zero();
    for (int64_t q = 0; q < quads; ++q)
      for (int t = 0; t < TT; ++t) {
        const int8_t* x = scaled[t].codes[q][i];
        const B raw = ordered[w][q];
        low[t] = BITS == 4 ? dot_q4(low[t], low_nibbles(raw), x) : dot_q8(low[t], raw, x);
        if (BITS == 4) high[t] = dot_q4(high[t], high_nibbles(raw), x);
      }
    for (int t = 0; t < TT; ++t) {
      const float sum = scaled[t].sum[i];
      const F scale = set1(scaled[t].scale[i]), middle = set1(kMiddle * sum);
      float* out = y + t * y_stride + (piece + w) * kOutputs;
      if (BITS == 8) low[t] = finish_q8(low[t], static_cast<int32_t>(sum));
      store(out, fma(scale, sub(to_float(low[t]), middle), load(out)));
      if (BITS == 4) store(out + kTile, fma(scale, sub(to_float(high[t]), middle), load(out + kTile)));
    }
  }
}

// One block's part of up to 16 groups of outputs, for TT tokens.
template <int BITS, int TT>
void selected_tokens(const Firing<TT>& firing, int64_t groups, int64_t g0, int64_t live, float* y,
                     int64_t y_stride, float* lanes, int64_t lanes_stride) {
  constexpr int64_t kPieces = kGroup * BITS / 128;  // of 16 bytes
  constexpr bool kOrdered = kRowPieces > 1 && TT > 2;
  if (firing.count == 0) return;
  const int64_t quads = (firing.count + 3) / 4, end = (g0 + live) * kPieces;
  SelectedScales scaled[TT];
  scale_selected<BITS, TT>(firing, groups, g0, live, lanes, lanes_stride, scaled);
  const auto add = [&](auto pieces, int64_t piece) {
    constexpr int W = pieces.value;
    if (kOrdered)
      add_ordered<BITS, TT, W>(firing.rows, quads, piece, g0, scaled, y, y_stride);
    else
      add_pieces<BITS, TT, W>(firing.rows, quads, piece, g0, scaled, y, y_stride);
  };
  int64_t piece = g0 * kPieces;
  for (; piece + kRowPieces <= end; piece += kRowPieces) add(Count<kRowPieces>(), piece);
  for (; piece < end; ++piece) add(Count<1>(), piece);
}

template <int BITS>
void selected_all(const SelectedRows& neurons, int64_t groups, int64_t g_begin, int64_t g_end, const float* h,
                  int64_t h_stride, int64_t tokens, float* y, int64_t y_stride, float* lanes,
                  int64_t lanes_stride) {
  SelectedBlock block = next_block(neurons, {0, 0}), next;
  for (; block.count; block = next) {
    next = next_block(neurons, block);
    for (int64_t g0 = g_begin; g0 < g_end; g0 += kTile) {
      const int64_t live = g_end - g0 < kTile ? g_end - g0 : kTile;
      const auto add = [&](auto together, int64_t t) {
        constexpr int TT = together.value;
        Firing<TT> firing;
        find_firing<TT>(neurons, block, h + t * h_stride, h_stride, &firing);
        prefetch_firing<BITS, TT>(neurons, next, g0, live, h + t * h_stride, h_stride);
        selected_tokens<BITS, TT>(firing, groups, g0, live, y + t * y_stride, y_stride,
                                  lanes + t * lanes_stride + g0 * kTile, lanes_stride);
      };
      int64_t t = 0;
      for (; t + kTokenTile <= tokens; t += kTokenTile) add(Count<kTokenTile>(), t);
      for (; kTokenTile > 4 && t + 4 <= tokens; t += 4) add(Count<4>(), t);
      for (; kTokenTile > 2 && t + 2 <= tokens; t += 2) add(Count<2>(), t);
      if (t < tokens) add(Count<1>(), t);
    }
  }
}

}  // namespace

void down_selected(int bits, const SelectedRows& neurons, int64_t groups, int64_t g_begin, int64_t g_end,
                   const float* h, int64_t h_stride, int64_t tokens, float* y, int64_t y_stride,
                   float* bias_lanes, int64_t lanes_stride) {
  if (bits == 4)
    selected_all<4>(neurons, groups, g_begin, g_end, h, h_stride, tokens, y, y_stride, bias_lanes,
                    lanes_stride);
  else
    selected_all<8>(neurons, groups, g_begin, g_end, h, h_stride, tokens, y, y_stride, bias_lanes,
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
