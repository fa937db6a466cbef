#include "matrix_products.h"
#include "row_forms.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// N tiles side by side, which share the loads of activations.
// Per output, groups ascending: acc = fma(weight scale * activation scale, integer sum, acc),
// then acc = fma(weight bias, activation sum, acc); if the bias is implied, and where codes are entries of a
// table, only the first, the integer sum being that of the codes less the zero code.
template <class FORM, int TT, int N>
void tile_tokens(const uint8_t* tiles, const QuantizedRows& x, int64_t t0, const float* bias,
                 const float* added, float* out, int64_t out_stride, int64_t rows) {
  constexpr int64_t kBytes = kBlockBytes<FORM>, kCodes = kCodesBytes<FORM>;
  const int64_t tile_bytes = x.groups * kBytes;
  F acc[N][TT];
  for (int n = 0; n < N; ++n)
    for (int t = 0; t < TT; ++t) acc[n][t] = zero();
  for (int64_t g = 0; g < x.groups; ++g) {
    // Tiles side by side are each fetched half as far ahead, behind their ends those of the next pair.
    const int64_t near = kAhead / N,
                  ahead = g * kBytes + near < tile_bytes ? near : near + (N - 1) * tile_bytes;
    const uint8_t* affines[N];
    for (int n = 0; n < N; ++n) {
      affines[n] = tiles + n * tile_bytes + g * kBytes + kCodes;
      prefetch(affines[n] + ahead);
      if (FORM::kAffine > 64) prefetch(affines[n] + 64 + ahead);
    }
    for (int64_t part = 0; part < FORM::kScales; ++part) {
      const int64_t at = x.at(t0, g) * FORM::kScales + part;
      const uint8_t* blocks[N];
      int32_t int_sums[TT];
      for (int n = 0; n < N; ++n) blocks[n] = affines[n] - kCodes + part * (kCodes / FORM::kScales);
      for (int t = 0; t < TT; ++t) int_sums[t] = x.int_sums[at + t * FORM::kScales];
      F sums[N][TT];
      dot_blocks<typename FORM::Codes, TT, N, FORM::kCols>(blocks, x.codes + at * FORM::kCols, kGroup,
                                                           int_sums, sums, ahead);
      for (int n = 0; n < N; ++n)
        for (int t = 0; t < TT; ++t)
          acc[n][t] =
              FORM::added(acc[n][t], affines[n] + part * FORM::kSide, sums[n][t], x, at + t * FORM::kScales);
    }
  }
  for (int n = 0; n < N; ++n, rows -= kTile)
    for (int t = 0; t < TT; ++t) {
      const int64_t at = (t0 + t) * out_stride + n * kTile;
      store_rows(acc[n][t], bias ? bias + n * kTile : nullptr, added ? added + at : nullptr, out + at, rows);
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

#if defined(ONDEVICE_MATRIX_PRODUCTS)
// A tile with `tokens` tokens from t0 on, a multiple of kMatrixTokens and at most kMatrixRun.
template <class FORM>
void tile_by_matrices(const uint8_t* tile, const QuantizedRows& x, int64_t t0, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows) {
  using Codes = typename FORM::Codes;
  F acc[kMatrixRun];
  B codes[kGroup / 4];
  for (int64_t t = 0; t < tokens; ++t) acc[t] = zero();
  for (int64_t g = 0; g < x.groups; ++g, tile += kBlockBytes<FORM>) {
    const uint8_t* affine = tile + kCodesBytes<FORM>;
    prefetch_ahead(tile, kBlockBytes<FORM>);
    each<kGroup / 4>([&](auto quad) ONDEVICE_INLINED {
      codes[quad.value] = block_quad<Codes, decltype(quad)::value>(tile);
    });
    const int64_t at = x.at(t0, g);
    MatrixProducts<FORM::kCols>::multiply(
        codes, x.codes + at * kGroup, tokens, [&](int64_t t, const auto& sums) ONDEVICE_INLINED {
          for (int64_t i = 0; i < kMatrixTokens; ++i)
            each<FORM::kScales>([&](auto part) ONDEVICE_INLINED {
              constexpr int kPart = decltype(part)::value;
              acc[t + i] =
                  FORM::added(acc[t + i], affine + kPart * FORM::kSide, to_float(sums.template of<kPart>(i)),
                              x, (at + t + i) * FORM::kScales + kPart);
            });
        });
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t at = (t0 + t) * out_stride;
    store_rows(acc[t], bias, added ? added + at : nullptr, out + at, rows);
  }
}

// Tiles [begin, end) with tokens [0, tokens), a multiple of kMatrixTokens.
template <class FORM>
void tiles_by_matrices(const uint8_t* tiles, const QuantizedRows& x, int64_t tokens, const float* bias,
                       const float* added, float* out, int64_t out_stride, int64_t rows, int64_t begin,
                       int64_t end) {
  const MatrixProducts<FORM::kCols> products(tokens > 0);
  for (int64_t i = begin; i < end; ++i)
    for (int64_t t = 0; t < tokens; t += kMatrixRun)
      tile_by_matrices<FORM>(tiles + i * x.groups * kBlockBytes<FORM>, x, t,
                             tokens - t < kMatrixRun ? tokens - t : kMatrixRun,
                             bias ? bias + i * kTile : nullptr, added ? added + i * kTile : nullptr,
                             out + i * kTile, out_stride, rows - i * kTile);
}
#endif

template <class FORM>
void all_tiles(const uint8_t* tiles, QuantizedRows x, int64_t tokens, const float* bias, const float* added,
               float* out, int64_t out_stride, int64_t rows, int64_t begin, int64_t end) {
#if defined(ONDEVICE_MATRIX_PRODUCTS)
  const int64_t full = tokens - tokens % kMatrixTokens;
  tiles_by_matrices<FORM>(tiles, x, full, bias, added, out, out_stride, rows, begin, end);
  x = x.from(full);
  tokens -= full;
  out += full * out_stride;
  if (added) added += full * out_stride;
#endif
  const int64_t tile_bytes = x.groups * kBlockBytes<FORM>;
  int64_t i = begin;
  const auto add = [&](auto count) {
    constexpr int N = count.value;
    tiles_tokens<FORM, N>(tiles + i * tile_bytes, x, tokens, bias ? bias + i * kTile : nullptr,
                          added ? added + i * kTile : nullptr, out + i * kTile, out_stride, rows - i * kTile);
    i += N;
  };
  if constexpr (kPairedTokens > 0)
    while (tokens > 2 && i + 2 <= end) add(Count<2>());
  while (i < end) add(Count<1>());
}

typedef uint32_t Words16 __attribute__((vector_size(64)));

Words16 words(B bytes) {
  Words16 w;
  memcpy(&w, &bytes, sizeof(w));
  return w;
}

B bytes(Words16 words) {
  B b;
  memcpy(&b, &words, sizeof(b));
  return b;
}

// 16 bytes at `at` of 16 rows -> 4 vectors, each with one word of every row, as in an interleaved tile.
void gather_words(const uint8_t* const* rows, int64_t at, B out[4]) {
  Words16 quads[4];  // rows j, j + 4, j + 8, j + 12
  for (int j = 0; j < 4; ++j) {
    Bytes16 pieces[4];
    for (int i = 0; i < 4; ++i) pieces[i] = load_vector<Bytes16>(rows[4 * i + j] + at);
    quads[j] = words(join_quarters(pieces));
  }
#define ONDEVICE_ZIP(x, y, a, b)                                                                          \
  __builtin_shufflevector(x, y, a, a + 16, b, b + 16, a + 4, a + 20, b + 4, b + 20, a + 8, a + 24, b + 8, \
                          b + 24, a + 12, a + 28, b + 12, b + 28)
#define ONDEVICE_PAIRS(x, y, a)                                                                       \
  __builtin_shufflevector(x, y, a, a + 1, a + 16, a + 17, a + 4, a + 5, a + 20, a + 21, a + 8, a + 9, \
                          a + 24, a + 25, a + 12, a + 13, a + 28, a + 29)
  const Words16 low01 = ONDEVICE_ZIP(quads[0], quads[1], 0, 1),
                low23 = ONDEVICE_ZIP(quads[2], quads[3], 0, 1);
  const Words16 high01 = ONDEVICE_ZIP(quads[0], quads[1], 2, 3),
                high23 = ONDEVICE_ZIP(quads[2], quads[3], 2, 3);
  out[0] = bytes(ONDEVICE_PAIRS(low01, low23, 0));
  out[1] = bytes(ONDEVICE_PAIRS(low01, low23, 2));
  out[2] = bytes(ONDEVICE_PAIRS(high01, high23, 0));
  out[3] = bytes(ONDEVICE_PAIRS(high01, high23, 2));
#undef ONDEVICE_ZIP
#undef ONDEVICE_PAIRS
}

typedef uint64_t Longs8 __attribute__((vector_size(64)));

// The even and the odd ones of eight codes of 5 or 6 bits of 16 rows -> a word of every row.
template <int BITS>
void gather_codes(const uint8_t* const* rows, int64_t at, B* even, B* odd) {
  constexpr uint64_t kEven = 0x00ff00ff00ff00ff;
  uint32_t evens[kTile], odds[kTile];
  for (int r = 0; r < kTile; r += 8) {
    Longs8 raw;  // Some bytes behind the codes are read and masked out: a row's scales follow its codes.
    for (int i = 0; i < 8; ++i) {
      uint64_t row;
      memcpy(&row, rows[r + i] + at, sizeof(row));
      raw[i] = row;
    }
    const Longs8 codes = spread_codes(raw, BITS);
    const Longs8 low = even_bytes(codes & kEven), high = even_bytes((codes >> 8) & kEven);
    for (int i = 0; i < 8; ++i) {
      evens[r + i] = static_cast<uint32_t>(low[i]);
      odds[r + i] = static_cast<uint32_t>(high[i]);
    }
  }
  *even = load_bytes(reinterpret_cast<const uint8_t*>(evens));
  *odd = load_bytes(reinterpret_cast<const uint8_t*>(odds));
}

// dot_gathered at 5 and 6 bits.
template <int BITS, int COLS>
F dot_gathered_high(const uint8_t* const* rows, int64_t at, const int8_t* x) {
  I chains[2] = {int_zero(), int_zero()};
  for (int64_t k = 0; k < COLS / 8; ++k) {
    B even, odd;
    gather_codes<BITS>(rows, at + k * BITS, &even, &odd);
    chains[0] = dot_q4(chains[0], even, x + 8 * k);
    chains[1] = dot_q4(chains[1], odd, x + 8 * k + 4);
  }
  return to_float(add_int(chains[0], chains[1]));
}

// dot_blocks of 16 scattered rows, for one token.
template <class CODES, int COLS>
F dot_gathered(const uint8_t* const* rows, int64_t at, const int8_t* x, int32_t int_sum) {
  constexpr int BITS = CODES::kBits;
  if constexpr (in_planes(BITS)) return dot_gathered_high<BITS, COLS>(rows, at, x);
  // Two chains of additions, where one would leave the multiplier idle.
  I chains[2] = {int_zero(), int_zero()};
  for (int64_t piece = 0; piece < COLS * BITS / 8; piece += 16) {
    B columns[4];
    gather_words(rows, at + piece, columns);
    for (int w = 0; w < 4; ++w) {
      const int8_t* quad = x + piece * 8 / BITS + w * 32 / BITS;
      I& chain = chains[w % 2];
      chain = dot_codes<CODES>(chain, BITS == 4 ? CODES::of(low_nibbles(columns[w])) : columns[w], quad);
      if (BITS == 4) chain = dot_codes<CODES>(chain, CODES::of(high_nibbles(columns[w])), quad + 4);
    }
  }
  return to_float(finish_codes<CODES>(add_int(chains[0], chains[1]), int_sum));
}

// affine: scales and biases of 16 rows side by side, group by group.
template <class FORM>
void gathered_rows(const uint8_t* const* rows, const uint8_t* const* next, const uint8_t* affine,
                   const QuantizedRows& x, float* out) {
  constexpr int64_t kRowBytes = kCodesBytes<FORM> / kTile,
                    kFetched = kBlockBytes<FORM> / kTile;  // bytes per 64 columns
  F acc = zero();
  for (int64_t g = 0; g < x.groups; ++g) {
    // Rows are scattered, so the hardware doesn't prefetch those of the next tile.
    if (next)
      for (int64_t line = (g * kFetched + 63) / 64; line < ((g + 1) * kFetched + 63) / 64; ++line)
        for (int64_t r = 0; r < kTile; ++r) prefetch(next[r] + line * 64);
    for (int64_t part = 0; part < FORM::kScales; ++part) {
      const int64_t s = g * FORM::kScales + part, at = x.at(0, g) * FORM::kScales + part;
      const F sums = dot_gathered<typename FORM::Codes, FORM::kCols>(
          rows, s * (kRowBytes / FORM::kScales), x.codes + at * FORM::kCols, x.int_sums[at]);
      acc = FORM::added(acc, affine + g * FORM::kAffine + part * FORM::kSide, sums, x, at);
    }
  }
  store(out, acc);
}

// Four rows at a time, each with 16 lanes over the columns.
template <int RR>
void half_rows(const uint16_t* weights, int64_t padded_cols, const float* x, int64_t tokens,
               const float* bias, const float* added, float* out, int64_t out_stride, int64_t row) {
  for (int64_t t = 0; t < tokens; ++t) {
    F acc[RR];
    for (int r = 0; r < RR; ++r) acc[r] = zero();
    for (int64_t c = 0; c < padded_cols; c += 16) {
      const F v = load(x + t * padded_cols + c);
      for (int r = 0; r < RR; ++r) acc[r] = fma(load_half(weights + (row + r) * padded_cols + c), v, acc[r]);
    }
    for (int r = 0; r < RR; ++r) {
      const int64_t at = t * out_stride + row + r;
      float sum = reduce_add(acc[r]);
      if (bias) sum = sum + bias[row + r];
      out[at] = added ? added[at] + sum : sum;
    }
  }
}

}  // namespace

void linear_quantized(const RowFormat& format, const uint8_t* tiles, const QuantizedRows& x, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                      int64_t begin, int64_t end) {
  if (format.two_levels())
    return linear_two_level(format, tiles, x, tokens, bias, added, out, out_stride, rows, begin, end);
  with_form(format, [&](auto form) {
    all_tiles<decltype(form)>(tiles, x, tokens, bias, added, out, out_stride, rows, begin, end);
  });
}

void linear_gathered(const RowFormat& format, const uint8_t* const* rows, const uint8_t* const* next,
                     const uint8_t* affine, const QuantizedRows& x, float* out) {
  with_form(format, [&](auto form) { gathered_rows<decltype(form)>(rows, next, affine, x, out); });
}

void linear_half(const uint16_t* weights, int64_t padded_cols, const float* x, int64_t tokens,
                 const float* bias, const float* added, float* out, int64_t out_stride, int64_t begin,
                 int64_t end) {
  int64_t row = begin;
  for (; row + 4 <= end; row += 4)
    half_rows<4>(weights, padded_cols, x, tokens, bias, added, out, out_stride, row);
  for (; row < end; ++row) half_rows<1>(weights, padded_cols, x, tokens, bias, added, out, out_stride, row);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
