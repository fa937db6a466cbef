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

// The neurons of one block of 64 stored ids that fire for token `token`, and their activations.
struct Firing {
  int64_t token;
  int64_t count;
  const uint8_t* rows[kGroup];
  uint8_t index[kGroup];
  float h[kGroup];
};

// Finds what fires, block by block and in each block token by token: a row that several tokens need is then
// still in the cache. Each token multiplies its own neurons alone, as few are shared.
class FiringFinder {
 public:
  FiringFinder(const SelectedRows& neurons, const float* h, int64_t h_stride, int64_t tokens)
      : neurons_(neurons), h_(h), h_stride_(h_stride), tokens_(tokens), token_(tokens) {}

  // False if no block is left in which a neuron fires. `out` is then empty.
  bool next(Firing* out) {
    out->count = 0;
    while (out->count == 0) {
      if (token_ == tokens_ && !next_block()) return false;
      find(token_++, out);
    }
    return true;
  }

 private:
  bool next_block() {
    first_ += count_;
    int64_t end = first_;
    while (end < neurons_.count && neurons_.ids[end] / kGroup == neurons_.ids[first_] / kGroup) ++end;
    count_ = end - first_;
    token_ = 0;
    return count_ > 0;
  }

  void find(int64_t token, Firing* out) const {
    const float* h = h_ + token * h_stride_ + first_;
    uint64_t bits = 0;
    for (int64_t k = 0; k < count_; k += kTile)
      bits |= static_cast<uint64_t>(nonzero_lanes(load(h + k))) << k;
    // The next block follows in the same vector.
    if (count_ < kGroup) bits &= (uint64_t{1} << count_) - 1;
    int64_t n = 0;
    for (; bits; bits &= bits - 1, ++n) {
      const int64_t k = __builtin_ctzll(bits);
      out->rows[n] = neurons_.parts[first_ + k] + neurons_.down;
      out->index[n] = static_cast<uint8_t>(neurons_.ids[first_ + k] % kGroup);
      out->h[n] = h[k];
    }
    out->token = token;
    out->count = n;
    // The last four are filled up with rows whose activations are 0.
    for (; n % 4; ++n) out->rows[n] = out->rows[0];
  }

  const SelectedRows& neurons_;
  const float* h_;
  const int64_t h_stride_, tokens_;
  int64_t token_;
  int64_t first_ = 0, count_ = 0;  // the block's columns of h
};

// Scales and their inverses from the largest magnitude of each lane, as scale_to_int8 computes them for one.
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

// The block's c for 16 groups from g0 on -> codes. lanes: (16, 16), where [n % 16][i] is lane n % 16 of the
// i-th group. The scales and biases of `next` are prefetched.
template <int BITS>
void scale_selected(const Firing& firing, const Firing& next, int64_t groups, int64_t g0, int64_t live,
                    float* lanes, SelectedScales* out) {
  constexpr float kMiddle = 1 << (BITS - 1);
  const int64_t affine = groups * kGroup * BITS / 8 + 2 * g0;
  for (int64_t k = 0; k < next.count; ++k) {
    prefetch(next.rows[k] + affine);
    prefetch(next.rows[k] + affine + 2 * groups);
  }
  float c[kGroup][kTile];
  F magnitude = zero();
  for (int64_t k = 0; k < firing.count; ++k) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(firing.rows[k] + affine);
    const F scale = load_half_partial(scales, live);
    const F offset = fma(scale, set1(kMiddle), load_half_partial(scales + groups, live));
    const F v = set1(firing.h[k]);
    float* lane = lanes + firing.index[k] % kTile * kTile;
    store(lane, fma(v, offset, load(lane)));
    const F scaled = mul(v, scale);
    store(c[k], scaled);
    magnitude = max_magnitude(magnitude, scaled);
  }
  for (int64_t k = firing.count; k % 4; ++k) store(c[k], zero());
  float inverse[kTile];
  lane_scales(magnitude, out->scale, inverse);
  const F scale = load(out->scale);
  if (nonzero_lanes(sub(scale, scale)))
    // Values that no integer can represent must not be converted.
    for (int64_t k = 0; k < firing.count; ++k)
      for (int64_t i = 0; i < kTile; ++i)
        if (out->scale[i] != out->scale[i]) c[k][i] = 0.0f;
  const F inverses = load(inverse);
  F sum = zero();
  for (int64_t k = 0; k < firing.count; k += 4) {
    F quads[4];
    for (int r = 0; r < 4; ++r) quads[r] = mul(load(c[k + r]), inverses);
    sum = add(sum, store_quads(out->codes[k / 4][0], quads));
  }
  store(out->sum, sum);
}

// Adds the products of W pieces of 16 bytes of every row, from piece number `piece` on, and prefetches those
// of `next`: rows are scattered, so the hardware doesn't. At 4 bits a byte holds the codes of two outputs:
// `low` and `high` are the outputs of the same 16 bytes.
template <int BITS, int W>
void add_pieces(const Firing& firing, const Firing& next, int64_t piece, int64_t g0,
                const SelectedScales& scaled, float* y) {
  constexpr int64_t kPieces = kGroup * BITS / 128, kOutputs = 128 / BITS;
  constexpr float kMiddle = 1 << (BITS - 1);
  const int64_t first = piece / kPieces - g0, last = (piece + W - 1) / kPieces - g0;
  if (piece * 16 % 64 == 0)
    for (int64_t k = 0; k < next.count; ++k) prefetch(next.rows[k] + piece * 16);
  I low[W], high[W];
  for (int w = 0; w < W; ++w) low[w] = high[w] = int_zero();
  for (int64_t k = 0; k < firing.count; k += 4) {
    B raw[W];
    interleave_rows(firing.rows + k, piece * 16, raw);
    const Quads x = two_quads(scaled.codes[k / 4][first], scaled.codes[k / 4][BITS == 8 ? first : last]);
    for (int w = 0; w < W; ++w) {
      low[w] = BITS == 4 ? dot_q4(low[w], low_nibbles(raw[w]), x) : dot_q8(low[w], raw[w], x);
      if (BITS == 4) high[w] = dot_q4(high[w], high_nibbles(raw[w]), x);
    }
  }
  order_pieces(low);
  if (BITS == 4) order_pieces(high);
  for (int w = 0; w < W; ++w) {
    const int64_t i = (piece + w) / kPieces - g0;
    const float sum = scaled.sum[i];
    const F scale = set1(scaled.scale[i]), middle = set1(kMiddle * sum);
    float* out = y + (piece + w) * kOutputs;
    if (BITS == 8) low[w] = finish_q8(low[w], static_cast<int32_t>(sum));
    store(out, fma(scale, sub(to_float(low[w]), middle), load(out)));
    if (BITS == 4) store(out + kTile, fma(scale, sub(to_float(high[w]), middle), load(out + kTile)));
  }
}

typedef uint64_t Longs2 __attribute__((vector_size(16)));

// 16 codes of 5 or 6 bits -> bytes. Some bytes behind them are read: a row's scales follow its codes.
template <int BITS>
Bytes16 sixteen_codes(const uint8_t* at) {
  Longs2 raw;
  for (int i = 0; i < 2; ++i) {
    uint64_t eight;
    memcpy(&eight, at + i * BITS, sizeof(eight));
    raw[i] = eight;
  }
  return (Bytes16)spread_codes(raw, BITS);
}

// add_pieces at 5 and 6 bits, for the 16 outputs from 16 * piece on.
template <int BITS>
void add_high_piece(const Firing& firing, const Firing& next, int64_t piece, int64_t g0,
                    const SelectedScales& scaled, float* y) {
  constexpr int64_t kPieces = kGroup / kTile;
  const int64_t i = piece / kPieces - g0, at = piece * 2 * BITS;
  if (at % 64 < 2 * BITS)
    for (int64_t k = 0; k < next.count; ++k) prefetch(next.rows[k] + at);
  I sums = int_zero();
  for (int64_t k = 0; k < firing.count; k += 4) {
    const uint8_t* const* rows = firing.rows + k;
    Bytes16 quads[4];
    interleave_bytes(sixteen_codes<BITS>(rows[0] + at), sixteen_codes<BITS>(rows[1] + at),
                     sixteen_codes<BITS>(rows[2] + at), sixteen_codes<BITS>(rows[3] + at), quads);
    sums = dot_q4(sums, join_quarters(quads), scaled.codes[k / 4][i]);
  }
  float* out = y + piece * kTile;
  const F centred = sub(to_float(sums), set1((1 << (BITS - 1)) * scaled.sum[i]));
  store(out, fma(set1(scaled.scale[i]), centred, load(out)));
}

// One block's part of one token's outputs in groups [g_begin, g_end).
template <int BITS>
void add_block(const Firing& firing, const Firing& next, int64_t groups, int64_t g_begin, int64_t g_end,
               float* y, float* lanes) {
  constexpr int64_t kPieces = kGroup * BITS / 128;  // of 16 bytes
  for (int64_t g0 = g_begin; g0 < g_end; g0 += kTile) {
    const int64_t live = g_end - g0 < kTile ? g_end - g0 : kTile, end = (g0 + live) * kPieces;
    SelectedScales scaled;
    scale_selected<BITS>(firing, next, groups, g0, live, lanes + g0 * kTile, &scaled);
    if constexpr (in_planes(BITS)) {
      for (int64_t p = g0 * kGroup / kTile; p < (g0 + live) * kGroup / kTile; ++p)
        add_high_piece<BITS>(firing, next, p, g0, scaled, y);
      continue;
    }
    int64_t piece = g0 * kPieces;
    for (; piece + kRowPieces <= end; piece += kRowPieces)
      add_pieces<BITS, kRowPieces>(firing, next, piece, g0, scaled, y);
    for (; piece < end; ++piece) add_pieces<BITS, 1>(firing, next, piece, g0, scaled, y);
  }
}

template <int BITS>
void selected_all(const SelectedRows& neurons, int64_t groups, int64_t g_begin, int64_t g_end, const float* h,
                  int64_t h_stride, int64_t tokens, float* y, int64_t y_stride, float* lanes,
                  int64_t lanes_stride) {
  FiringFinder finder(neurons, h, h_stride, tokens);
  Firing found[2];
  int now = 0;
  for (bool left = finder.next(&found[now]); left; now = 1 - now) {
    left = finder.next(&found[1 - now]);
    const int64_t t = found[now].token;
    add_block<BITS>(found[now], found[1 - now], groups, g_begin, g_end, y + t * y_stride,
                    lanes + t * lanes_stride);
  }
}

}  // namespace

void down_selected(int bits, const SelectedRows& neurons, int64_t groups, int64_t g_begin, int64_t g_end,
                   const float* h, int64_t h_stride, int64_t tokens, float* y, int64_t y_stride,
                   float* bias_lanes, int64_t lanes_stride) {
  const auto all = bits == 4   ? selected_all<4>
                   : bits == 5 ? selected_all<5>
                   : bits == 6 ? selected_all<6>
                               : selected_all<8>;
  all(neurons, groups, g_begin, g_end, h, h_stride, tokens, y, y_stride, bias_lanes, lanes_stride);
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
