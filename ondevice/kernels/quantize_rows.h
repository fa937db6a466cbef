// Quantising a checkpoint's matrix in place in the checkpoint's memory, transposed or not.
#pragma once

#include <cstdint>

#include "runner.h"

namespace ondevice {

enum class SourceType { kFloat, kHalf, kBfloat };

// A checkpoint's matrix, which may be transposed; strides in elements.
struct SourceRows {
  const uint8_t* data;
  SourceType type;
  int64_t row_stride, col_stride;
};

// Rows -> codes, scales and biases (at 16 bits float16 codes alone), zero-padded to whole groups.
// False if a value isn't finite, or wouldn't be finite as float16.
bool quantize_rows(Runner& runner, const SourceRows& source, int64_t rows, int64_t cols,
                   const RowFormat& format, uint8_t* codes, uint16_t* scales, uint16_t* biases);

}  // namespace ondevice
