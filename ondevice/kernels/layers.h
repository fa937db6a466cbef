// What the bindings expose: an engine (threads, target, scratch), packed matrices, feed-forward segments.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "own_process.h"
#include "thread_pool.h"

namespace ondevice {

// Row-major rows as they lie on disk: codes, scales and biases, each with its own stride in bytes.
struct StoredRows {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* biases;
  int64_t codes_stride, scales_stride, biases_stride;
};

// An RMS norm's weight and epsilon; without a weight, none.
struct Norm {
  const float* weight = nullptr;
  float eps = 0.0f;
};

// What lies between a query, key and value projection and attention: norms over each head's queries and keys,
// and rotation by cos and sin (T, head_dim / 2).
struct Turn {
  Norm q_norm, k_norm;
  const float *cos, *sin;
};

class Engine {
 public:
  // Throws std::invalid_argument if the target can't run here.
  Engine(int threads, const std::string& target);

  const KernelTable& kernels() const { return *table_; }
  const std::string& target() const { return target_; }
  ThreadPool& pool() { return *pool_; }

  // Activations (tokens, cols), rows x_stride floats apart, normed and quantised into scratch; valid until
  // the next call.
  QuantizedRows quantize(const float* x, int64_t x_stride, int64_t tokens, int64_t cols, bool nibble_order,
                         const Norm& norm = {});
  // The same rows as floats, zero-padded to padded_cols.
  const float* pad(const float* x, int64_t x_stride, int64_t tokens, int64_t cols, int64_t padded_cols,
                   const Norm& norm = {});
  void attention(const AttentionArgs& args, int64_t tokens);
  // The same from a projection: each row of `qkv` has a token's queries, keys and values side by side.
  // Queries and keys are turned in place, keys and values stored. args.q is qkv, args.q_stride its width.
  void attend(float* qkv, const Turn& turn, const AttentionArgs& args, int64_t tokens);
  // Room for `floats` floats per thread, one thread's behind the other's; valid until the next call.
  float* scratch(int64_t floats);
  // Gives scratch memory back, and with it what the last pass left there; the next takes what it needs.
  void trim();

 private:
  friend class FeedForward;
  OwnProcessPtr<ThreadPool> pool_;
  std::string target_;
  const KernelTable* table_;
  Buffer x_codes_, x_scales_, x_sums_, x_int_sums_, x_padded_, scratch_;
  Buffer h_, y_, lanes_, tile_;
  Buffer ordered_lanes_, narrow_, scores_;
  bool gathered_ = false;  // y_ and lanes_ are in the order of down_gathered
  std::vector<int32_t> selected_;
  std::vector<const uint8_t*> selected_parts_;
};

// A (rows, cols) matrix: 16 rows interleaved when quantised, row-major at 16 bits.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, int bits);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t groups() const { return groups_; }
  int bits() const { return bits_; }
  int64_t nbytes() const { return static_cast<int64_t>(memory_.size()); }
  void load_rows(Engine& engine, int64_t row0, int64_t count, const StoredRows& source);
  // x * W^T + bias of x's rows, normed first where there is a norm. `added` (T, rows), if not null, is added
  // to it, and may be out.
  void forward(Engine& engine, const float* x, int64_t x_stride, int64_t tokens, const float* bias,
               float* out, const Norm& norm = {}, const float* added = nullptr) const;

 private:
  int64_t rows_, cols_, groups_;
  int bits_;
  Buffer memory_;
};

// Byte offsets of a neuron record's three rows.
struct RecordShape {
  int64_t stride, gate, up, down;
};

// Room for a contiguous range of one layer's neurons, in whole blocks of 64, in the kernels' form.
class Segment {
 public:
  explicit Segment(int64_t bytes) : memory_(static_cast<size_t>(bytes)) {}
  int64_t nbytes() const { return static_cast<int64_t>(memory_.size()); }

 private:
  friend class FeedForward;
  Buffer memory_;
  int64_t blocks_ = 0;
};

// Neurons of a layer that are selected for at least one token, ascending. A neuron counts for a token unless
// its score there is zero or less.
struct Gathered {
  const int32_t* ids;
  const uint8_t* const* parts;  // of each, its up row and its down row behind it, or its whole record
  int64_t count;
  bool whole;           // parts are whole records, whose gates are computed here; else scores are the gates
  const float* scores;  // (T, scores_stride) of every neuron
  int64_t scores_stride;
};

// Where a whole layer lies that is in memory: neuron i in slot slots[i], slot s at slot_parts[s], whole as in
// Gathered.
struct Placed {
  const int32_t* slots;
  const uint8_t* const* slot_parts;
  bool whole;
};

// What scores a layer's neurons: their gates, or a predictor, whose first matrix is `narrow`.
struct Scorer {
  const Matrix& matrix;
  const float* bias;  // (neurons,) or null
  const Matrix* narrow;
};

inline int64_t padded_to_tile(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

// Hidden activations that exist at once, so that they stay in the cache: 2 MB of floats.
constexpr int64_t kHiddenFloats = 512 * 1024;

class FeedForward {
 public:
  FeedForward(int64_t hidden, int bits, RecordShape record);

  // Bytes of `blocks` blocks of 64 neurons.
  int64_t segment_bytes(int64_t blocks) const { return blocks * kGroup * 3 * row_bytes_; }
  int64_t stride() const { return record_.stride; }
  int64_t hidden() const { return hidden_; }
  int bits() const { return bits_; }

  // Lays out `segment` for `blocks` blocks; its contents are undefined until packed.
  void shape(Segment& segment, int64_t blocks) const { segment.blocks_ = blocks; }
  // `count` records -> blocks [block0, ...); a last block that isn't full is padded with zero neurons.
  void pack(Engine& engine, Segment& segment, int64_t block0, const uint8_t* records, int64_t count) const;

  // One pass: begin, add the segments in ascending neuron order, finish. norm and added as in
  // Matrix::forward.
  void begin(Engine& engine, const float* x, int64_t x_stride, int64_t tokens, const Norm& norm = {}) const;
  void add(Engine& engine, const std::vector<const Segment*>& segments, int64_t tokens,
           Activation activation) const;
  // Instead of segments: the neurons selected, in whole blocks of 64 stored ids, ascending.
  void add_gathered(Engine& engine, const Gathered& neurons, int64_t tokens, Activation activation) const;
  void finish(Engine& engine, int64_t tokens, float* out, const float* added = nullptr) const;
  // A whole pass over segments that hold every neuron.
  void forward(Engine& engine, const std::vector<const Segment*>& segments, const float* x, int64_t x_stride,
               int64_t tokens, Activation activation, float* out, const Norm& norm, const float* added) const;
  // A whole pass over the neurons with a score above zero for any token. Returns how many they are.
  int64_t forward_selected(Engine& engine, const Scorer& scorer, const Placed& placed, const float* x,
                           int64_t x_stride, int64_t tokens, Activation activation, float* out,
                           const Norm& norm, const float* added) const;

 private:
  void clear(Engine& engine, int64_t tokens) const;
  void add_batch(Engine& engine, const Segment* const* segments, int64_t count, int64_t tokens,
                 Activation activation) const;
  void gathered_batch(Engine& engine, const Gathered& neurons, int64_t tokens, Activation activation) const;
  void gathered_products(Engine& engine, const uint8_t* const* rows, const uint8_t* const* next,
                         uint8_t* tile, int64_t tokens, float* out) const;
  void gathered_hidden(Engine& engine, const Gathered& neurons, int64_t tokens, Activation activation,
                       int64_t width) const;
  void gathered_down(Engine& engine, const Gathered& neurons, int64_t tokens, int64_t h_stride) const;
  void gate_up(Engine& engine, const Segment& segment, int64_t tile, int64_t tokens, Activation activation,
               float* h, int64_t h_stride, int thread) const;

  int64_t hidden_, groups_;
  int bits_;
  RecordShape record_;
  int64_t row_bytes_;
};

// Writes the ascending ids of the columns of scores (tokens, neurons) that are above zero, or no numbers, in
// any row, and returns how many there are; `ids` has room for all.
int64_t select(const float* scores, int64_t tokens, int64_t neurons, int32_t* ids);

enum class SourceType { kFloat, kHalf, kBfloat };

// A checkpoint's matrix in place, perhaps transposed; strides in elements.
struct SourceRows {
  const uint8_t* data;
  SourceType type;
  int64_t row_stride, col_stride;
};

// Rows -> codes, scales and biases (float16 codes alone at 16 bits), zero-padded to whole groups.
// False if a value isn't finite, or isn't as float16.
bool quantize_rows(Engine& engine, const SourceRows& source, int64_t rows, int64_t cols, int bits,
                   uint8_t* codes, uint16_t* scales, uint16_t* biases);

// Rows -> 16-row interleaved tiles of `groups` groups, `tile_stride` bytes apart, for rows row0 and up.
void interleave_rows(ThreadPool& pool, int bits, int64_t groups, int64_t row0, int64_t count,
                     const StoredRows& source, uint8_t* tiles, int64_t tile_stride);

}  // namespace ondevice
