// What kernels of recurrent states have in common: convolutions, time steps, and walks over states.
#pragma once

#include <string.h>

#include "../recurrence.h"
#include "causal_rows.h"
#include "simd.h"

namespace ondevice {
namespace ONDEVICE_NS {

// log(1 + e^x) = max(x, 0) + 2 atanh(e / (2 + e)) with e = e^-|x|, whose series ends below 2e-9.
ONDEVICE_INLINE F softplus(F x) {
  const F e = exp_lanes(sub(zero(), abs(x)));
  const F s = div(e, add(set1(2.0f), e));
  const F square = mul(s, s);
  F p = set1(1.0f / 15.0f);
  for (int odd = 13; odd >= 1; odd -= 2) p = fma(p, square, set1(1.0f / static_cast<float>(odd)));
  return fma(mul(set1(2.0f), s), p, max(zero(), x));
}

ONDEVICE_INLINE float first_lane(F x) {
  float lanes[16];
  store(lanes, x);
  return lanes[0];
}

ONDEVICE_INLINE F silu_lanes(F x) { return div(x, add(set1(1.0f), exp_lanes(sub(zero(), x)))); }

// The convolution of a layer's channels.
struct Convolution {
  CausalRows inputs;
  const float *weights, *bias;

  explicit Convolution(const RecurrenceArgs& args)
      : inputs{args.projected, args.stride, args.tail, args.taps, args.channels(), args.parents},
        weights(args.conv),
        bias(args.conv_bias) {}

  // out[i] = silu(bias + sum over taps of weight * input) of channels first + i of token t, oldest input
  // first.
  void run(int64_t t, int64_t first, int64_t n, float* out) const {
    for (int64_t i = 0; i < n; i += 16) {
      const int64_t left = n - i, channel = first + i;
      F sum = bias != nullptr ? load_partial(bias + channel, left) : zero();
      for (int64_t tap = 0; tap < inputs.taps; ++tap)
        sum = fma(load_partial(weights + tap * inputs.channels + channel, left),
                  load_partial(inputs.row(t, inputs.taps - 1 - tap) + channel, left), sum);
      store_partial(out + i, silu_lanes(sum), left);
    }
  }

  // The last inputs of channels [first, first + n) behind `tokens` tokens.
  void keep_tail(int64_t tokens, int64_t first, int64_t n, float* tail) const {
    for (int64_t row = 0; row < inputs.taps - 1; ++row)
      memcpy(tail + row * inputs.channels + first, inputs.row(tokens - 1, inputs.taps - 2 - row) + first,
             static_cast<size_t>(n) * sizeof(float));
  }
};

// Passed by value: what a step writes might else be its own fields, to a compiler.
// One token's columns of a head's state: where they are read and written, rows so far apart; their number up
// to the head's last one; and where they leave their output.
struct Stripe {
  const float* from;
  int64_t from_width;
  float* to;
  int64_t to_width, left;
  float* out;

  // The 16 columns from 16 * n on of a row at `at`. WHOLE: all of these are the head's.
  template <bool WHOLE>
  F read(const float* at, int n) const {
    return WHOLE ? load(at + 16 * n) : load_partial(at + 16 * n, left - 16 * n);
  }
  template <bool WHOLE>
  void write(float* at, int n, F value) const {
    if (WHOLE)
      store(at + 16 * n, value);
    else
      store_partial(at + 16 * n, value, left - 16 * n);
  }
};

// Calls step(stripe, token, column) for `count` tokens from token `first` on, stripe after stripe of a head's
// state: one stays in the fastest cache for all tokens. A stripe has 64 columns, 16, or fewer at the end.
template <class Step>
void for_stripes(const RecurrenceArgs& args, int64_t head, int64_t first, int64_t count, float* slots,
                 Step step) {
  const int64_t width = args.width, at = head * args.rows * width;
  float unused[kStateColumns];
  for (int64_t column = 0; column < width;) {
    const int64_t left = width - column;
    for (int64_t t = 0; t < count; ++t) {
      Stripe stripe{args.state + at + column, width, nullptr, width, left, unused};
      if (args.parents == nullptr) {
        stripe.to = args.next_state + at + column;
        if (first + t > 0) stripe.from = stripe.to;
      } else {
        stripe.to = slots + args.slots[t] * args.slot_floats();
        stripe.to_width = kStateColumns;
        if (args.parents[t] >= 0) {
          stripe.from = slots + args.slots[args.parents[t]] * args.slot_floats();
          stripe.from_width = kStateColumns;
        }
      }
      if (args.out != nullptr && first + t >= args.first)
        stripe.out = args.out + (first + t - args.first) * args.values() + head * width + column;
      step(stripe, t, column);
    }
    column += left >= kStateColumns ? kStateColumns : 16;
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
