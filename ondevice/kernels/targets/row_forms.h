// Row formats at compile time, and what a tile of them has besides codes.
#pragma once

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

// A row format at compile time.
template <int BITS, int GROUP, bool IMPLIED>
struct Form {
  using Codes = Integers<BITS>;
  static constexpr int kCols = GROUP;
  static constexpr int64_t kScales = kGroup / GROUP, kSide = 2 * kTile;  // bytes of 16 scales side by side
  static constexpr int64_t kAffine = kSide * kScales * (IMPLIED ? 1 : 2);
  static constexpr float kZero = 1 << (BITS - 1);

  // acc + a group's products, `sums` being those of the codes. `affine`: 16 scales, and the biases behind all
  // scales of the block. at: of the activations' group. A sum of codes less the zero code is an integer, and
  // exact.
  ONDEVICE_INLINE F added(F acc, const uint8_t* affine, F sums, const QuantizedRows& x, int64_t at) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(affine);
    const F scale = mul(load_half(halves), set1(x.scales[at]));
    if (IMPLIED) return fma(scale, sub(sums, set1(kZero * static_cast<float>(x.int_sums[at]))), acc);
    acc = fma(scale, sums, acc);
    return fma(load_half(halves + kScales * kTile), set1(x.sums[at]), acc);
  }
};

// Codes that a table makes integers of, in groups of 32 with scales alone: powers of two in MXFP4, whose
// integers are doubled, so that the activations' scale is halved; else float16.
template <class CODES>
struct TableForm {
  using Codes = CODES;
  static constexpr bool kMxfp4 = std::is_same_v<CODES, Floats4>;
  static constexpr int kCols = 32;
  static constexpr int64_t kScales = kGroup / kCols, kSide = (kMxfp4 ? 1 : 2) * kTile,
                           kAffine = kSide * kScales;

  ONDEVICE_INLINE F added(F acc, const uint8_t* affine, F sums, const QuantizedRows& x, int64_t at) {
    const F weight = kMxfp4 ? load_powers(affine) : load_half(reinterpret_cast<const uint16_t*>(affine));
    const F scale = mul(weight, set1((kMxfp4 ? 0.5f : 1.0f) * x.scales[at]));
    return fma(scale, sub(sums, set1(static_cast<float>(Codes::kZero * x.int_sums[at]))), acc);
  }
};

// Stores the first `rows` (up to 16) of a tile's sums for a token. bias, added: of the tile's rows, or null.
ONDEVICE_INLINE void store_rows(F sums, const float* bias, const float* added, float* out, int64_t rows) {
  if (bias) sums = add(sums, load_partial(bias, rows));
  if (added) sums = add(load_partial(added, rows), sums);
  store_partial(out, sums, rows);
}

// Bytes of a block of a tile: of its codes, and of all.
template <class FORM>
constexpr int64_t kCodesBytes = kTile * kGroup * FORM::Codes::kBits / 8;
template <class FORM>
constexpr int64_t kBlockBytes = kCodesBytes<FORM> + FORM::kAffine;

template <int BITS, class Run>
void with_bits_form(const RowFormat& format, const Run& run) {
  if (format.group == kGroup) return run(Form<BITS, 64, false>());
  return format.implied() ? run(Form<BITS, 32, true>()) : run(Form<BITS, 32, false>());
}

// Calls `run` with the form of a format.
template <class Run>
void with_form(const RowFormat& format, const Run& run) {
  if (format.mxfp4()) return run(TableForm<Floats4>());
  if (format.kind == ScaleKind::kTable) return run(TableForm<Table4>());
  if (format.bits == 4) return with_bits_form<4>(format, run);
  if (format.bits == 5) return with_bits_form<5>(format, run);
  if (format.bits == 6) return with_bits_form<6>(format, run);
  return with_bits_form<8>(format, run);
}

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
  static constexpr int kGroups = kGroup / GROUP, kQuads = GROUP / 4;     // of a block; of a group
  static constexpr bool kShared = BITS == 3 || (kMinimums && BITS > 2);  // 6 bits each: four in three bytes
  static constexpr int kIntegers = kShared ? 3 : kGroups;                // bytes of a row's block
  static constexpr int64_t kUpper = kTile * (kMinimums ? 4 : 2);
  static constexpr int64_t kHeader = kUpper + kTile * kSuperGroup * kIntegers;
  static constexpr int64_t kBlock = kTile * kGroup * BITS / 8, kSuper = kHeader + kSuperGroup * kBlock;
};

struct Upper {
  F d, minus_dmin;
};

// A block's integers, group by group.
template <class FORM>
ONDEVICE_INLINE void load_integers(const uint8_t* from, I* scales, I* minimums) {
  if constexpr (FORM::kShared) {
    const I a = widen_uint8(from), b = widen_uint8(from + kTile), c = widen_uint8(from + 2 * kTile);
    const I fourth = add_int(add_int(pick_int<6, 3>(a), pick_int<4, 12>(b)), pick_int<2, 48>(c));
    if constexpr (FORM::kMinimums) {
      scales[0] = pick_int<0, 63>(a), minimums[0] = pick_int<0, 63>(b);
      scales[1] = pick_int<0, 63>(c), minimums[1] = fourth;
    } else {
      const I middle = set1_int(-32);
      scales[0] = add_int(pick_int<0, 63>(a), middle), scales[1] = add_int(pick_int<0, 63>(b), middle);
      scales[2] = add_int(pick_int<0, 63>(c), middle), scales[3] = add_int(fourth, middle);
    }
  } else {
    for (int i = 0; i < FORM::kGroups; ++i, from += kTile) {
      if constexpr (FORM::Codes::kBits == 6) {
        scales[i] = widen_int8(reinterpret_cast<const int8_t*>(from));
      } else {
        const I byte = widen_uint8(from);
        if constexpr (FORM::kMinimums)
          scales[i] = pick_int<0, 15>(byte), minimums[i] = pick_int<4, 15>(byte);
        else
          scales[i] = add_int(pick_int<0, 63>(byte), set1_int(-32));
      }
    }
  }
}

template <class FORM>
ONDEVICE_INLINE Upper load_upper(const uint8_t* header) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(header);
  return {load_half(halves), FORM::kMinimums ? sub(set1(-0.0f), load_half(halves + kTile)) : zero()};
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
