// What the kernel of the gated short convolution takes.
#pragma once

#include "kernel_table.h"

namespace ondevice {

constexpr int64_t kConvChannels = 64;  // channels that `short_conv` takes at least

// A layer with a gated short convolution (LFM2): y = c * conv(b * x), each channel by itself. Products b * x
// go to `products`, which may be the place of b; the first tokens' are there already.
//
// Tokens follow each other, or form a tree: `parents` then says which one each follows, -1 for the text
// before them.
struct ConvArgs {
  const float* projected;  // (T - first, 3 * channels): b, c and x side by side
  int64_t channels, taps;
  const float* conv;  // (taps, channels), oldest input first
  float* products;    // (T, channels), rows `stride` apart
  int64_t stride;
  const float* tail;  // (taps - 1, channels): products of the tokens before the first one
  float* next_tail;   // the same behind the last token; other memory. Null for tokens that run ahead
  float* out;         // (T - first, channels)
  int64_t first = 0;  // tokens whose products are there
  const int32_t* parents = nullptr;  // (T); null: each token follows the one before
};

}  // namespace ondevice
