// What the kernels of a Mamba-2 mixer take.
#pragma once

#include "recurrence.h"

namespace ondevice {

// A layer with a Mamba-2 mixer (arXiv 2405.21060). Its channels are the inputs of all heads, then B of all
// groups and C of all groups. inputs: (T, heads), what time steps are made of.
struct MixerArgs : RecurrenceArgs {
  float time_factor, gate_factor, out_factor, least_time, most_time;
  int64_t norm_groups;  // parts of an output that are normed each by itself
  bool norm_before;     // the norm stands before the gate
  const float* skip;    // (heads)

  int64_t input_floats() const { return heads; }
  int64_t scratch(int64_t tokens) const { return scratch_floats(tokens, 2 * rows + width + 2); }
};

}  // namespace ondevice
