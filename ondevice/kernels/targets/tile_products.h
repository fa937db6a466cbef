// Tiles of 16 rows times tokens: how many of either are computed together.
//
// A FORM of weights has `tile_bytes(groups)`, the bytes of a tile, and `add<TT, N>(tiles, x, t0, acc)`, which
// adds to acc[n][t] the products of the N tiles from `tiles` on with tokens t0 to t0 + TT - 1.
#pragma once

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

// N tiles side by side, which share the loads of activations.
template <class FORM, int TT, int N>
void tile_tokens(const uint8_t* tiles, const QuantizedRows& x, int64_t t0, const float* bias,
                 const float* added, float* out, int64_t out_stride, int64_t rows) {
  F acc[N][TT];
  for (int n = 0; n < N; ++n)
    for (int t = 0; t < TT; ++t) acc[n][t] = zero();
  FORM::template add<TT, N>(tiles, x, t0, acc);
  for (int n = 0; n < N; ++n, rows -= kTile)
    for (int t = 0; t < TT; ++t) {
      const int64_t at = (t0 + t) * out_stride + n * kTile;
      if (bias) acc[n][t] = add(acc[n][t], load_partial(bias + n * kTile, rows));
      if (added) acc[n][t] = add(load_partial(added + at, rows), acc[n][t]);
      store_partial(out + at, acc[n][t], rows);
    }
}

// N tiles with all tokens.
template <class FORM, int N>
void tiles_tokens(const uint8_t* tiles, const QuantizedRows& x, int64_t tokens, const float* bias,
                  const float* added, float* out, int64_t out_stride, int64_t rows) {
  constexpr int kMost = N > 1 ? kPairedTokens : kTokenTile;
  int64_t t = 0;
  for (; t + kMost <= tokens; t += kMost)
    tile_tokens<FORM, kMost, N>(tiles, x, t, bias, added, out, out_stride, rows);
  if (kMost > 4 && t + 4 <= tokens) {
    tile_tokens<FORM, 4, N>(tiles, x, t, bias, added, out, out_stride, rows);
    t += 4;
  }
  if (kMost > 3 && t + 3 <= tokens) {
    tile_tokens<FORM, 3, N>(tiles, x, t, bias, added, out, out_stride, rows);
    t += 3;
  }
  if (t + 2 <= tokens) {
    tile_tokens<FORM, 2, N>(tiles, x, t, bias, added, out, out_stride, rows);
    t += 2;
  }
  if (t < tokens) tile_tokens<FORM, 1, N>(tiles, x, t, bias, added, out, out_stride, rows);
}

template <class FORM>
void all_tiles(const uint8_t* tiles, const QuantizedRows& x, int64_t tokens, const float* bias,
               const float* added, float* out, int64_t out_stride, int64_t rows, int64_t begin, int64_t end) {
  const int64_t tile_bytes = FORM::tile_bytes(x.groups);
  int64_t i = begin;
  const auto multiply = [&](auto count) {
    constexpr int N = count.value;
    tiles_tokens<FORM, N>(tiles + i * tile_bytes, x, tokens, bias ? bias + i * kTile : nullptr,
                          added ? added + i * kTile : nullptr, out + i * kTile, out_stride, rows - i * kTile);
    i += N;
  };
  if constexpr (kPairedTokens > 0)
    while (tokens > 2 && i + 2 <= end) multiply(Count<2>());
  while (i < end) multiply(Count<1>());
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
