// Products by Arm's i8mm: 2 rows times 2 tokens, of 8 columns each, in one instruction.
#pragma once

namespace ondevice {
namespace ONDEVICE_NS {

constexpr int kMatrixTokens = 8;

// For groups of GROUP columns, 32 or 64. Groups of 16 have too few products for each sum that is stored.
template <int GROUP>
class MatrixProducts {
 public:
  static constexpr int kGroups = kGroup / GROUP;  // of a block
  using Sums = MatrixSums<kGroups, kMatrixTokens>;

  explicit MatrixProducts(bool) {}

  // Multiplies a block's 16 quads with `count` tokens' activations (count, 64), 8 at a time: calls add(t,
  // sums) for tokens t to t + 7.
  template <class Add>
  static void multiply(const B* quads, const int8_t* x, int64_t count, const Add& add) {
    RowPair rows[kEights][kTile / 2];
    for (int k = 0; k < kEights; ++k)
      for (int i = 0; i < 4; ++i) {
        const uint32x4_t first = vreinterpretq_u32_u8(quads[2 * k].v[i]),
                         second = vreinterpretq_u32_u8(quads[2 * k + 1].v[i]);
        rows[k][2 * i] = vreinterpretq_u8_u32(vzip1q_u32(first, second));
        rows[k][2 * i + 1] = vreinterpretq_u8_u32(vzip2q_u32(first, second));
      }
    for (int64_t t = 0; t < count; t += kMatrixTokens) {
      Sums sums;
      for (int group = 0; group < kGroups; ++group)
        multiply_group(rows + group * (GROUP / 8), x + t * kGroup + group * GROUP, sums.sums[group]);
      add(t, sums);
    }
  }

 private:
  static constexpr int kEights = kGroup / 8, kPairs = kMatrixTokens / 2;
  using RowPair = uint8x16_t;  // 8 columns of two rows

  // sums[t] = a group's products of 16 rows with token t.
  ONDEVICE_INLINE void multiply_group(const RowPair (*rows)[kTile / 2], const int8_t* x,
                                      int32_t (*sums)[kTile]) {
    for (int at = 0; at < GROUP; at += 32) {
      int8x16_t tokens[kPairs][4];  // 8 columns of two tokens
      for (int pair = 0; pair < kPairs; ++pair)
        for (int half = 0; half < 2; ++half) {
          const int8_t* from = x + 2 * pair * kGroup + at + 16 * half;
          const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(from)),
                          second = vreinterpretq_s64_s8(vld1q_s8(from + kGroup));
          tokens[pair][2 * half] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
          tokens[pair][2 * half + 1] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
        }
      for (int i = 0; i < 4; ++i) {
        int32x4_t low[kPairs], high[kPairs];  // of rows 4 i and 4 i + 1, and of the next two
        for (int pair = 0; pair < kPairs; ++pair) low[pair] = high[pair] = vdupq_n_s32(0);
        for (int k = 0; k < 4; ++k)
          for (int pair = 0; pair < kPairs; ++pair) {
            low[pair] = vusmmlaq_s32(low[pair], rows[at / 8 + k][2 * i], tokens[pair][k]);
            high[pair] = vusmmlaq_s32(high[pair], rows[at / 8 + k][2 * i + 1], tokens[pair][k]);
          }
        for (int pair = 0; pair < kPairs; ++pair) {
          add_rows(vuzp1q_s32(low[pair], high[pair]), at > 0, sums[2 * pair] + 4 * i);
          add_rows(vuzp2q_s32(low[pair], high[pair]), at > 0, sums[2 * pair + 1] + 4 * i);
        }
      }
    }
  }
  ONDEVICE_INLINE void add_rows(int32x4_t products, bool added, int32_t* sums) {
    vst1q_s32(sums, added ? vaddq_s32(vld1q_s32(sums), products) : products);
  }
};

}  // namespace ONDEVICE_NS
}  // namespace ondevice
