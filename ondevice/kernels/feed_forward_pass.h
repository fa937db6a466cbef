// One forward pass through a feed-forward layer, neurons added piece by piece.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "feed_forward.h"
#include "runner.h"

namespace ondevice {

// Neurons that at least one token selects, ids ascending. A token leaves out those that it scores zero or
// less; gates may be negative, and then a token leaves out those whose gate is zero. Where gates are scores
// and have a threshold, a token leaves out those at or below it.
struct SelectedNeurons {
  const int32_t* ids;
  const uint8_t* const* parts;  // of each neuron: its whole record, or what follows its gate row
  int64_t count;
  bool whole;  // parts are whole records, and gates are computed from them; else scores are the gates
  const float* scores;  // (T, scores_stride), scores of all the layer's neurons
  int64_t scores_stride;
};

// Hidden activations that exist at once, few enough to stay in the processor's cache: 2 MB of floats.
constexpr int64_t kHiddenFloats = 512 * 1024;

// Gates (T, stride) that are computed already, of a layer's `stride` neurons; null: none are.
struct GivenGates {
  const float* values = nullptr;
  int64_t stride = 0;
};

constexpr int64_t padded_to_tile(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

// The state of one pass: its inputs and its sums so far, both in the runner's scratch memory. Any other op of
// the runner that multiplies ends the pass. Neurons are added in ascending order, in whole blocks of 64
// stored ids.
class FeedForwardPass {
 public:
  FeedForwardPass(Runner& runner, const FeedForward& layer, const InputRows& x, const GateForm& form);

  const FeedForward& layer() const { return layer_; }
  int64_t tokens() const { return x_.tokens; }
  // False once another op has written over this pass's scratch memory.
  // Neurons that segments have added, in whole blocks.
  int64_t added() const { return added_; }
  bool valid() const { return runner_.input_version() == input_version_; }

  // Adds the segments' neurons to the first `tokens` tokens. For the others they count as zero. The segments
  // that a pass adds hold the layer's neurons from the first one on, without gaps. gates: of all the layer's
  // neurons, in the place of those that their gate rows give.
  void add(const std::vector<const Segment*>& segments, int64_t tokens, const GivenGates& gates = {});
  void add_selected(const SelectedNeurons& neurons);
  // gates (T, count) of the neurons whose whole records are given, without biases.
  void gates_of(const uint8_t* const* records, int64_t count, float* gates);
  // out (T, hidden) = the sums + added. added may be null or out.
  void finish(float* out, const float* added = nullptr);

 private:
  int64_t width() const { return layer_.groups() * kGroup; }
  float* hidden() { return scratch_.hidden.as<float>(); }
  float* outputs() { return scratch_.outputs.as<float>(); }

  // A step that reads `rows` rows of weights, for `products` products of a row with a token's vector.
  Timed time(Step step, int64_t rows, int64_t products) {
    return {runner_.times(), step, products * layer_.hidden(), rows * layer_.row_bytes()};
  }
  void add_batch(const Segment* const* segments, int64_t count, int64_t tokens, const GivenGates& gates);
  void gate_up(const Segment& segment, int64_t tile, int64_t tokens, const float* bias, float* h,
               int64_t h_stride, int thread, const GivenGates& gates, int64_t first);
  void down(const Segment* const* segments, int64_t count, int64_t tokens, int64_t neurons);

  void add_selected_batch(const SelectedNeurons& neurons);
  void selected_hidden(const SelectedNeurons& neurons, int64_t h_stride);
  int64_t list_tiles(const SelectedNeurons& neurons, int64_t h_stride);
  void gathered_products(const uint8_t* const* rows, const uint8_t* const* next, int64_t t0, int64_t tokens,
                         uint8_t* tile, float* out);
  void selected_down(const SelectedNeurons& neurons, int64_t h_stride);
  void order_selected(float* y, const float* lanes);

  Runner& runner_;
  const FeedForward& layer_;
  FeedForwardScratch& scratch_;
  InputRows x_;
  GateForm form_;
  uint64_t input_version_;
  int64_t added_ = 0;
  bool selected_order_ = false;  // sums are in the order of the kernel down_selected
};

}  // namespace ondevice
