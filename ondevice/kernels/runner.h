// What runs kernels: a thread pool, the kernels of one instruction set, and the scratch memory they write to.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "mapped_buffer.h"
#include "own_process.h"
#include "step_times.h"
#include "thread_pool.h"

namespace ondevice {

// A norm over a head. step: from one head's weights (and biases) to the next one's, 0 if all have the same.
struct HeadNorm {
  Norm norm;
  int64_t step;

  Norm of(int64_t head) const {
    Norm found = norm;
    found.weight += head * step;
    if (found.bias) found.bias += head * step;
    return found;
  }
};

// What happens to queries, keys and values between their projection and attention: a norm over each head, or
// for queries and keys over all of them as one vector, then rotary embedding of queries and keys by cos and
// sin (T, head_dim / 2).
struct HeadTransform {
  HeadNorm q_norm, k_norm;
  bool norms_projection;
  const float *cos, *sin;
  Norm v_norm = {};
};

// Activations in the form that weights of 2 to 8 or of 16 bits are multiplied with: one of kInputKinds. By
// bits (below 8, 8) and groups (32, 64) where each group has a scale; by groups (16, 32) with two levels; and
// 16 bits.
constexpr size_t kInputKinds = 7;

struct InputRows {
  int64_t tokens;
  QuantizedRows quantized;  // for 2 to 8 bits
  const float* padded;      // for 16 bits: (T, quantized.groups * 64) floats, zeros behind the last column
};

// Whether activations that are prepared for one format serve another.
inline bool same_inputs(const RowFormat& a, const RowFormat& b) {
  if (a.bits == 16 || b.bits == 16) return a.bits == b.bits;
  return (a.bits < 8) == (b.bits < 8) && a.group == b.group && a.input_scales() == b.input_scales();
}

// Memory of rows that are prepared for a product.
struct InputMemory {
  MappedBuffer codes, scales, sums, int_sums, padded;

  void trim();
};

// Scratch memory of a forward pass through a feed-forward layer. It is kept from one pass to the next.
struct FeedForwardScratch {
  MappedBuffer hidden;          // (T, neurons of a batch): activation(gate) * up
  MappedBuffer gate_up;         // of each thread: gates and ups of 16 neurons, 2 x (T, 16)
  MappedBuffer joined;          // of each thread: tiles that were joined from two planes
  MappedBuffer outputs;         // (T, groups * 64)
  MappedBuffer bias_lanes;      // (T, groups, 16); (T, groups / 16, 16, 16) for selected neurons
  MappedBuffer ordered_lanes;   // (groups, 16): bias lanes of one token, in the order of groups
  MappedBuffer low_rank;        // (T, rank): outputs of a predictor's first matrix
  MappedBuffer scores;          // (T, neurons)
  MappedBuffer tile_columns;    // columns of `hidden`, in tiles of 16
  MappedBuffer tile_tokens;     // of each of these tiles, its token
  MappedBuffer expert_inputs;   // (T, hidden): inputs of the tokens that chose an expert
  MappedBuffer expert_outputs;  // (rows, hidden): outputs of experts, one after the other
  std::vector<int32_t> selected_ids;
  std::vector<const uint8_t*> selected_parts;

  void trim();
};

class Runner {
 public:
  // Throws std::invalid_argument if this machine can't run the target.
  Runner(int threads, const std::string& target);

  const KernelTable& kernels() const { return *table_; }
  const std::string& target() const { return target_; }
  ThreadPool& pool() { return *pool_; }
  // Null while nobody measures.
  StepTimes* times() { return times_.get(); }
  // Counts the time of steps anew, or no longer.
  void time_steps(bool counts) { times_.reset(counts ? new StepTimes : nullptr); }
  // Products of matrices are part of this step from now on.
  void name_products(Step step) {
    if (times_) times_->products = step;
  }

  // Activations (tokens, cols), rows x_stride floats apart, normed and converted for weights of `format`.
  // They are in scratch memory: the result is valid until the next call of prepare() with the same `place`,
  // below kInputKinds, or with place 0, or of trim().
  InputRows prepare(const float* x, int64_t x_stride, int64_t tokens, int64_t cols, const RowFormat& format,
                    const Norm& norm = {}, size_t place = 0);
  // The same of hidden values, between the two products of a feed-forward, in memory of their own: the result
  // of prepare() stays valid.
  InputRows prepare_hidden(const float* h, int64_t h_stride, int64_t tokens, int64_t cols,
                           const RowFormat& format);
  // Changes whenever the result of prepare() becomes invalid.
  uint64_t input_version() const { return input_version_; }

  void attention(const AttentionArgs& args, int64_t tokens);
  // Attention from a projection: each row of `qkv` holds a token's queries, keys and values side by side.
  // They are transformed in place, keys and values are stored. A row may have queries alone: keys and values
  // of its token are then stored already. args.q is qkv, args.q_stride its width.
  void attend(float* qkv, const HeadTransform& transform, const AttentionArgs& args, int64_t tokens);

  // x (tokens, n) += norm(y).
  void add_normed(float* x, const float* y, int64_t tokens, int64_t n, const Norm& norm);

  // `floats` floats of scratch memory for each thread, thread after thread. Valid until the next call.
  float* scratch(int64_t floats);
  FeedForwardScratch& feed_forward_scratch() { return feed_forward_; }
  // Frees all scratch memory; later calls allocate what they need.
  void trim();

 private:
  InputRows prepare_in(InputMemory& memory, const float* x, int64_t x_stride, int64_t tokens, int64_t cols,
                       const RowFormat& format, const Norm& norm);
  void quantize(InputMemory& memory, const float* x, int64_t x_stride, int64_t cols, const RowFormat& format,
                const Norm& norm, InputRows* rows);
  void pad(InputMemory& memory, const float* x, int64_t x_stride, int64_t cols, const Norm& norm,
           InputRows* rows);

  OwnProcessPtr<ThreadPool> pool_;
  std::string target_;
  const KernelTable* table_;
  std::unique_ptr<StepTimes> times_;
  InputMemory inputs_[kInputKinds], hidden_inputs_;
  uint64_t input_version_ = 0;
  MappedBuffer scratch_;
  FeedForwardScratch feed_forward_;
};

}  // namespace ondevice
