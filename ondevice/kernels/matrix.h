// A weight matrix in memory, in the form that the kernels multiply.
#pragma once

#include <cstdint>

#include "runner.h"

namespace ondevice {

// Row-major rows as a bundle stores them: codes, scales and biases, each with a stride in bytes.
struct StoredRows {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* biases;
  int64_t codes_stride, scales_stride, biases_stride;
};

// A (rows, cols) matrix: 16 rows interleaved at 4 to 8 bits, row-major at 16 bits.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, const RowFormat& format);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t groups() const { return groups_; }
  const RowFormat& format() const { return format_; }
  int64_t nbytes() const { return static_cast<int64_t>(memory_.size()); }
  void load_rows(Runner& runner, int64_t row0, int64_t count, const StoredRows& source);

  // out (T, rows) = norm(x) * W^T + bias + added. bias and added may be null, and added may be out.
  void forward(Runner& runner, const float* x, int64_t x_stride, int64_t tokens, const float* bias,
               float* out, const Norm& norm = {}, const float* added = nullptr) const;
  // For a matrix of `heads` equal parts, each of which multiplies an input of its own, x (heads, T, cols):
  // out[t, rows of head h] = x[h, t] * W[rows of head h]^T. A head has a multiple of 16 rows.
  void forward_heads(Runner& runner, const float* x, int64_t heads, int64_t tokens, float* out) const;
  // The same as `forward` for activations that were prepared for `format()`.
  void multiply(Runner& runner, const InputRows& x, const float* bias, float* out,
                const float* added = nullptr) const;

 private:
  int64_t rows_, cols_, groups_;
  RowFormat format_;
  MappedBuffer memory_;
};

// Rows [row0, row0 + count) -> their places in 16-row interleaved tiles of `groups` groups, `tile_stride`
// bytes from one tile to the next.
void interleave_rows(ThreadPool& pool, const RowFormat& format, int64_t groups, int64_t row0, int64_t count,
                     const StoredRows& source, uint8_t* tiles, int64_t tile_stride);

// Rows with two levels of scales, each codes without gaps and, for every 256 columns, a header as
// RowFormat::header_bytes has it -> tiles, zeros behind the last row.
void tile_two_level(ThreadPool& pool, const RowFormat& format, int64_t groups, int64_t rows,
                    const uint8_t* codes, const uint8_t* headers, uint8_t* tiles);

}  // namespace ondevice
