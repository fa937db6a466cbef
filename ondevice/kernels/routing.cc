#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ondevice {
namespace {

constexpr double kLog2E = 1.4426950408889634;
// The natural logarithm of 2 in two parts, the first with few enough digits to be multiplied exactly.
constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;
constexpr int kTerms = 14;
constexpr double kLeastExponent = -700.0;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Factors of exp's series, the highest power first.
struct ExpTerms {
  double values[kTerms];
  ExpTerms() {
    double factorial = 1.0;
    for (int n = 0; n < kTerms; ++n) {
      if (n) factorial *= n;
      values[kTerms - 1 - n] = 1.0 / factorial;
    }
  }
};

// e^x for x up to 700; what is below -700 counts as that. NaN stays NaN.
double exp_of(double x) {
  static const ExpTerms terms;
  if (std::isnan(x)) return x;
  x = std::max(x, kLeastExponent);
  const double twos = std::nearbyint(x * kLog2E);
  const double rest = (x - twos * kLn2High) - twos * kLn2Low;
  double found = terms.values[0];
  for (int n = 1; n < kTerms; ++n) {
    found *= rest;
    found += terms.values[n];
  }
  return std::ldexp(found, static_cast<int>(twos));
}

// 1 / (1 + e^-x), rounded from double; for x below -700, that of -700.
float sigmoid(float x) {
  return static_cast<float>(1.0 / (1.0 + exp_of(std::min(-x, static_cast<float>(-kLeastExponent)))));
}

// The sum of n values, which are overwritten, in the order of `routing._sums`.
double sum_of(double* values, int64_t n) {
  while (n > 1) {
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < n - half; ++i) values[i] += values[half + i];
    n = half;
  }
  return values[0];
}

// The highest of n values; NaN if one is.
float highest_of(const float* values, int64_t n) {
  float found = values[0];
  for (int64_t i = 1; i < n && !std::isnan(found); ++i)
    if (!(values[i] <= found)) found = values[i];
  return found;
}

}  // namespace

Routes::Routes(const RouterForm& form)
    : form_(form),
      scores_(form.experts),
      choice_(form.experts),
      shares_(form.experts),
      own_(form.chosen),
      left_(form.scoring == Scoring::kSparsemixer ? form.experts : 0),
      order_(form.experts),
      best_(form.groups) {}

// Ascending ids of the `count` highest of the experts' values; of equal ones the first, NaN last of all.
void Routes::choose(const float* choice, int64_t count, int32_t* ids) {
  std::iota(order_.begin(), order_.end(), 0);
  std::partial_sort(order_.begin(), order_.begin() + count, order_.end(), [&](int32_t a, int32_t b) {
    if (choice[a] > choice[b]) return true;
    if (choice[b] > choice[a]) return false;
    const bool a_none = std::isnan(choice[a]), b_none = std::isnan(choice[b]);
    return a_none == b_none ? a < b : b_none;
  });
  std::copy_n(order_.begin(), count, ids);
  std::sort(ids, ids + count);
}

// Makes the choice of all but the best groups -inf. A group is as good as its best score, or its two best
// together.
void Routes::keep_best_groups() {
  const int64_t size = form_.experts / form_.groups;
  std::vector<float> worth(form_.groups);
  for (int64_t group = 0; group < form_.groups; ++group) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t i = 0; i < size; ++i) {
      const float value = choice_[group * size + i];
      // NaN counts as the highest.
      if (!(value <= first)) {
        second = first;
        first = value;
      } else if (!(value <= second)) {
        second = value;
      }
    }
    worth[group] = form_.group_best == 1 ? first : first + second;
  }
  std::iota(best_.begin(), best_.end(), 0);
  std::stable_sort(best_.begin(), best_.end(), [&](int32_t a, int32_t b) {
    return worth[a] > worth[b] || (std::isnan(worth[b]) && !std::isnan(worth[a]));
  });
  for (int64_t n = form_.chosen_groups; n < form_.groups; ++n)
    std::fill_n(choice_.begin() + best_[n] * size, size, -std::numeric_limits<float>::infinity());
}

// Two experts, one after the other (arXiv 2409.12136, in its authors' code).
void Routes::mix(const float* logits, int32_t* ids, float* weights) {
  const int64_t n = form_.experts;
  std::copy_n(logits, n, left_.begin());
  for (int64_t turn = 0; turn < form_.chosen; ++turn) {
    for (int64_t i = 0; i < n; ++i) choice_[i] = static_cast<float>(left_[i]);
    choose(choice_.data(), 1, ids + turn);
    const double highest = left_[ids[turn]];
    for (int64_t i = 0; i < n; ++i) {
      const double size = std::fabs(logits[i]);
      const double scale = std::isnan(size) || std::isnan(highest) ? NAN : std::max(size, highest);
      const double distance = (highest - logits[i]) / scale;
      const bool is_near = !(distance > 2.0 * form_.jitter) && std::isfinite(left_[i]);
      shares_[i] = is_near ? exp_of(left_[i] - highest) : 0.0;
    }
    weights[turn] = static_cast<float>(1.0 / sum_of(shares_.data(), n) * form_.factor);
    left_[ids[turn]] = -kInfinity;
  }
  if (ids[0] > ids[1]) {
    std::swap(ids[0], ids[1]);
    std::swap(weights[0], weights[1]);
  }
}

void Routes::of(const float* logits, const float* choice_bias, const float* scales, int32_t* ids,
                float* weights) {
  if (form_.scoring == Scoring::kSparsemixer) return mix(logits, ids, weights);
  const int64_t n = form_.experts, k = form_.chosen;
  const bool is_softmax = form_.scoring == Scoring::kSoftmax;
  for (int64_t i = 0; i < n; ++i) {
    scores_[i] = is_softmax ? logits[i] : sigmoid(logits[i]);
    choice_[i] = choice_bias ? scores_[i] + choice_bias[i] : scores_[i];
  }
  if (form_.groups > 1) keep_best_groups();
  choose(choice_.data(), k, ids);
  for (int64_t i = 0; i < k; ++i) own_[i] = scores_[ids[i]];
  if (is_softmax) {
    const double highest = highest_of(logits, n);
    if (form_.renormalised) {
      for (int64_t i = 0; i < k; ++i) own_[i] = exp_of(own_[i] - highest);
    } else {
      for (int64_t i = 0; i < n; ++i) shares_[i] = exp_of(logits[i] - highest);
      for (int64_t i = 0; i < k; ++i) own_[i] = shares_[ids[i]];
      const double sum = sum_of(shares_.data(), n);
      for (int64_t i = 0; i < k; ++i) own_[i] /= sum;
    }
  }
  if (form_.renormalised) {
    std::copy_n(own_.begin(), k, shares_.begin());
    const double sum = sum_of(shares_.data(), k) + (is_softmax ? 0.0 : 1e-20);
    for (int64_t i = 0; i < k; ++i) own_[i] /= sum;
  }
  for (int64_t i = 0; i < k; ++i) {
    const double scaled = own_[i] * form_.factor;
    weights[i] = static_cast<float>(scales ? scaled * scales[ids[i]] : scaled);
  }
}

}  // namespace ondevice
