// What the kernel of the gated delta rule takes.
#pragma once

#include "kernel_table.h"

namespace ondevice {

constexpr int64_t kDeltaTokens = 64;   // tokens whose inputs `gated_delta` has side by side
constexpr int64_t kDeltaColumns = 64;  // columns of a head's state that it takes at a time

// A layer with the gated delta rule (Gated DeltaNet, arXiv 2412.06464). Its channels are the queries and keys
// of all key heads, key_width wide, then the values of all value heads, value_width wide. value_heads is a
// multiple of key_heads: neighbouring value heads share a key head.
//
// Tokens follow each other, or form a tree: `parents` then says which one each follows, -1 for the text
// before them. A tree's states lie in scratch memory, and none is kept.
struct DeltaArgs {
  const float* projected;  // (T, channels), rows `stride` apart
  int64_t stride;
  const float* output_gates;  // (T - first, value_heads * value_width), rows `gate_stride` apart
  int64_t gate_stride;
  const float* gates;  // (T, 2 * value_heads): what betas are made of, then what decays are made of
  int64_t key_heads, value_heads, key_width, value_width, taps;
  const float* conv;       // (taps, channels): weights of the causal convolution, oldest input first
  const float* decay;      // (value_heads): decays are exp(decay * softplus(gate + time_bias))
  const float* time_bias;  // (value_heads)
  Norm norm;               // of each value head's output
  float query_scale;
  const float* state;                // (value_heads, key_width, value_width) before the first token
  const float* tail;                 // (taps - 1, channels): inputs of the tokens before the first one
  float *next_state, *next_tail;     // the same behind the last token; other memory. Null for a tree
  float* out;                        // (T - first, value_heads * value_width), or null
  int64_t first = 0;                 // tokens before it leave no output
  const int32_t* parents = nullptr;  // (T), at most kDeltaTokens; null: each token follows the one before
  const int32_t* slots = nullptr;    // (T): a tree's states in scratch memory
  int64_t num_slots = 0;

  int64_t channels() const { return 2 * key_heads * key_width + value_heads * value_width; }
  // Floats of a state with its tail.
  int64_t state_floats() const { return value_heads * value_width * key_width + (taps - 1) * channels(); }
  int64_t slot_floats() const { return key_width * kDeltaColumns; }
  // Floats of scratch memory of one call for `tokens` tokens.
  int64_t scratch(int64_t tokens) const {
    const int64_t row = 2 * key_width + value_heads / key_heads * (value_width + 2);
    return row * (tokens < kDeltaTokens ? tokens : kDeltaTokens) + num_slots * slot_floats();
  }
};

}  // namespace ondevice
