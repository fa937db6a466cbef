// What causal convolutions read: rows of tokens, and those that were before them.
#pragma once

#include "simd.h"

namespace ondevice {
namespace ONDEVICE_NS {

// Rows of tokens, `stride` floats apart, and the last ones before them, (taps - 1, channels). Tokens follow
// each other, or `parents` says which one each follows, -1 for the text before them.
struct CausalRows {
  const float* rows;
  int64_t stride;
  const float* tail;
  int64_t taps, channels;
  const int32_t* parents;

  // The row `back` tokens before token t, `back` below `taps`.
  const float* row(int64_t t, int64_t back) const {
    if (parents != nullptr)
      for (; back > 0 && t >= 0; --back) t = parents[t];
    t -= back;
    return t >= 0 ? rows + t * stride : tail + (taps - 1 + t) * channels;
  }
};

}  // namespace ONDEVICE_NS
}  // namespace ondevice
