// An expert of a mixture, whose matrices lie whole in one record, in the form that the kernels multiply.
#pragma once

#include <cstdint>
#include <optional>

#include "runner.h"

namespace ondevice {

struct RecordBytes;

// A matrix of a record, `offset` bytes behind the record's start: tiles of 16 rows at 4 to 8 bits, rows at
// 16. Its rows are padded with zeros to a multiple of 16. bias: where its biases begin, a float for each of
// these rows; -1 if it has none.
//
// high, low: where it begins in the two planes of a slice, bytes behind their starts. A matrix whose codes
// aren't divided lies whole in the high plane.
struct RecordMatrix {
  RowFormat format;
  int64_t rows, cols;
  int64_t offset;
  int64_t bias = -1;
  int64_t high = -1, low = -1;

  int64_t tiles() const { return (rows + kTile - 1) / kTile; }
  // Bytes of 16 rows.
  int64_t tile_bytes() const { return kTile * format.row_bytes(groups_of(cols)); }
  // Bytes of the matrix that products read in a record.
  int64_t read_bytes(const RecordBytes& record) const;
  // Bytes behind the record's start where matrix and biases end.
  int64_t end() const;
};

// The bytes of an expert, or of a slice: a record of tiles, or a slice's planes, of which the low one may be
// missing: low bits of codes then count as their mean.
struct RecordBytes {
  const uint8_t* tiles;
  const uint8_t *high = nullptr, *low = nullptr;

  RecordBytes(const uint8_t* tiles) : tiles(tiles) {}  // NOLINT: the bytes of a record of tiles
  RecordBytes(const uint8_t* high, const uint8_t* low) : tiles(nullptr), high(high), low(low) {}
};

// What all experts of a layer have in common. gate and up are (neurons, hidden) and of one format, down is
// (hidden, neurons). An ungated expert has no up.
class Expert {
 public:
  // Floats of the scratch memory `products` that one token takes.
  static constexpr int64_t kProducts = 4 * kTile;

  Expert(const RecordMatrix& gate, const std::optional<RecordMatrix>& up, const RecordMatrix& down)
      : gate_(gate), up_(up), down_(down) {}

  int64_t hidden() const { return gate_.cols; }
  int64_t neurons() const { return gate_.rows; }
  const RecordMatrix& gate() const { return gate_; }
  const RecordMatrix& down() const { return down_; }
  // Bytes of a record, but for what pads it.
  int64_t record_bytes() const;
  // Bytes of a slice's planes, but for what pads them; 0 where slices have none.
  int64_t high_bytes() const;
  int64_t low_bytes() const;
  // Bytes of `joined` memory for each thread that multiplies planes.
  int64_t joined_bytes() const;
  // The record of tiles (record_bytes) of a slice's planes, by the pool's threads.
  void join(Runner& runner, const uint8_t* high, const uint8_t* low, uint8_t* record) const;

  // out (tokens, hidden) = down(act(gate(x)) * up(x)), of the expert whose record is at `record`.
  void forward(Runner& runner, const uint8_t* record, const float* x, int64_t x_stride, int64_t tokens,
               const GateForm& form, float* out) const;

  // The steps of multiplying the gates and ups, or the downs, of `count` records with `tokens` tokens.
  Timed time_up(Runner& runner, const RecordBytes& record, int64_t count, int64_t tokens) const;
  Timed time_down(Runner& runner, const RecordBytes& record, int64_t count, int64_t tokens) const;

  // The two halves of `forward`, for some of their tiles, on the calling thread alone: a caller may divide
  // the tiles of several experts among its threads. What a tile gives doesn't depend on which others are
  // computed with it.

  // h[t, 16 * tile + r] = act(gate) * up for gate().tiles() [begin, end). Rows of h are h_stride floats apart
  // and have room for whole tiles. x: prepared for gate().format. products: kProducts floats for each token.
  // joined: joined_bytes() of memory where `record` has planes. bias: added to the gates, a float for each
  // neuron, where they aren't in the record; or null.
  void multiply_up(const KernelTable& kernels, const RecordBytes& record, const InputRows& x,
                   const GateForm& form, float* products, float* h, int64_t h_stride, int64_t begin,
                   int64_t end, uint8_t* joined = nullptr, const float* bias = nullptr) const;
  // out[t, 16 * tile + r] = added + down(h) for down().tiles() [begin, end). h: the first `neurons` columns
  // of the above, prepared for down().format. added: null, or as out is, which it may be.
  void multiply_down(const KernelTable& kernels, const RecordBytes& record, const InputRows& h, float* out,
                     int64_t begin, int64_t end, uint8_t* joined = nullptr,
                     const float* added = nullptr) const;

 private:
  // Calls visit(matrix) with gate, up, if there is one, and down.
  template <class Visit>
  void each_matrix(const Visit& visit) const;

  RecordMatrix gate_;
  std::optional<RecordMatrix> up_;
  RecordMatrix down_;
};

}  // namespace ondevice
