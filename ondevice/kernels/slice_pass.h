// One forward pass through a dense feed-forward that is cut into slices of neurons.
#pragma once

#include <cstdint>
#include <vector>

#include "expert.h"
#include "runner.h"

namespace ondevice {

// Adds up the outputs of a layer's slices, one after another in ascending order: a row's bits depend neither
// on how many are added at once nor on the rows in its company.
//
// A slice is laid out as an expert is, or in planes, which are joined as they are multiplied. The prepared
// inputs are in the runner's memory: any other op of it that prepares inputs ends the pass.
class SlicePass {
 public:
  // x: prepared for slice.gate().format. bias: of the gates of `biased` slices, the layer's first, or null.
  SlicePass(Runner& runner, const Expert& slice, const InputRows& x, const GateForm& form, const float* bias,
            int64_t biased);

  const Expert& slice() const { return slice_; }
  int64_t tokens() const { return x_.tokens; }
  // Slices that were added, and those whose gates have biases.
  int64_t added() const { return added_; }
  int64_t biased() const { return biased_; }
  bool valid() const { return runner_.input_version() == input_version_; }

  // out (tokens, hidden) = base + the outputs of the next slices, for the pass's first `tokens` tokens. base:
  // null for zeros; it may be out.
  void add(const std::vector<RecordBytes>& records, int64_t tokens, const float* base, float* out);

 private:
  void add_some(const RecordBytes* records, int64_t count, int64_t tokens, const float* base, float* out);

  Runner& runner_;
  const Expert& slice_;
  InputRows x_;
  GateForm form_;
  const float* bias_;
  int64_t biased_;
  uint64_t input_version_;
  int64_t added_ = 0;
};

}  // namespace ondevice
