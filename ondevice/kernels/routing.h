// Which experts each token goes to, and how much each counts: what follows a router's logits. By additions,
// multiplications and divisions of single values alone, in the order of ondevice/backends/routing.py, whose
// bits these are.
#pragma once

#include <cstdint>
#include <vector>

namespace ondevice {

enum class Scoring { kSoftmax, kSigmoid, kSparsemixer };

// The fields of an ExpertsSpec that a router follows.
struct RouterForm {
  Scoring scoring;
  int64_t experts, chosen;
  bool renormalised;
  double factor;
  int64_t groups, chosen_groups, group_best;
  double jitter;
};

// Experts and weights of one token after the other.
class Routes {
 public:
  explicit Routes(const RouterForm& form);

  // logits (experts), choice_bias and scales (experts) or null -> ids (chosen), ascending, and weights
  // (chosen).
  void of(const float* logits, const float* choice_bias, const float* scales, int32_t* ids, float* weights);

 private:
  void choose(const float* choice, int64_t count, int32_t* ids);
  void keep_best_groups();
  void mix(const float* logits, int32_t* ids, float* weights);

  RouterForm form_;
  std::vector<float> scores_, choice_;
  std::vector<double> shares_, own_, left_;
  std::vector<int32_t> order_, best_;
};

}  // namespace ondevice
