// A weight matrix in memory, in the form that the kernels multiply.
#pragma once

#include <cstdint>
#include <vector>

#include "runner.h"

namespace ondevice {

// Row-major rows as a bundle stores them: codes, scales and biases, each with a stride in bytes.
struct StoredRows {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* biases;
  int64_t codes_stride, scales_stride, biases_stride;
};

// Neighbouring rows of a matrix that are stored alike: tiles of 16 rows interleaved at 2 to 8 bits, row-major
// ones at 16 bits, with zeros behind the last row.
struct Section {
  int64_t rows;
  RowFormat format;

  int64_t tiles() const { return (rows + kTile - 1) / kTile; }
};

// A (rows, cols) matrix, whose sections follow each other.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, const RowFormat& format) : Matrix({{rows, format}}, cols) {}
  Matrix(const std::vector<Section>& sections, int64_t cols);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t groups() const { return groups_; }
  int64_t sections() const { return static_cast<int64_t>(sections_.size()); }
  const Section& section(int64_t index) const { return sections_[static_cast<size_t>(index)]; }
  // The format of the first section, and of all rows where there is one section.
  const RowFormat& format() const { return sections_[0].format; }
  int64_t nbytes() const { return static_cast<int64_t>(memory_.size()); }
  // Of a section.
  int64_t tile_bytes(int64_t index) const { return kTile * section(index).format.row_bytes(groups_); }
  // Rows of a matrix of one section, whose format has one level of scales.
  void load_rows(Runner& runner, int64_t row0, int64_t count, const StoredRows& source);
  // `count` tiles of a section from tile `first` on, `stride` bytes from one to the next.
  void load_tiles(int64_t index, int64_t first, int64_t count, const uint8_t* tiles, int64_t stride);

  // Row `row` of a matrix of one section -> its groups() times 64 weights.
  void look_up(const KernelTable& kernels, int64_t row, float* out) const;

  // out (T, rows) = norm(x) * W^T + bias + added. bias and added may be null, and added may be out.
  void forward(Runner& runner, const float* x, int64_t x_stride, int64_t tokens, const float* bias,
               float* out, const Norm& norm = {}, const float* added = nullptr) const;
  // `forward` over the rows of several matrices, one after the other, to out (T, out_stride). They have one
  // section, of one format, and all but the last have equally many rows, a multiple of 16.
  static void forward_stacked(Runner& runner, const std::vector<const Matrix*>& matrices, const float* x,
                              int64_t x_stride, int64_t tokens, float* out, int64_t out_stride,
                              const Norm& norm);
  // For a matrix of one section and `heads` equal parts, each of which multiplies an input of its own, x
  // (heads, T, cols): out[t, rows of head h] = x[h, t] * W[rows of head h]^T. A head has a multiple of 16
  // rows.
  void forward_heads(Runner& runner, const float* x, int64_t heads, int64_t tokens, float* out) const;
  // The same as `forward` of a matrix of one section, for activations that were prepared for `format()`.
  void multiply(Runner& runner, const InputRows& x, const float* bias, float* out,
                const float* added = nullptr) const {
    multiply_all(runner, &x, bias, out, added);
  }

 private:
  struct Place {
    int64_t row, offset;  // of the section's first row, and of its first byte
    size_t inputs;        // which of the inputs it multiplies
  };
  // The step of multiplying `tokens` tokens.
  Timed time(Runner& runner, int64_t tokens) const;
  // inputs: those that Place::inputs counts.
  void multiply_all(Runner& runner, const InputRows* inputs, const float* bias, float* out,
                    const float* added) const;
  uint8_t* tile(int64_t index, int64_t number) {
    return memory_.data() + places_[static_cast<size_t>(index)].offset + number * tile_bytes(index);
  }

  std::vector<Section> sections_;
  std::vector<Place> places_;
  std::vector<RowFormat> inputs_;  // formats that the inputs of the sections are prepared for
  int64_t rows_ = 0, cols_, groups_;
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
