// A feed-forward layer's immutable description, and the memory that its neurons are packed into.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "runner.h"

namespace ondevice {

// Bytes of a neuron record, and the byte offsets of its rows. An ungated neuron has no up row: then `up` is
// `down`. The part behind the gate row begins at `up`.
struct RecordShape {
  int64_t stride, gate, up, down;
  bool gated() const { return up != down; }
  int64_t rows() const { return gated() ? 3 : 2; }
};

// Memory for a contiguous range of one layer's neurons, in whole blocks of 64, in the kernels' form.
class Segment {
 public:
  explicit Segment(int64_t bytes) : memory_(static_cast<size_t>(bytes)) {}
  int64_t nbytes() const { return static_cast<int64_t>(memory_.size()); }
  int64_t blocks() const { return blocks_; }
  uint8_t* data() { return memory_.data(); }
  const uint8_t* data() const { return memory_.data(); }
  // Lays the segment out for `blocks` blocks; its contents are undefined until they are packed.
  void lay_out(int64_t blocks) { blocks_ = blocks; }

 private:
  MappedBuffer memory_;
  int64_t blocks_ = 0;
};

// A layer whose records are all in memory: neuron i is in slot slots[i], and slot s begins at slot_parts[s].
// `whole`: a slot holds whole records; else what follows their gate rows.
struct ResidentRecords {
  const int32_t* slots;
  const uint8_t* const* slot_parts;
  bool whole;
};

// What scores a layer's neurons: its gates, or a predictor, whose first matrix is `low_rank`.
struct Scorer {
  const Matrix& matrix;
  const float* bias;  // (neurons,) or null
  const Matrix* low_rank;
};

class FeedForward {
 public:
  // rows: the format of gate and up rows. Down rows have as many bits, groups of 64 and stored biases.
  // bias: of the gates of an ungated layer, one value for each of `neurons`, or null.
  FeedForward(int64_t hidden, const RowFormat& rows, RecordShape record, const float* bias = nullptr,
              int64_t neurons = 0);

  int64_t hidden() const { return hidden_; }
  int64_t groups() const { return groups_; }
  int bits() const { return format_.bits; }
  const RowFormat& format() const { return format_; }
  const RecordShape& record() const { return record_; }
  // Biases of gates, with zeros up to a whole block of 64; null without any.
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }
  int64_t biases() const { return static_cast<int64_t>(bias_.size()); }
  // Bytes of a gate or up row of a record, and of a down row: codes, scales and biases.
  int64_t row_bytes() const { return row_bytes_; }
  int64_t down_bytes() const { return down_bytes_; }
  // Bytes of one (group, block) of packed down rows: codes, 64 scales, 64 biases.
  int64_t down_block_bytes() const { return kGroup * kGroup * bits() / 8 + 4 * kGroup; }
  // Bytes of `blocks` blocks of 64 neurons.
  int64_t segment_bytes(int64_t blocks) const {
    return blocks * kGroup * ((record_.rows() - 1) * row_bytes_ + down_bytes_);
  }

  // `count` records -> blocks [block0, ...) of a segment. A last block with fewer than 64 is filled up with
  // zeros.
  void pack(Runner& runner, Segment& segment, int64_t block0, const uint8_t* records, int64_t count) const;

  // A forward pass over segments that hold every neuron. norm and added as in Matrix::forward.
  void forward(Runner& runner, const std::vector<const Segment*>& segments, const float* x, int64_t x_stride,
               int64_t tokens, const GateForm& form, float* out, const Norm& norm, const float* added) const;
  // A forward pass over the neurons that score above zero for any token. Returns their number.
  int64_t forward_selected(Runner& runner, const Scorer& scorer, const ResidentRecords& resident,
                           const float* x, int64_t x_stride, int64_t tokens, const GateForm& form, float* out,
                           const Norm& norm, const float* added) const;
  // A forward pass over `count` neurons alone, whose whole records follow each other: an expert. Where the
  // activation makes zeros, nothing but the gate is multiplied of a neuron that fires for no token.
  void forward_records(Runner& runner, const uint8_t* records, int64_t count, const float* x,
                       int64_t x_stride, int64_t tokens, const GateForm& form, float* out) const;

 private:
  int64_t hidden_, groups_;
  RowFormat format_;
  RecordShape record_;
  int64_t row_bytes_, down_bytes_;
  std::vector<float> bias_;
};

// Writes the ascending ids of the columns of scores (tokens, neurons) that are above `limit` or NaN in any
// row, and returns how many there are; `ids` has room for all columns.
int64_t select(const float* scores, int64_t tokens, int64_t neurons, float limit, int32_t* ids);

}  // namespace ondevice
