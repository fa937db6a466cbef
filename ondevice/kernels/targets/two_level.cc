#include "matrix_products.h"
#include "row_forms.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// How a target adds a block's products up. kWords: their sums fit 16 bits, and widen as they are multiplied
// by scales. kFloats: they are multiplied as floats, exactly.
enum class Sums { kWords, kFloats };
template <class FORM>
constexpr Sums kSums = FORM::Codes::kTop < (kWordProducts == 2 ? 64 : 8) ? Sums::kWords : Sums::kFloats;

// Factors of a block of 16 rows. `pairs` has minimums, or scales where the zero code is taken off last.
template <class FORM, Sums SUMS = kSums<FORM>>
struct Factors {
  static constexpr bool kPairs = FORM::kMinimums || (FORM::kZero && SUMS != Sums::kFloats);
  std::conditional_t<SUMS == Sums::kWords, Words, F> scales[FORM::kGroups];
  Pair pairs[FORM::kGroups / 2];
};
template <class FORM, Sums SUMS>
ONDEVICE_INLINE void load_factors(const uint8_t* header, int64_t block, Factors<FORM, SUMS>* out) {
  I scales[FORM::kGroups], minimums[FORM::kGroups];
  load_integers<FORM>(header + FORM::kUpper + block * kTile * FORM::kIntegers, scales, minimums);
  for (int i = 0; i < FORM::kGroups; ++i) {
    if constexpr (SUMS == Sums::kWords) out->scales[i] = words_of(scales[i]);
    if constexpr (SUMS == Sums::kFloats) out->scales[i] = to_float(scales[i]);
  }
  if constexpr (Factors<FORM, SUMS>::kPairs)
    for (int i = 0; i < FORM::kGroups; i += 2)
      out->pairs[i / 2] =
          FORM::kMinimums ? pair_of(minimums[i], minimums[i + 1]) : pair_of(scales[i], scales[i + 1]);
}

// A block's codes as they lie, or unpacked for many tokens.
template <class FORM>
struct PackedCodes {
  const uint8_t* block;

  template <int QUAD>
  ONDEVICE_INLINED B quad() const {
    return block_quad<typename FORM::Codes, QUAD>(block);
  }
};
template <class FORM>
struct UnpackedCodes {
  static constexpr int kCount = kGroup / 4;
  B quads[kCount];

  explicit UnpackedCodes(const PackedCodes<FORM>& packed) {
    each<kCount>([&](auto quad)
                     ONDEVICE_INLINED { quads[quad.value] = packed.template quad<decltype(quad)::value>(); });
  }
  template <int QUAD>
  ONDEVICE_INLINED const B& quad() const {
    return quads[QUAD];
  }
};

// A block's sum over groups of scale * (sum of (code - zero) * x), rounded to float, of sums that are added
// in their order. Only the last addition may round: products are below 2^24, and so are sums of two at 6 bits
// and of all below. So at 6 bits two pairs of groups are added up by themselves.
template <class FORM>
struct ScaledSum {
  F sum, second;

  template <int GROUP>
  ONDEVICE_INLINED void add_group(const Factors<FORM, Sums::kFloats>& factors, I products) {
    const F value = to_float(products), scale = factors.scales[GROUP];
    if (GROUP == 0)
      sum = mul(scale, value);
    else if (FORM::Codes::kTop == 63 && GROUP == 2)
      second = mul(scale, value);
    else if (FORM::Codes::kTop == 63 && GROUP == 3)
      sum = add(sum, fma(scale, value, second));
    else
      sum = fma(scale, value, sum);
  }
};

// sums[t] = a block's sum over groups of scale * (sum of (code - zero) * x), rounded to float.
template <class FORM, int TT, class CODES>
ONDEVICE_INLINE void scaled_sums(const CODES& codes, const Factors<FORM>& factors, const int8_t* const* x,
                                 const int32_t* const* int_sums, F* sums) {
  using Codes = typename FORM::Codes;
  constexpr int kGroups = FORM::kGroups, kQuads = FORM::kQuads, kTop = Codes::kTop;
  if constexpr (kSums<FORM> == Sums::kFloats) {
    constexpr bool kTwoChains = kQuads == 8 && TT <= 2;
    ScaledSum<FORM> scaled[TT];
    each<kGroups>([&](auto group) ONDEVICE_INLINED {
      constexpr int kAt = decltype(group)::value;
      I a[TT], b[TT];
      for (int t = 0; t < TT; ++t) {
        a[t] = FORM::kZero ? set1_int(-FORM::kZero * int_sums[t][kAt]) : int_zero();
        b[t] = int_zero();
      }
      each<kQuads>([&](auto quad) ONDEVICE_INLINED {
        constexpr int kQuad = kAt * kQuads + decltype(quad)::value;
        const B& these = codes.template quad<kQuad>();
        for (int t = 0; t < TT; ++t) {
          I& chain = kTwoChains && kQuad % 2 ? b[t] : a[t];
          chain = dot_codes<Codes>(chain, these, x[t] + 4 * kQuad);
        }
      });
      for (int t = 0; t < TT; ++t) {
        const I sum = kTwoChains ? add_int(a[t], b[t]) : a[t];
        scaled[t].template add_group<kAt>(factors, finish_codes<Codes>(sum, int_sums[t][kAt]));
      }
    });
    for (int t = 0; t < TT; ++t) sums[t] = scaled[t].sum;
  } else {
    I total[TT];
    for (int t = 0; t < TT; ++t) total[t] = int_zero();
    // Of two products of a quad: with codes up to 15 eight quads fit (8 * 2 * 15 * 127), up to 31 four, up to
    // 63 two.
    constexpr int kFitting = kTop > 31 ? 2 : kTop > 15 ? 4 : 8;
    constexpr int kRun = kWordProducts == 4 || kQuads < kFitting ? kQuads : kFitting;
    each<16 / kRun>([&](auto run) ONDEVICE_INLINED {
      Words words[TT];
      for (int t = 0; t < TT; ++t) words[t] = words_zero();
      each<kRun>([&](auto quad) ONDEVICE_INLINED {
        constexpr int kQuad = decltype(run)::value * kRun + decltype(quad)::value;
        const B& these = codes.template quad<kQuad>();
        for (int t = 0; t < TT; ++t) words[t] = dot_words(words[t], these, x[t] + 4 * kQuad);
      });
      for (int t = 0; t < TT; ++t)
        total[t] = add_words(total[t], words[t], factors.scales[decltype(run)::value * kRun / kQuads]);
    });
    if constexpr (FORM::kZero) {
      // An eighth of a zero code of 32, that the products with sums fit 16 bits.
      constexpr int kEighths = FORM::kZero > 4 ? 8 : 1;
      for (int t = 0; t < TT; ++t) {
        I off = int_zero();
        for (int i = 0; i < kGroups; i += 2)
          off = dot_pair(off, factors.pairs[i / 2], -FORM::kZero / kEighths * int_sums[t][i],
                         -FORM::kZero / kEighths * int_sums[t][i + 1]);
        for (int i = 1; i < kEighths; i *= 2) off = add_int(off, off);
        total[t] = add_int(total[t], off);
      }
    }
    for (int t = 0; t < TT; ++t) sums[t] = to_float(total[t]);
  }
}

// acc + a block's products with a token. sum: of scaled groups; scale: of the token's block.
template <class FORM>
ONDEVICE_INLINE F add_block(F acc, F sum, const Pair* pairs, const Upper& upper, float scale,
                            const int32_t* int_sums) {
  acc = fma(mul(upper.d, set1(scale)), sum, acc);
  if constexpr (FORM::kMinimums) {
    I low = int_zero();
    for (int i = 0; i < FORM::kGroups; i += 2)
      low = dot_pair(low, pairs[i / 2], int_sums[i], int_sums[i + 1]);
    acc = fma(mul(upper.minus_dmin, set1(scale)), to_float(low), acc);
  }
  return acc;
}

// Adds block g's products with tokens t0 to t0 + TT - 1 to acc[t].
template <class FORM, int TT, class CODES>
ONDEVICE_INLINE void add_tokens(const CODES& codes, const Factors<FORM>& factors, const Upper& upper,
                                const QuantizedRows& x, int64_t g, int64_t t0, F* acc) {
  const int8_t* rows[TT];
  const int32_t* int_sums[TT];
  for (int t = 0; t < TT; ++t) {
    const int64_t at = x.at(t0 + t, g);
    rows[t] = x.codes + at * kGroup;
    int_sums[t] = x.int_sums + at * FORM::kGroups;
  }
  F sums[TT];
  scaled_sums<FORM, TT>(codes, factors, rows, int_sums, sums);
  for (int t = 0; t < TT; ++t)
    acc[t] = add_block<FORM>(acc[t], sums[t], factors.pairs, upper, x.scales[x.at(t0 + t, g)], int_sums[t]);
}

#if defined(ONDEVICE_MATRIX_PRODUCTS)
template <class FORM>
constexpr bool kByMatrices = FORM::kGroups <= 2;
constexpr int64_t kMostTokens = kMatrixRun;
#else
constexpr int64_t kMostTokens = 32;  // for which a block's codes are unpacked once
#endif

// Calls run(codes, factors, upper, g) for each block g of a tile.
template <class FORM, Sums SUMS, class Run>
ONDEVICE_INLINE void each_block(const uint8_t* tile, int64_t groups, const Run& run) {
  for (int64_t g = 0; g < groups; g += kSuperGroup, tile += FORM::kSuper) {
    const Upper upper = load_upper<FORM>(tile);
    prefetch_ahead(tile, FORM::kHeader);
    for (int64_t b = 0; b < kSuperGroup; ++b) {
      const PackedCodes<FORM> codes{tile + FORM::kHeader + b * FORM::kBlock};
      prefetch_ahead(codes.block, FORM::kBlock);
      Factors<FORM, SUMS> factors;
      load_factors(tile, b, &factors);
      run(codes, factors, upper, g + b);
    }
  }
}

// A tile's products with TT tokens from t0 on, into acc[t].
template <class FORM, int TT>
void tile_few(const uint8_t* tile, const QuantizedRows& x, int64_t t0, F* acc) {
  F sums[TT];
  for (int t = 0; t < TT; ++t) sums[t] = zero();
  each_block<FORM, kSums<FORM>>(
      tile, x.groups,
      [&](const auto& codes, const auto& factors, const Upper& upper, int64_t g)
          ONDEVICE_INLINED { add_tokens<FORM, TT>(codes, factors, upper, x, g, t0, sums); });
  for (int t = 0; t < TT; ++t) acc[t] = sums[t];
}

#if defined(ONDEVICE_MATRIX_PRODUCTS)
// The same with `count` tokens, a multiple of kMatrixTokens.
template <class FORM>
void tile_by_matrices(const uint8_t* tile, const QuantizedRows& x, int64_t t0, int64_t count, F* acc) {
  for (int64_t t = 0; t < count; ++t) acc[t] = zero();
  each_block<FORM, Sums::kFloats>(
      tile, x.groups,
      [&](const auto& packed, const auto& factors, const Upper& upper, int64_t g) ONDEVICE_INLINED {
        const UnpackedCodes<FORM> codes(packed);
        const int64_t at = x.at(t0, g);
        MatrixProducts<kGroup / FORM::kGroups>::multiply(
            codes.quads, x.codes + at * kGroup, count, [&](int64_t t, const auto& sums) ONDEVICE_INLINED {
              for (int64_t i = 0; i < kMatrixTokens; ++i) {
                const int32_t* int_sums = x.int_sums + (at + t + i) * FORM::kGroups;
                ScaledSum<FORM> scaled;
                each<FORM::kGroups>([&](auto group) ONDEVICE_INLINED {
                  constexpr int kAt = decltype(group)::value;
                  I products = sums.template of<kAt>(i);
                  if (FORM::kZero) products = add_int(products, set1_int(-FORM::kZero * int_sums[kAt]));
                  scaled.template add_group<kAt>(factors, products);
                });
                acc[t + i] = add_block<FORM>(acc[t + i], scaled.sum, factors.pairs, upper,
                                             x.scales[at + t + i], int_sums);
              }
            });
      });
}
#endif

// The same with `count` tokens, at most kMostTokens.
template <class FORM>
void tile_many(const uint8_t* tile, const QuantizedRows& x, int64_t t0, int64_t count, F* acc) {
#if defined(ONDEVICE_MATRIX_PRODUCTS)
  if constexpr (kByMatrices<FORM>)
    if (count % kMatrixTokens == 0) return tile_by_matrices<FORM>(tile, x, t0, count, acc);
#endif
  for (int64_t t = 0; t < count; ++t) acc[t] = zero();
  each_block<FORM, kSums<FORM>>(
      tile, x.groups,
      [&](const auto& packed, const auto& factors, const Upper& upper, int64_t g) ONDEVICE_INLINED {
        const UnpackedCodes<FORM> codes(packed);
        int64_t t = 0;
        for (; t + kScaledTokens <= count; t += kScaledTokens)
          add_tokens<FORM, kScaledTokens>(codes, factors, upper, x, g, t0 + t, acc + t);
        for (; t + 2 <= count; t += 2) add_tokens<FORM, 2>(codes, factors, upper, x, g, t0 + t, acc + t);
        if (t < count) add_tokens<FORM, 1>(codes, factors, upper, x, g, t0 + t, acc + t);
      });
}

template <class FORM>
void all_two_level(const uint8_t* tiles, const QuantizedRows& x, int64_t tokens, const float* bias,
                   const float* added, float* out, int64_t out_stride, int64_t rows, int64_t begin,
                   int64_t end) {
  F acc[kMostTokens];
#if defined(ONDEVICE_MATRIX_PRODUCTS)
  const MatrixProducts<kGroup / FORM::kGroups> products(kByMatrices<FORM> && tokens >= kMatrixTokens);
#endif
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* tile = tiles + i * (x.groups / kSuperGroup) * FORM::kSuper;
    const int64_t left = rows - i * kTile;
    for (int64_t t0 = 0, count; t0 < tokens; t0 += count) {
      count = tokens - t0 < kMostTokens ? tokens - t0 : kMostTokens;
#if defined(ONDEVICE_MATRIX_PRODUCTS)
      if (kByMatrices<FORM> && count > kMatrixTokens) count -= count % kMatrixTokens;
#endif
      if (count == 1)
        tile_few<FORM, 1>(tile, x, t0, acc);
      else if (count == 2)
        tile_few<FORM, 2>(tile, x, t0, acc);
      else if (count == 3)
        tile_few<FORM, 3>(tile, x, t0, acc);
      else if (count == 4)
        tile_few<FORM, 4>(tile, x, t0, acc);
      else
        tile_many<FORM>(tile, x, t0, count, acc);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t at = (t0 + t) * out_stride + i * kTile;
        store_rows(acc[t], bias ? bias + i * kTile : nullptr, added ? added + at : nullptr, out + at, left);
      }
    }
  }
}

}  // namespace

void linear_two_level(const RowFormat& format, const uint8_t* tiles, const QuantizedRows& x, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                      int64_t begin, int64_t end) {
  constexpr ScaleKind kSymmetric = ScaleKind::kTwoLevelSymmetric;
  const auto all = format.kind == ScaleKind::kTwoLevelTable
                       ? all_two_level<TwoLevelForm<4, 32, ScaleKind::kTwoLevelTable>>
                   : format.bits == 2 ? all_two_level<TwoLevelForm<2, 16, ScaleKind::kTwoLevel>>
                   : format.bits == 3 ? all_two_level<TwoLevelForm<3, 16, kSymmetric>>
                   : format.bits == 4 ? all_two_level<TwoLevelForm<4, 32, ScaleKind::kTwoLevel>>
                   : format.bits == 5 ? all_two_level<TwoLevelForm<5, 32, ScaleKind::kTwoLevel>>
                                      : all_two_level<TwoLevelForm<6, 16, kSymmetric>>;
  all(tiles, x, tokens, bias, added, out, out_stride, rows, begin, end);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
