// What the cache of experts goes by: how often and how lately a layer chose each, and what it chose after
// tokens like the newest. ondevice/sparsity/expert_reuse.py has the idea and the constants.
#pragma once

#include <cstdint>
#include <vector>

namespace ondevice {

struct ReuseForm {
  int64_t experts, chosen;       // of a layer; of a token
  int64_t remembered, similar;   // past tokens that are kept; those that the forecast is made from
  float slow_decay, fast_decay;  // per token, of the two means of use
  float fast_weight;             // of the fast mean in a score
  float fade;                    // what likeness still counts one layer later
  float sharpness;               // how much more a token counts that is wholly like the newest
  std::vector<float> ahead;      // what the turns after such a token count
};

// One layer's history, in the caller's memory.
struct ReuseHistory {
  float *slow, *fast, *scores;  // (experts)
  int32_t* past;                // (chosen, remembered), the newest token first
  int64_t seen;                 // tokens that are remembered
};

class ReuseScores {
 public:
  explicit ReuseScores(ReuseForm form) : form_(std::move(form)) {}

  const ReuseForm& form() const { return form_; }
  // Learns from gates (tokens, experts), above zero for the chosen: of more than `chosen` the highest count,
  // and rows without any teach nothing. alike (remembered): how like the newest token's path through the
  // layers that of the n-th token before it is. Returns the tokens that are remembered now.
  int64_t observe(const float* gates, int64_t tokens, const ReuseHistory& layer, float* alike);

 private:
  bool choose(const float* gates, int32_t* ids);
  void forecast(const int32_t* newest, const ReuseHistory& layer, int64_t seen, float* alike);

  ReuseForm form_;
  std::vector<int32_t> order_, ids_, best_;
  std::vector<uint8_t> used_;
  std::vector<float> weights_;
};

// Ids, in no order, of the neurons worth least: `count`, or all that may go where those are fewer. slots and
// worth (neurons); a neuron whose slot is -1 has none to lose. keep (kept): neurons that stay, by their
// distance from neuron `first`.
std::vector<int32_t> worth_least(const int32_t* slots, const float* worth, int64_t neurons, int64_t first,
                                 const int32_t* keep, int64_t kept, int64_t count);

}  // namespace ondevice
