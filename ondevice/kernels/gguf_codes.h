// Blocks of GGUF's quantised types: their codes as a bundle stores them, and their values.
#pragma once

#include <cstdint>
#include <string>

#include "runner.h"

namespace ondevice {

// A type whose codes a bundle can hold. A block has `values` codes, in parts of 32 with a scale each. `own`
// is the narrowest format of a bundle for it; where that has biases, each part has one.
struct BlockType {
  const char* name;
  int64_t values, nbytes;
  RowFormat own;
};

// Null for a type that isn't known here.
const BlockType* find_block_type(const std::string& name);

// Rows of `blocks` blocks each -> codes (rows, blocks * values * stored.bits / 8), and scales and biases of
// parts (rows, blocks * values / 32); no biases where `stored` implies them. `stored` has groups of 32 and at
// least the type's own bits, and implies biases only if the type does.
void copy_codes(const BlockType& type, const uint8_t* data, int64_t rows, int64_t blocks,
                const RowFormat& stored, uint8_t* codes, float* scales, float* biases);

// The same of a type with blocks of 32, which have a float16 scale of their own, and a bias where `stored`
// has one: they stay as they are.
void copy_codes_and_halves(const BlockType& type, const uint8_t* data, int64_t rows, int64_t blocks,
                           const RowFormat& stored, uint8_t* codes, uint16_t* scales, uint16_t* biases);

// MXFP4 blocks -> codes, 16 bytes of each, and scales, a byte of each, as RowFormat has them.
void copy_mxfp4(const uint8_t* data, int64_t blocks, uint8_t* codes, uint8_t* scales);

// A matrix (rows, row_bytes) of blocks, whose columns [first, first + count) become rows as of
// `quantize_rows`. first is a multiple of 16.
bool quantize_columns(Runner& runner, const BlockType& type, const uint8_t* data, int64_t rows,
                      int64_t row_bytes, int64_t first, int64_t count, const RowFormat& format,
                      uint8_t* codes, uint16_t* scales, uint16_t* biases);

// One column of such a matrix.
void decode_column(const BlockType& type, const uint8_t* data, int64_t rows, int64_t row_bytes,
                   int64_t column, float* out);

}  // namespace ondevice
