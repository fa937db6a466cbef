// What the kernels of layers with recurrent states of heads have in common.
#pragma once

#include "kernel_table.h"

namespace ondevice {

constexpr int64_t kStateTokens = 64;   // tokens whose inputs a kernel has side by side
constexpr int64_t kStateColumns = 64;  // columns of a head's state that it takes at a time

// A layer whose heads each have a state, (rows, width). Its channels go through a causal convolution and
// SiLU: for each group two vectors of `rows` values, which neighbouring heads share, and `width` values of
// each head. heads is a multiple of groups.
//
// Tokens follow each other, or form a tree: `parents` then says which one each follows, -1 for the text
// before them. A tree's states lie in scratch memory, and none is kept.
struct RecurrenceArgs {
  int64_t groups, heads, rows, width, taps;
  const float* conv;                 // (taps, channels): weights of the convolution, oldest input first
  const float* conv_bias = nullptr;  // (channels), or null
  const float* decay;                // (heads): a state decays by exp(decay * time) in a time step
  const float* time_bias;            // (heads)
  const float* projected;            // (T, channels), rows `stride` apart
  int64_t stride;
  const float* inputs;            // (T, input_floats): what time steps are made of, and other scalars
  const float* state;             // (heads, rows, width) before the first token
  const float* tail;              // (taps - 1, channels): inputs of the tokens before the first one
  float *next_state, *next_tail;  // the same behind the last token; other memory. Null for a tree
  const float* gates;             // of the output, (T - first, values), rows `gate_stride` apart
  int64_t gate_stride;
  Norm norm;                         // of the output, or none
  float* out;                        // (T - first, values), or null
  int64_t first = 0;                 // tokens before it leave no output
  const int32_t* parents = nullptr;  // (T), at most kStateTokens; null: each token follows the one before
  const int32_t* slots = nullptr;    // (T): a tree's states in scratch memory
  int64_t num_slots = 0;

  int64_t values() const { return heads * width; }
  int64_t channels() const { return values() + 2 * groups * rows; }
  int64_t of_group() const { return heads / groups; }
  // Floats of all heads' states, and with the tail behind them.
  int64_t head_floats() const { return values() * rows; }
  int64_t state_floats() const { return head_floats() + (taps - 1) * channels(); }
  int64_t slot_floats() const { return rows * kStateColumns; }
  // Floats of scratch memory of one call for `tokens` tokens of `of_token` floats each.
  int64_t scratch_floats(int64_t tokens, int64_t of_token) const {
    return of_token * (tokens < kStateTokens ? tokens : kStateTokens) + num_slots * slot_floats();
  }
};

}  // namespace ondevice
