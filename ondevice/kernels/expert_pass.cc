#include "expert_pass.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace ondevice {

ExpertPass::ExpertPass(Runner& runner, MultiplyExpert multiply, const float* x, int64_t x_stride,
                       int64_t hidden, const ChosenExperts& chosen, bool in_order, float* total)
    : runner_(runner),
      multiply_(std::move(multiply)),
      x_(x),
      x_stride_(x_stride),
      hidden_(hidden),
      tokens_(chosen.tokens),
      in_order_(in_order),
      total_(total) {
  const int64_t count = chosen.tokens * chosen.chosen;
  experts_.assign(chosen.ids, chosen.ids + count);
  std::sort(experts_.begin(), experts_.end());
  experts_.erase(std::unique(experts_.begin(), experts_.end()), experts_.end());
  const auto place_of = [&](int32_t expert) {
    return std::lower_bound(experts_.begin(), experts_.end(), expert) - experts_.begin();
  };
  first_.assign(experts_.size() + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++first_[place_of(chosen.ids[i]) + 1];
  for (size_t place = 0; place < experts_.size(); ++place) first_[place + 1] += first_[place];
  std::vector<int64_t> next(first_.begin(), first_.end() - 1);
  rows_.resize(count);
  shares_.resize(count);
  for (int64_t t = 0; t < chosen.tokens; ++t)
    for (int64_t i = t * chosen.chosen; i < (t + 1) * chosen.chosen; ++i) {
      const int64_t at = next[place_of(chosen.ids[i])]++;
      rows_[at] = static_cast<int32_t>(t);
      shares_[at] = chosen.weights[i];
    }
  done_.assign(experts_.size(), false);
  const size_t row = static_cast<size_t>(hidden_) * sizeof(float);
  FeedForwardScratch& scratch = runner.feed_forward_scratch();
  scratch.expert_inputs.grow(chosen.tokens * row);
  scratch.expert_outputs.grow((in_order ? chosen.tokens : count) * row);
}

void ExpertPass::add(int32_t expert, const uint8_t* record) {
  const auto found = std::lower_bound(experts_.begin(), experts_.end(), expert);
  const size_t place = found - experts_.begin();
  if (found == experts_.end() || *found != expert || done_[place])
    throw std::invalid_argument("the expert isn't one of those that are still to be added");
  if (in_order_ && place > 0 && !done_[place - 1])
    throw std::invalid_argument("experts are added in ascending order");
  const int64_t begin = first_[place], count = first_[place + 1] - begin;
  FeedForwardScratch& scratch = runner_.feed_forward_scratch();
  const float* own = x_;
  int64_t stride = x_stride_;
  if (count < tokens_) {
    float* gathered = scratch.expert_inputs.as<float>();
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(gathered + i * hidden_, x_ + rows_[begin + i] * x_stride_, hidden_ * sizeof(float));
    own = gathered;
    stride = hidden_;
  }
  float* out = scratch.expert_outputs.as<float>() + (in_order_ ? 0 : begin * hidden_);
  multiply_(expert, record, own, stride, count, out);
  done_[place] = true;
  if (in_order_) add_rows(out, place);
}

void ExpertPass::finish() {
  if (std::find(done_.begin(), done_.end(), false) != done_.end())
    throw std::invalid_argument("not all experts were added");
  if (in_order_) return;
  const float* outputs = runner_.feed_forward_scratch().expert_outputs.as<float>();
  for (size_t place = 0; place < experts_.size(); ++place) add_rows(outputs + first_[place] * hidden_, place);
}

// Adds the outputs of the expert at `place` to the rows of the total that chose it.
void ExpertPass::add_rows(const float* rows, int64_t place) {
  for (int64_t i = first_[place]; i < first_[place + 1]; ++i) {
    float* sum = total_ + rows_[i] * hidden_;
    const float* out = rows + (i - first_[place]) * hidden_;
    for (int64_t j = 0; j < hidden_; ++j) sum[j] += out[j] * shares_[i];
  }
}

}  // namespace ondevice
