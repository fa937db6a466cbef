// What the kernel of the gated delta rule takes.
#pragma once

#include "kernel_table.h"

namespace ondevice {

constexpr int64_t kDeltaTokens = 64;  // tokens whose inputs `gated_delta` has side by side

// A layer with the gated delta rule (Gated DeltaNet, arXiv 2412.06464). Its channels are the queries and keys
// of all key heads, key_width wide, then the values of all value heads, value_width wide. value_heads is a
// multiple of key_heads: neighbouring value heads share a key head.
struct DeltaArgs {
  const float* projected;  // (T, channels, then value_heads * value_width output gates), rows `stride` apart
  int64_t stride;
  const float* gates;  // (T, 2 * value_heads): what betas are made of, then what decays are made of
  int64_t key_heads, value_heads, key_width, value_width, taps;
  const float* conv;       // (taps, channels): weights of the causal convolution, oldest input first
  const float* decay;      // (value_heads): decays are exp(decay * softplus(gate + time_bias))
  const float* time_bias;  // (value_heads)
  Norm norm;               // of each value head's output
  float query_scale;
  const float* state;             // (value_heads, key_width, value_width) before the first token
  const float* tail;              // (taps - 1, channels): inputs of the tokens before the first one
  float *next_state, *next_tail;  // the same behind the last token; other memory
  float* out;                     // (T, value_heads * value_width)

  int64_t channels() const { return 2 * key_heads * key_width + value_heads * value_width; }
  // Floats of scratch memory of one call for `tokens` tokens.
  int64_t scratch(int64_t tokens) const {
    const int64_t row = 2 * key_width + value_heads / key_heads * (value_width + 2);
    return row * (tokens < kDeltaTokens ? tokens : kDeltaTokens);
  }
};

}  // namespace ondevice
