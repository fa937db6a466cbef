#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// Abramowitz and Stegun 7.1.26, absolute error below 2e-7.
F erf_lanes(F x) {
  const F magnitude = abs(x);
  const F t = div(set1(1.0f), fma(set1(0.3275911f), magnitude, set1(1.0f)));
  F p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F tail = mul(mul(p, t), exp_lanes(sub(zero(), mul(magnitude, magnitude))));
  const F positive = sub(set1(1.0f), tail);
  // The sign without a select: x / |x|, and 0 where x is 0.
  return mul(positive, div(x, max(magnitude, set1(1e-30f))));
}

F sigmoid_weighted(F x, F argument) {  // x / (1 + e^-argument)
  return div(x, add(set1(1.0f), exp_lanes(sub(zero(), argument))));
}

F activation(const GateForm& form, F x) {
  switch (form.act) {
    case Activation::kSilu:
      return sigmoid_weighted(x, x);
    case Activation::kGelu:
      return mul(mul(set1(0.5f), x), add(set1(1.0f), erf_lanes(mul(x, set1(0.70710678118654752f)))));
    case Activation::kGeluTanh: {
      const F cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
      return sigmoid_weighted(x, mul(set1(1.59576912160573071f), cubic));
    }
    // min and max return their second operand if either is NaN. That is x, so NaN stays NaN.
    case Activation::kRelu:
      return max(zero(), x);
    case Activation::kClampedSwish: {
      const F clamped = min(set1(form.clamp), x);
      return sigmoid_weighted(clamped, mul(set1(form.slope), clamped));
    }
    case Activation::kFatRelu:
      return above_or_zero(x, set1(form.threshold));
    default: {
      const F positive = max(zero(), x);
      return mul(positive, positive);
    }
  }
}

F up_factor(const GateForm& form, F up) {
  if (form.act == Activation::kClampedSwish)
    return add(set1(1.0f), max(set1(-form.clamp), min(set1(form.clamp), up)));
  return form.relu_up ? max(zero(), up) : up;
}

}  // namespace

void activate(const GateForm& form, const float* gate, const float* up, float* h, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i;
    F value = activation(form, load_partial(gate + i, left));
    if (up) {
      value = mul(value, up_factor(form, load_partial(up + i, left)));
    }
    store_partial(h + i, value, left);
  }
}

void soft_cap(float* x, float cap, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    store_partial(x + i, soft_cap_lanes(load_partial(x + i, n - i), set1(cap)), n - i);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
