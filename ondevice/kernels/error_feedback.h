// Rounding to 4 to 6 bits with error feedback: what rounding a weight did to a product is made up for by the
// weights that are rounded after it (GPTQ, arXiv 2210.17323, in the form of LDLQ, arXiv 2307.13304,
// section 3.2).
#pragma once

#include <cstdint>

#include "runner.h"

namespace ondevice {

// Factor of the symmetric positive definite h (n, n) = (U + 1) D (U + 1)^T, D diagonal and U strictly upper
// triangular. Writes U above the diagonal of `factor` (n, n) and zeros elsewhere; h is overwritten. False if
// h isn't positive definite.
bool feedback_factor(Runner& runner, double* h, int64_t n, float* factor);

// Rows (R, cols) whose columns meet the inputs -> codes, scales and biases as quantize_rows writes them, in a
// format of 4 to 6 bits with stored biases. Input j is rounded after w[:, j] + sum over i < j of (w -
// rounded)[:, i] * factor[i, j]. False if a value isn't finite, or wouldn't be finite as float16.
bool round_columns(Runner& runner, const float* w, int64_t rows, int64_t cols, const RowFormat& format,
                   const float* factor, uint8_t* codes, uint16_t* scales, uint16_t* biases);

// The same in groups of 64 for (n, cols) whose rows meet the inputs: row j is rounded, in groups of its
// columns, after w[j] + sum over i < j of (w - rounded)[i] * factor[i, j].
bool round_rows(Runner& runner, const float* w, int64_t rows, int64_t cols, const RowFormat& format,
                const float* factor, uint8_t* codes, uint16_t* scales, uint16_t* biases);

}  // namespace ondevice
