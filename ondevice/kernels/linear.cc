#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// Per output, groups ascending: acc = fma(weight scale * activation scale, integer sum, acc),
// then acc = fma(weight bias, activation sum, acc).
template <int BITS, int TT>
void tile_tokens(const uint8_t* tile, const QuantizedRows& x, int64_t t0, const float* bias, float* out,
                 int64_t out_stride, int64_t rows) {
  constexpr int64_t kBytes = tile_group_bytes(BITS), kCodes = kTile * kGroup * BITS / 8;
  F acc[TT];
  for (int t = 0; t < TT; ++t) acc[t] = zero();
  for (int64_t g = 0; g < x.groups; ++g) {
    const uint8_t* block = tile + g * kBytes;
    const int8_t* codes[TT];
    int32_t int_sums[TT];
    for (int t = 0; t < TT; ++t) {
      codes[t] = x.codes + ((t0 + t) * x.groups + g) * kGroup;
      int_sums[t] = x.int_sums[(t0 + t) * x.groups + g];
    }
    F sums[TT];
    dot_block<BITS, TT>(block, codes, int_sums, sums);
    const F scale = load_half(reinterpret_cast<const uint16_t*>(block + kCodes));
    const F offset = load_half(reinterpret_cast<const uint16_t*>(block + kCodes + 2 * kTile));
    for (int t = 0; t < TT; ++t) {
      acc[t] = fma(mul(scale, set1(x.scales[(t0 + t) * x.groups + g])), sums[t], acc[t]);
      acc[t] = fma(offset, set1(x.sums[(t0 + t) * x.groups + g]), acc[t]);
    }
  }
  for (int t = 0; t < TT; ++t) {
    if (bias) acc[t] = add(acc[t], load_partial(bias, rows));
    store_partial(out + (t0 + t) * out_stride, acc[t], rows);
  }
}

template <int BITS>
void tiles_tokens(const uint8_t* tiles, const QuantizedRows& x, int64_t tokens, const float* bias, float* out,
                  int64_t out_stride, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* tile = tiles + i * x.groups * tile_group_bytes(BITS);
    const int64_t left = rows - i * kTile;
    const float* b = bias ? bias + i * kTile : nullptr;
    float* o = out + i * kTile;
    int64_t t = 0;
    for (; t + kTokenTile <= tokens; t += kTokenTile)
      tile_tokens<BITS, kTokenTile>(tile, x, t, b, o, out_stride, left);
    if (kTokenTile > 4 && t + 4 <= tokens) {
      tile_tokens<BITS, 4>(tile, x, t, b, o, out_stride, left);
      t += 4;
    }
    if (t + 2 <= tokens) {
      tile_tokens<BITS, 2>(tile, x, t, b, o, out_stride, left);
      t += 2;
    }
    if (t < tokens) tile_tokens<BITS, 1>(tile, x, t, b, o, out_stride, left);
  }
}

// Four rows at a time, each with 16 lanes over the columns.
template <int RR>
void half_rows(const uint16_t* weights, int64_t padded_cols, const float* x, int64_t tokens,
               const float* bias, float* out, int64_t out_stride, int64_t row) {
  for (int64_t t = 0; t < tokens; ++t) {
    F acc[RR];
    for (int r = 0; r < RR; ++r) acc[r] = zero();
    for (int64_t c = 0; c < padded_cols; c += 16) {
      const F v = load(x + t * padded_cols + c);
      for (int r = 0; r < RR; ++r) acc[r] = fma(load_half(weights + (row + r) * padded_cols + c), v, acc[r]);
    }
    for (int r = 0; r < RR; ++r) {
      const float sum = reduce_add(acc[r]);
      out[t * out_stride + row + r] = bias ? sum + bias[row + r] : sum;
    }
  }
}

}  // namespace

void linear_quantized(int bits, const uint8_t* tiles, const QuantizedRows& x, int64_t tokens,
                      const float* bias, float* out, int64_t out_stride, int64_t rows, int64_t begin,
                      int64_t end) {
  if (bits == 4)
    tiles_tokens<4>(tiles, x, tokens, bias, out, out_stride, rows, begin, end);
  else
    tiles_tokens<8>(tiles, x, tokens, bias, out, out_stride, rows, begin, end);
}

void linear_half(const uint16_t* weights, int64_t padded_cols, const float* x, int64_t tokens,
                 const float* bias, float* out, int64_t out_stride, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) half_rows<4>(weights, padded_cols, x, tokens, bias, out, out_stride, row);
  for (; row < end; ++row) half_rows<1>(weights, padded_cols, x, tokens, bias, out, out_stride, row);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
