// What the kernel of the gated delta rule takes.
#pragma once

#include "recurrence.h"

namespace ondevice {

// A layer with the gated delta rule (Gated DeltaNet, arXiv 2412.06464). Its channels are the queries and keys
// of all groups, the key heads, and the values of all heads, the value heads. inputs: (T, 2 * heads), what
// betas are made of, then what decays are made of. The norm is of each head's output.
struct DeltaArgs : RecurrenceArgs {
  float query_scale;

  int64_t input_floats() const { return 2 * heads; }
  int64_t scratch(int64_t tokens) const {
    return scratch_floats(tokens, 2 * rows + of_group() * (width + 2));
  }
};

}  // namespace ondevice
