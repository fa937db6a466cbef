#include "expert_reuse.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace ondevice {
namespace {

void update_mean(float* mean, int64_t experts, float decay, const int32_t* ids, int64_t chosen) {
  for (int64_t e = 0; e < experts; ++e) mean[e] *= decay;
  for (int64_t j = 0; j < chosen; ++j) mean[ids[j]] += 1 - decay;
}

}  // namespace

// The experts of one token, highest first; false if none fires.
bool ReuseScores::choose(const float* gates, int32_t* ids) {
  const auto above = [&](int32_t a, int32_t b) {
    // Not a number counts as the highest.
    const bool a_none = std::isnan(gates[a]), b_none = std::isnan(gates[b]);
    if (a_none != b_none) return a_none;
    return gates[a] != gates[b] && !a_none ? gates[a] > gates[b] : a < b;
  };
  order_.resize(static_cast<size_t>(form_.experts));
  std::iota(order_.begin(), order_.end(), 0);
  std::partial_sort(order_.begin(), order_.begin() + form_.chosen, order_.end(), above);
  std::copy_n(order_.begin(), form_.chosen, ids);
  return !(gates[ids[0]] <= 0);
}

int64_t ReuseScores::observe(const float* gates, int64_t tokens, const ReuseHistory& layer, float* alike) {
  const int64_t k = form_.chosen, experts = form_.experts, most = form_.remembered;
  ids_.resize(static_cast<size_t>(tokens * k));
  int64_t count = 0;
  for (int64_t t = 0; t < tokens; ++t) count += choose(gates + t * experts, ids_.data() + count * k);
  if (!count) return layer.seen;
  for (int64_t t = 0; t < count; ++t) {
    update_mean(layer.slow, experts, form_.slow_decay, ids_.data() + t * k, k);
    update_mean(layer.fast, experts, form_.fast_decay, ids_.data() + t * k, k);
  }
  const int64_t newer = std::min(count, most), seen = std::min(layer.seen + newer, most);
  for (int64_t j = 0; j < k; ++j) {
    int32_t* row = layer.past + j * most;
    std::memmove(row + newer, row, static_cast<size_t>(most - newer) * sizeof(int32_t));
    for (int64_t n = 0; n < newer; ++n) row[n] = ids_[static_cast<size_t>((count - 1 - n) * k + j)];
  }
  for (int64_t e = 0; e < experts; ++e) layer.scores[e] = layer.slow[e] + form_.fast_weight * layer.fast[e];
  if (seen > 1) forecast(ids_.data() + (count - 1) * k, layer, seen, alike);
  return seen;
}

// Adds to the scores what the layer chose after the tokens most like the newest.
void ReuseScores::forecast(const int32_t* newest, const ReuseHistory& layer, int64_t seen, float* alike) {
  const int64_t k = form_.chosen, most = form_.remembered;
  used_.assign(static_cast<size_t>(form_.experts), 0);
  for (int64_t j = 0; j < k; ++j) used_[newest[j]] = 1;
  const float share = (1 - form_.fade) / static_cast<float>(k);
  for (int64_t n = 0; n < most; ++n) alike[n] *= form_.fade;
  for (int64_t n = 1; n < seen; ++n) {
    int shared = 0;
    for (int64_t j = 0; j < k; ++j) shared += used_[layer.past[j * most + n]];
    alike[n] += share * static_cast<float>(shared);
  }
  best_.resize(static_cast<size_t>(seen - 1));
  std::iota(best_.begin(), best_.end(), 1);
  const auto more = [&](int32_t a, int32_t b) { return alike[a] != alike[b] ? alike[a] > alike[b] : a < b; };
  if (seen - 1 > form_.similar) {
    std::nth_element(best_.begin(), best_.begin() + form_.similar, best_.end(), more);
    best_.resize(static_cast<size_t>(form_.similar));
  }
  const float top = alike[*std::min_element(best_.begin(), best_.end(), more)];
  weights_.clear();
  float sum = 0;
  for (const int32_t lag : best_) {
    weights_.push_back(std::exp(form_.sharpness * (alike[lag] - top)));
    sum += weights_.back();
  }
  for (size_t i = 0; i < best_.size(); ++i)
    for (size_t turn = 0; turn < form_.ahead.size(); ++turn) {
      // The token after the one `lag` tokens ago is that of lag - 1.
      const int64_t n = best_[i] - 1 - static_cast<int64_t>(turn);
      if (n < 0) break;
      const float worth = form_.ahead[turn] * weights_[i] / sum;
      for (int64_t j = 0; j < k; ++j) layer.scores[layer.past[j * most + n]] += worth;
    }
}

std::vector<int32_t> worth_least(const int32_t* slots, const float* worth, int64_t neurons, int64_t first,
                                 const int32_t* keep, int64_t kept, int64_t count) {
  std::vector<int32_t> stay(keep, keep + kept);
  for (int32_t& id : stay) id += static_cast<int32_t>(first);
  std::sort(stay.begin(), stay.end());
  // A heap of the least so far, the one worth most on top.
  const auto less = [&](int32_t a, int32_t b) { return worth[a] != worth[b] ? worth[a] < worth[b] : a < b; };
  std::vector<int32_t> found;
  for (int32_t i = 0; i < neurons && count > 0; ++i) {
    const bool full = static_cast<int64_t>(found.size()) == count;
    if (slots[i] < 0 || (full && !less(i, found.front())) || std::binary_search(stay.begin(), stay.end(), i))
      continue;
    if (full) {
      std::pop_heap(found.begin(), found.end(), less);
      found.pop_back();
    }
    found.push_back(i);
    std::push_heap(found.begin(), found.end(), less);
  }
  return found;
}

}  // namespace ondevice
