#include "simd.h"
#include "target_kernels.h"
#include "tile_products.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// Weights with two levels of scales. A tile is one stretch of bytes for every 256 columns: a header of 16 d,
// in kTwoLevel 16 dmin, and for each block of 64 columns its integers, each byte of a row beside those of the
// other rows; then the codes of the four blocks.
//
// Per output, blocks ascending, with xs the scale of a block's activations x and g its groups of columns:
//   acc = fma(d * xs, sum over g of s[g] * (sum of (code - zero) * x), acc)
//   acc = fma(-dmin * xs, sum over g of m[g] * (sum of x), acc), in kTwoLevel
// Both sums are exact integers, rounded to float once.
template <int BITS, int GROUP, ScaleKind KIND>
struct TwoLevelForm {
  using Codes = std::conditional_t<KIND == ScaleKind::kTwoLevelTable, Table4, Integers<BITS>>;
  static constexpr bool kMinimums = KIND == ScaleKind::kTwoLevel;
  static constexpr int kZero = KIND == ScaleKind::kTwoLevelTable ? Table4::kZero
                               : kMinimums                       ? 0
                                                                 : 1 << (BITS - 1);
  static constexpr int kGroups = kGroup / GROUP, kUnits = GROUP / 16;    // of a block; 16 columns of a group
  static constexpr bool kShared = BITS == 3 || (kMinimums && BITS > 2);  // 6 bits each: four in three bytes
  static constexpr int kIntegers = kShared ? 3 : kGroups;                // bytes of a row's block
  static constexpr int64_t kUpper = kTile * (kMinimums ? 4 : 2);
  static constexpr int64_t kHeader = kUpper + kTile * kSuperGroup * kIntegers;
  static constexpr int64_t kBlock = kTile * kGroup * BITS / 8, kSuper = kHeader + kSuperGroup * kBlock;
  // Whether sums over three groups may be too large for exact floats: |s| <= 128, |code - zero| <= 32.
  static constexpr bool kPairs = BITS == 6;

  static int64_t tile_bytes(int64_t groups) { return groups / kSuperGroup * kSuper; }

  // A block's scales and minimums of 16 rows, group by group: int8.
  static void load_integers(const uint8_t* from, Bytes16* scales, Bytes16* minimums) {
    Bytes16 bytes[kIntegers];
    for (int i = 0; i < kIntegers; ++i) bytes[i] = load_vector<Bytes16>(from + kTile * i);
    if constexpr (kShared) {
      const Bytes16 fourth = bytes[0] >> 6 | bytes[1] >> 6 << 2 | bytes[2] >> 6 << 4;
      if constexpr (kMinimums) {
        scales[0] = bytes[0] & 63, minimums[0] = bytes[1] & 63;
        scales[1] = bytes[2] & 63, minimums[1] = fourth;
      } else {
        for (int i = 0; i < 3; ++i) scales[i] = (bytes[i] & 63) - 32;
        scales[3] = fourth - 32;
      }
    } else {
      for (int i = 0; i < kIntegers; ++i) {
        scales[i] = kMinimums                           ? bytes[i] & 15
                    : KIND == ScaleKind::kTwoLevelTable ? (bytes[i] & 63) - 32
                                                        : bytes[i];
        if (kMinimums) minimums[i] = bytes[i] >> 4;
      }
    }
  }

  template <int TT, int N>
  static void add(const uint8_t* tiles, const QuantizedRows& x, int64_t t0, F (*acc)[TT]);
};

// The codes of quad QUAD of a block's unit of 16 columns.
template <class FORM, int UNIT, int QUAD>
B unit_codes(const uint8_t* block) {
  constexpr int kBits = FORM::Codes::kBits, kPlace = UNIT % 2 * 4 + QUAD;
  return FORM::Codes::of(quad_codes<kBits, kPlace>(block + UNIT / 2 * half_block_bytes(kBits)));
}

// sums[n][t] = sum over a block's groups of scale * (sum of (code - zero) * x), as a float. Only the last
// addition may round: products are below 2^24, and so are sums of two at 6 bits and of all below.
template <class FORM, int TT, int N>
void scaled_sums(const uint8_t* const* blocks, const int8_t* const* x, const int32_t* const* int_sums,
                 Bytes16 (*scales)[FORM::kGroups], F (*sums)[TT]) {
  using Codes = typename FORM::Codes;
  constexpr bool kTwoChains = FORM::kUnits == 2 && N * TT <= 4;
  F pairs[N][TT];
  each<FORM::kGroups>([&](auto group) {
    constexpr int kAt = decltype(group)::value;
    I a[N][TT], b[N][TT];
    for (int n = 0; n < N; ++n)
      for (int t = 0; t < TT; ++t) {
        a[n][t] = FORM::kZero ? set1_int(-FORM::kZero * int_sums[t][kAt]) : int_zero();
        b[n][t] = int_zero();
      }
    each<FORM::kUnits * 4>([&](auto place) {
      constexpr int kPlace = decltype(place)::value, kUnit = kAt * FORM::kUnits + kPlace / 4;
      B codes[N];
      for (int n = 0; n < N; ++n) codes[n] = unit_codes<FORM, kUnit, kPlace % 4>(blocks[n]);
      for (int t = 0; t < TT; ++t)
        for (int n = 0; n < N; ++n) {
          I& chain = kTwoChains && kPlace >= 4 ? b[n][t] : a[n][t];
          chain = dot_codes<Codes>(chain, codes[n], x[t] + 16 * kUnit + 4 * (kPlace % 4));
        }
    });
    for (int n = 0; n < N; ++n) {
      const F scale = widen_int8(scales[n][kAt]);
      for (int t = 0; t < TT; ++t) {
        const I sum = kTwoChains ? add_int(a[n][t], b[n][t]) : a[n][t];
        const F value = to_float(finish_codes<Codes>(sum, int_sums[t][kAt]));
        if (kAt == 0)
          sums[n][t] = mul(scale, value);
        else if (FORM::kPairs && kAt == 2)
          pairs[n][t] = mul(scale, value);
        else if (FORM::kPairs && kAt == 3)
          sums[n][t] = add(sums[n][t], fma(scale, value, pairs[n][t]));
        else
          sums[n][t] = fma(scale, value, sums[n][t]);
      }
    }
  });
}

#if defined(ONDEVICE_WORD_SUMS)
// scaled_sums of one block by sums in 16 bits, which widen as they are multiplied by scales. Of codes up to
// 31 four quads fit (4 * 2 * 31 * 127), of codes up to 63 two.
template <class FORM, int TT>
void scaled_sums_words(const uint8_t* block, const int8_t* const* x, const int32_t* const* int_sums,
                       const Bytes16* scales, F* sums) {
  constexpr int kQuads = FORM::Codes::kTop > 31 ? 2 : 4;
  I total[TT];
  for (int t = 0; t < TT; ++t) total[t] = int_zero();
  each<FORM::kGroups>([&](auto group) {
    constexpr int kAt = decltype(group)::value;
    const Words weights = words_of_int8(scales[kAt]);
    each<FORM::kUnits * 4 / kQuads>([&](auto run) {
      Words words[TT];
      for (int t = 0; t < TT; ++t) words[t] = words_zero();
      each<kQuads>([&](auto quad) {
        constexpr int kPlace = decltype(run)::value * kQuads + decltype(quad)::value;
        constexpr int kUnit = kAt * FORM::kUnits + kPlace / 4;
        const B codes = unit_codes<FORM, kUnit, kPlace % 4>(block);
        for (int t = 0; t < TT; ++t)
          words[t] = dot_words(words[t], codes, x[t] + 16 * kUnit + 4 * (kPlace % 4));
      });
      for (int t = 0; t < TT; ++t) total[t] = add_words(total[t], words[t], weights);
    });
    // A weight counts twice, in both words of its lane.
    if (FORM::kZero)
      for (int t = 0; t < TT; ++t)
        total[t] = add_words(total[t], words_set1(static_cast<int16_t>(-FORM::kZero / 2 * int_sums[t][kAt])),
                             weights);
  });
  for (int t = 0; t < TT; ++t) sums[t] = to_float(total[t]);
}
#endif

template <int BITS, int GROUP, ScaleKind KIND>
template <int TT, int N>
void TwoLevelForm<BITS, GROUP, KIND>::add(const uint8_t* tiles, const QuantizedRows& x, int64_t t0,
                                          F (*acc)[TT]) {
  for (int64_t g = 0; g < x.groups; ++g) {
    const int64_t block = g % kSuperGroup;
    const uint8_t *headers[N], *blocks[N];
    Bytes16 scales[N][kGroups], minimums[N][kGroups];
    for (int n = 0; n < N; ++n) {
      headers[n] = tiles + n * tile_bytes(x.groups) + g / kSuperGroup * kSuper;
      blocks[n] = headers[n] + kHeader + block * kBlock;
      load_integers(headers[n] + kUpper + block * kTile * kIntegers, scales[n], minimums[n]);
      if (block == 0) prefetch_ahead(headers[n], kHeader);
      prefetch_ahead(blocks[n], kBlock);
    }
    const int8_t* codes[TT];
    const int32_t* int_sums[TT];
    for (int t = 0; t < TT; ++t) {
      const int64_t at = (t0 + t) * x.groups + g;
      codes[t] = x.codes + at * kGroup;
      int_sums[t] = x.part_int_sums + at * kGroups;
    }
    F sums[N][TT];
#if defined(ONDEVICE_WORD_SUMS)
    if constexpr (Codes::kTop < 64)
      for (int n = 0; n < N; ++n)
        scaled_sums_words<TwoLevelForm, TT>(blocks[n], codes, int_sums, scales[n], sums[n]);
    else
#endif
      scaled_sums<TwoLevelForm, TT, N>(blocks, codes, int_sums, scales, sums);
    for (int n = 0; n < N; ++n) {
      const uint16_t* upper = reinterpret_cast<const uint16_t*>(headers[n]);
      const F d = load_half(upper);
      for (int t = 0; t < TT; ++t) {
        const F step = mul(d, set1(x.scales[(t0 + t) * x.groups + g]));
        acc[n][t] = fma(step, sums[n][t], acc[n][t]);
      }
      if constexpr (kMinimums) {
        const F dmin = load_half(upper + kTile);
        F low[TT];
        for (int group = 0; group < kGroups; ++group) {
          const F minimum = widen_int8(minimums[n][group]);
          for (int t = 0; t < TT; ++t) {
            const F sum = set1(static_cast<float>(int_sums[t][group]));
            low[t] = group ? fma(minimum, sum, low[t]) : mul(minimum, sum);
          }
        }
        for (int t = 0; t < TT; ++t)
          acc[n][t] = fma(mul(dmin, set1(-x.scales[(t0 + t) * x.groups + g])), low[t], acc[n][t]);
      }
    }
  }
}

// Calls `run` with the form of a format.
template <class Run>
void with_two_level_form(const RowFormat& format, const Run& run) {
  if (format.kind == ScaleKind::kTwoLevelTable) return run(TwoLevelForm<4, 32, ScaleKind::kTwoLevelTable>());
  if (format.bits == 2) return run(TwoLevelForm<2, 16, ScaleKind::kTwoLevel>());
  if (format.bits == 3) return run(TwoLevelForm<3, 16, ScaleKind::kTwoLevelSymmetric>());
  if (format.bits == 4) return run(TwoLevelForm<4, 32, ScaleKind::kTwoLevel>());
  if (format.bits == 5) return run(TwoLevelForm<5, 32, ScaleKind::kTwoLevel>());
  return run(TwoLevelForm<6, 16, ScaleKind::kTwoLevelSymmetric>());
}

}  // namespace

void linear_two_level(const RowFormat& format, const uint8_t* tiles, const QuantizedRows& x, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                      int64_t begin, int64_t end) {
  with_two_level_form(format, [&](auto form) {
    all_tiles<decltype(form)>(tiles, x, tokens, bias, added, out, out_stride, rows, begin, end);
  });
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
