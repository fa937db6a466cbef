// Products with the high plane of a matrix alone, whose codes' low bits are taken as their mean.
#include "../planes.h"
#include "row_forms.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// A block's high plane: codes of BITS bits without their low ones.
template <int BITS>
struct HighBits {
  static constexpr int kLow = low_plane_bits_of(BITS), kTop = (1 << (BITS - kLow)) - 1;
  static constexpr int64_t kBytes = kTile * kGroup * (BITS - kLow) / 8;

  // Quad QUAD, of 16, of the block's 64 columns; planes.cc has the order of its bits.
  template <int QUAD>
  static B quad(const uint8_t* plane) {
    constexpr int kHalf = QUAD / 8, kPlace = QUAD % 8;
    if constexpr (BITS == 4)
      return pick_bits<kPlace % 2 * 4 + kHalf * 2, 3>(load_bytes(plane + 64 * (kPlace / 2)));
    if constexpr (BITS == 8) return pick_bits<kHalf * 4, 15>(load_bytes(plane + 64 * kPlace));
    plane += kHalf * (kBytes / 2);
    if constexpr (BITS == 6) return pick_bits<kPlace % 4 * 2, 3>(load_bytes(plane + 64 * (kPlace / 4)));
    const B two = pick_bits<kPlace % 2 * 4 + kPlace / 4 * 2, 3>(load_bytes(plane + 64 * (kPlace / 2 % 2)));
    return with_bits<kPlace - 2, 4>(two, load_bytes(plane + 128));
  }
};

// The mean of a code is kStep * high + kMean; that of a table's entries is kUnit times one of four bytes.
template <class CODES>
struct HighCodes : HighBits<CODES::kBits> {
  static constexpr bool kTable = false;
  static constexpr float kStep = 1 << HighCodes::kLow, kMean = (kStep - 1) / 2;
};
template <>
struct HighCodes<Table4> : HighBits<4> {
  static constexpr bool kTable = true;
  static constexpr uint8_t kMeans[16] = {33, 99, 147, 209};
  static constexpr float kUnit = 1.0f;
};
template <>
struct HighCodes<Floats4> : HighBits<4> {
  static constexpr bool kTable = true;
  static constexpr uint8_t kMeans[16] = {27, 39, 21, 9};
  static constexpr float kUnit = 0.5f;
};

// Calls add(t, sum, last) with sums of quads [FIRST, FIRST + COUNT) of high bits times activations.
template <class HIGH, int FIRST, int COUNT, int TT, class Add>
ONDEVICE_INLINE void high_sums(const uint8_t* plane, const int8_t* const* x, const Add& add) {
  constexpr int kMost = 32767 / (kWordProducts * 127 * HIGH::kTop), kRun = COUNT <= kMost ? COUNT
                                                                           : kMost < 8    ? 4
                                                                                          : 8;
  static_assert(COUNT % kRun == 0 && kRun <= kMost, "sums fit 16 bits");
  each<COUNT / kRun>([&](auto run) ONDEVICE_INLINED {
    Words sums[TT];
    for (int t = 0; t < TT; ++t) sums[t] = words_zero();
    each<kRun>([&](auto at) ONDEVICE_INLINED {
      constexpr int kQuad = FIRST + decltype(run)::value * kRun + decltype(at)::value;
      const B high = HIGH::template quad<kQuad>(plane);
      for (int t = 0; t < TT; ++t) sums[t] = dot_words(sums[t], high, x[t] + 4 * kQuad);
    });
    for (int t = 0; t < TT; ++t) add(t, sums[t]);
  });
}

// Sums of codes, their low bits as their mean, times activations, of quads [FIRST, FIRST + COUNT).
template <class CODES, int FIRST, int COUNT, int TT>
ONDEVICE_INLINE void mean_sums(const uint8_t* plane, const int8_t* const* x, const int32_t* int_sums,
                               F* sums) {
  using High = HighCodes<CODES>;
  I total[TT];
  for (int t = 0; t < TT; ++t) total[t] = int_zero();
  if constexpr (High::kTable) {
    each<COUNT>([&](auto at) ONDEVICE_INLINED {
      constexpr int kQuad = FIRST + decltype(at)::value;
      const B means = look_up(High::template quad<kQuad>(plane), High::kMeans);
      for (int t = 0; t < TT; ++t) total[t] = dot_codes<CODES>(total[t], means, x[t] + 4 * kQuad);
    });
    for (int t = 0; t < TT; ++t)
      sums[t] = mul(set1(High::kUnit), to_float(finish_codes<CODES>(total[t], int_sums[t])));
  } else {
    const Words one = words_of(set1_int(1));
    high_sums<High, FIRST, COUNT, TT>(
        plane, x, [&](int t, Words words) ONDEVICE_INLINED { total[t] = add_words(total[t], words, one); });
    for (int t = 0; t < TT; ++t)
      sums[t] =
          fma(set1(High::kStep), to_float(total[t]), set1(High::kMean * static_cast<float>(int_sums[t])));
  }
}

// A tile of one level of scales with TT tokens from t0 on.
template <class FORM, int TT>
struct OneLevelTile {
  using Codes = typename FORM::Codes;
  static constexpr int64_t kBlock = HighCodes<Codes>::kBytes + FORM::kAffine;
  static int64_t tile_bytes(int64_t groups) { return groups * kBlock; }

  static void multiply(const uint8_t* tile, const QuantizedRows& x, int64_t t0, F* acc) {
    for (int64_t g = 0; g < x.groups; ++g, tile += kBlock) {
      prefetch_ahead(tile, kBlock);
      const uint8_t* affine = tile + kBlock - FORM::kAffine;
      const int8_t* rows[TT];
      for (int t = 0; t < TT; ++t) rows[t] = x.codes + x.at(t0 + t, g) * kGroup;
      each<FORM::kScales>([&](auto part) ONDEVICE_INLINED {
        constexpr int kPart = decltype(part)::value, kQuads = FORM::kCols / 4;
        const int64_t at = x.at(t0, g) * FORM::kScales + kPart;
        int32_t int_sums[TT];
        for (int t = 0; t < TT; ++t) int_sums[t] = x.int_sums[at + t * FORM::kScales];
        F sums[TT];
        mean_sums<Codes, kPart * kQuads, kQuads, TT>(tile, rows, int_sums, sums);
        for (int t = 0; t < TT; ++t)
          acc[t] = FORM::added(acc[t], affine + kPart * FORM::kSide, sums[t], x, at + t * FORM::kScales);
      });
    }
  }
};

// sums[t] = a block's sum over groups of scale * (sum of (code - zero) * x), low bits of codes as their mean.
template <class FORM, int TT>
ONDEVICE_INLINE void block_sums(const uint8_t* plane, const I* scales, const int8_t* const* x,
                                const int32_t* const* int_sums, F* sums) {
  using Codes = typename FORM::Codes;
  using High = HighCodes<Codes>;
  if constexpr (High::kTable) {
    for (int t = 0; t < TT; ++t) sums[t] = zero();
    each<FORM::kGroups>([&](auto group) ONDEVICE_INLINED {
      constexpr int kAt = decltype(group)::value;
      int32_t group_sums[TT];
      for (int t = 0; t < TT; ++t) group_sums[t] = int_sums[t][kAt];
      F products[TT];
      mean_sums<Codes, kAt * FORM::kQuads, FORM::kQuads, TT>(plane, x, group_sums, products);
      for (int t = 0; t < TT; ++t) {
        const F off = set1(static_cast<float>(FORM::kZero * group_sums[t]));
        sums[t] = fma(to_float(scales[kAt]), sub(products[t], off), sums[t]);
      }
    });
  } else {
    I total[TT], offsets[TT];
    for (int t = 0; t < TT; ++t) total[t] = offsets[t] = int_zero();
    each<FORM::kGroups>([&](auto group) ONDEVICE_INLINED {
      constexpr int kAt = decltype(group)::value;
      const Words scale = words_of(scales[kAt]);
      high_sums<High, kAt * FORM::kQuads, FORM::kQuads, TT>(
          plane, x,
          [&](int t, Words words) ONDEVICE_INLINED { total[t] = add_words(total[t], words, scale); });
    });
    for (int i = 0; i < FORM::kGroups; i += 2) {
      const Pair pair = pair_of(scales[i], scales[i + 1]);
      for (int t = 0; t < TT; ++t)
        offsets[t] = dot_pair(offsets[t], pair, int_sums[t][i], int_sums[t][i + 1]);
    }
    for (int t = 0; t < TT; ++t)
      sums[t] = fma(set1(High::kStep), to_float(total[t]),
                    mul(set1(High::kMean - FORM::kZero), to_float(offsets[t])));
  }
}

// The same of two levels of scales.
template <class FORM, int TT>
struct TwoLevelTile {
  static constexpr int64_t kBlock = HighCodes<typename FORM::Codes>::kBytes,
                           kSuper = FORM::kHeader + kSuperGroup * kBlock;
  static int64_t tile_bytes(int64_t groups) { return groups / kSuperGroup * kSuper; }

  static void multiply(const uint8_t* tile, const QuantizedRows& x, int64_t t0, F* acc) {
    for (int64_t g = 0; g < x.groups; g += kSuperGroup, tile += kSuper) {
      const Upper upper = load_upper<FORM>(tile);
      prefetch_ahead(tile, kSuper);
      for (int64_t b = 0; b < kSuperGroup; ++b) {
        I scales[FORM::kGroups], minimums[FORM::kGroups];
        load_integers<FORM>(tile + FORM::kUpper + b * kTile * FORM::kIntegers, scales, minimums);
        const int8_t* rows[TT];
        const int32_t* int_sums[TT];
        for (int t = 0; t < TT; ++t) {
          const int64_t at = x.at(t0 + t, g + b);
          rows[t] = x.codes + at * kGroup;
          int_sums[t] = x.int_sums + at * FORM::kGroups;
        }
        F sums[TT];
        block_sums<FORM, TT>(tile + FORM::kHeader + b * kBlock, scales, rows, int_sums, sums);
        for (int t = 0; t < TT; ++t) {
          const float scale = x.scales[x.at(t0 + t, g + b)];
          acc[t] = fma(mul(upper.d, set1(scale)), sums[t], acc[t]);
          if constexpr (FORM::kMinimums) {
            I low = int_zero();
            for (int i = 0; i < FORM::kGroups; i += 2)
              low = dot_pair(low, pair_of(minimums[i], minimums[i + 1]), int_sums[t][i], int_sums[t][i + 1]);
            acc[t] = fma(mul(upper.minus_dmin, set1(scale)), to_float(low), acc[t]);
          }
        }
      }
    }
  }
};

// TILE's products with TT tokens.
template <template <class, int> class TILE, class FORM, int TT>
void high_tile(const uint8_t* tile, const QuantizedRows& x, int64_t t0, const float* bias, const float* added,
               float* out, int64_t out_stride, int64_t rows) {
  F acc[TT];
  for (int t = 0; t < TT; ++t) acc[t] = zero();
  TILE<FORM, TT>::multiply(tile, x, t0, acc);
  for (int t = 0; t < TT; ++t) {
    const int64_t at = (t0 + t) * out_stride;
    store_rows(acc[t], bias, added ? added + at : nullptr, out + at, rows);
  }
}

template <template <class, int> class TILE, class FORM>
void high_tiles(const uint8_t* planes, const QuantizedRows& x, int64_t tokens, const float* bias,
                const float* added, float* out, int64_t out_stride, int64_t rows, int64_t begin,
                int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* tile = planes + i * TILE<FORM, 1>::tile_bytes(x.groups);
    const float *tile_bias = bias ? bias + i * kTile : nullptr,
                *tile_added = added ? added + i * kTile : nullptr;
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2)
      high_tile<TILE, FORM, 2>(tile, x, t, tile_bias, tile_added, out + i * kTile, out_stride,
                               rows - i * kTile);
    if (t < tokens)
      high_tile<TILE, FORM, 1>(tile, x, t, tile_bias, tile_added, out + i * kTile, out_stride,
                               rows - i * kTile);
  }
}

}  // namespace

void linear_high(const RowFormat& format, const uint8_t* planes, const QuantizedRows& x, int64_t tokens,
                 const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                 int64_t begin, int64_t end) {
  const auto two_levels = [&](auto form) {
    high_tiles<TwoLevelTile, decltype(form)>(planes, x, tokens, bias, added, out, out_stride, rows, begin,
                                             end);
  };
  if (format.kind == ScaleKind::kTwoLevelTable)
    two_levels(TwoLevelForm<4, 32, ScaleKind::kTwoLevelTable>());
  else if (format.kind == ScaleKind::kTwoLevelSymmetric)
    two_levels(TwoLevelForm<6, 16, ScaleKind::kTwoLevelSymmetric>());
  else if (format.two_levels() && format.bits == 4)
    two_levels(TwoLevelForm<4, 32, ScaleKind::kTwoLevel>());
  else if (format.two_levels())
    two_levels(TwoLevelForm<5, 32, ScaleKind::kTwoLevel>());
  else
    with_form(format, [&](auto form) {
      high_tiles<OneLevelTile, decltype(form)>(planes, x, tokens, bias, added, out, out_stride, rows, begin,
                                               end);
    });
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
