// Products by instructions that multiply small matrices of bytes, for kMatrixTokens tokens at once: what
// AMX and i8mm have in common. ONDEVICE_MATRIX_PRODUCTS is defined where the target has them.
#pragma once

#include "simd.h"
#include "target_kernels.h"

#if defined(ONDEVICE_TARGET_AMX) || defined(ONDEVICE_TARGET_I8MM)
#define ONDEVICE_MATRIX_PRODUCTS

namespace ondevice {
namespace ONDEVICE_NS {

constexpr int64_t kMatrixRun = 64;  // most tokens for which a block's codes are unpacked once

// Sums of products of TOKENS tokens: groups of columns, tokens, rows.
template <int GROUPS, int TOKENS>
struct MatrixSums {
  alignas(64) int32_t sums[GROUPS][TOKENS][kTile];

  template <int GROUP>
  ONDEVICE_INLINED I of(int64_t token) const {
    I lanes;
    memcpy(&lanes, sums[GROUP][token], sizeof(lanes));
    return lanes;
  }
};

}  // namespace ONDEVICE_NS
}  // namespace ondevice

#if defined(ONDEVICE_TARGET_AMX)
#include "matrix_products_amx.h"
#else
#include "matrix_products_i8mm.h"
#endif
#endif
