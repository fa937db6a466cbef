// Products by AMX: 16 tokens times 16 rows in one instruction, for groups of columns that have scales.
//
// A block's quads of codes are a matrix register as they are: its row q has columns 4 q to 4 q + 3 of 16
// rows.
#pragma once

namespace ondevice {
namespace ONDEVICE_NS {

constexpr int kMatrixTokens = 16;

// Gives the matrix registers their shapes for groups of GROUP columns, 32 or 64, until it is destroyed, if
// `used`. Groups of 16 aren't worth it: with sums of four groups to store and to load, it takes longer than
// AVX-512.
template <int GROUP>
class MatrixProducts {
 public:
  static constexpr int kGroups = kGroup / GROUP;  // of a block

  explicit MatrixProducts(bool used) : used_(used) {
    if (!used) return;
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 2 * 3; ++i) {
      shapes.row_bytes[i] = i / 2 == kInputs / 2 ? GROUP : 64;
      shapes.rows[i] = i / 2 == kCodes / 2 ? GROUP / 4 : kMatrixTokens;
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~MatrixProducts() {
    if (used_) asm volatile("tilerelease");
  }
  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  // Multiplies a block's 16 quads with `count` tokens' activations (count, 64), 16 at a time: calls
  // add(t, sums) for tokens t to t + 15. Two products are on their way while one is added: Q4_K takes 1.3
  // times as long if each is waited for.
  template <class Add>
  static void multiply(const B* quads, const int8_t* x, int64_t count, const Add& add) {
    MatrixSums<kGroups, kMatrixTokens> sums[2];
    each<kGroups>([&](auto group)
                      ONDEVICE_INLINED { load<kCodes + group.value>(quads + group.value * (GROUP / 4)); });
    multiply_tokens(x);
    for (int64_t t = -kMatrixTokens; t < count; t += kMatrixTokens) {
      const int64_t next = t + kMatrixTokens, later = next + kMatrixTokens;
      if (next < count) store(&sums[next / kMatrixTokens % 2]);
      if (later < count) multiply_tokens(x + later * kGroup);
      if (t >= 0) add(t, sums[t / kMatrixTokens % 2]);
    }
  }

 private:
  static constexpr int kSums = 0, kInputs = 2, kCodes = 4;  // the first of two registers each
  bool used_;

  template <int REGISTER>
  static void load(const void* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(int64_t{64}), "i"(REGISTER) : "memory");
  }
  static void multiply_tokens(const int8_t* x) {
    each<kGroups>([&](auto group) ONDEVICE_INLINED {
      load<kInputs + group.value>(x + group.value * GROUP);
      asm volatile("tilezero %%tmm%c0" : : "i"(kSums + group.value));
      asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2"
                   :
                   : "i"(kCodes + group.value), "i"(kInputs + group.value), "i"(kSums + group.value));
    });
  }
  static void store(MatrixSums<kGroups, kMatrixTokens>* to) {
    each<kGroups>([&](auto group) ONDEVICE_INLINED {
      asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(to->sums[group.value]), "r"(int64_t{64}), "i"(kSums + group.value)
                   : "memory");
    });
  }
};

}  // namespace ONDEVICE_NS
}  // namespace ondevice
