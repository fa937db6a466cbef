// Where the time of a runner's thread goes, for those who ask: every moment belongs to one step.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <utility>

namespace ondevice {

// kPython is what isn't spent in a call of the runner, kRest what no other step has of such a call.
enum class Step {
  kPython,
  kRest,
  kPacking,
  kAttention,
  kRecurrence,
  kQkv,
  kOutput,
  kGateUp,
  kDown,
  kHead,
  kProducts
};
constexpr std::array kStepNames = {"python", "rest",    "packing", "attention", "recurrence",    "qkv",
                                   "output", "gate_up", "down",    "head",      "other_products"};

class StepTimes {
 public:
  // Totals of a step: multiplications of two numbers, and bytes of weights, keys and values that are read.
  struct Total {
    double seconds = 0.0;
    int64_t macs = 0, bytes = 0;
  };

  // The next step begins. Returns the one that ends.
  Step begin(Step next, int64_t macs = 0, int64_t bytes = 0) {
    const auto now = std::chrono::steady_clock::now();
    of(step_).seconds += std::chrono::duration<double>(now - since_).count();
    since_ = now;
    of(next).macs += macs;
    of(next).bytes += bytes;
    return std::exchange(step_, next);
  }
  // The totals up to now.
  const std::array<Total, kStepNames.size()>& totals() {
    begin(step_);
    return totals_;
  }

  Step products = Step::kProducts;  // the step of matrices' products

 private:
  Total& of(Step step) { return totals_[static_cast<size_t>(step)]; }

  std::array<Total, kStepNames.size()> totals_{};
  Step step_ = Step::kPython;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

// A step until the end of the scope, when the one before goes on. Nothing without `times`.
class Timed {
 public:
  Timed(StepTimes* times, Step step, int64_t macs = 0, int64_t bytes = 0)
      : times_(times), before_(times ? times->begin(step, macs, bytes) : step) {}
  ~Timed() {
    if (times_) times_->begin(before_);
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  StepTimes* times_;
  Step before_;
};

}  // namespace ondevice
