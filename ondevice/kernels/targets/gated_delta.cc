#include "../gated_delta.h"

#include <math.h>

#include "causal_rows.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

constexpr float kSquaresEps = 1e-6f;  // added to the sum of squares that queries and keys are divided by

// log(1 + e^x) = max(x, 0) + 2 atanh(e / (2 + e)) with e = e^-|x|, whose series ends below 2e-9.
F softplus(F x) {
  const F e = exp_lanes(sub(zero(), abs(x)));
  const F s = div(e, add(set1(2.0f), e));
  const F square = mul(s, s);
  F p = set1(1.0f / 15.0f);
  for (int odd = 13; odd >= 1; odd -= 2) p = fma(p, square, set1(1.0f / static_cast<float>(odd)));
  return fma(mul(set1(2.0f), s), p, max(zero(), x));
}

float first_lane(F x) {
  float lanes[16];
  store(lanes, x);
  return lanes[0];
}

// What the convolution reads.
CausalRows inputs_of(const DeltaArgs& args) {
  return {args.projected, args.stride, args.tail, args.taps, args.channels(), args.parents};
}

// out[i] = silu(sum over taps of weight * input) of channels first + i of token t, oldest input first.
void convolve(const DeltaArgs& args, int64_t t, int64_t first, int64_t n, float* out) {
  const CausalRows inputs = inputs_of(args);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i, channel = first + i;
    F sum = zero();
    for (int64_t tap = 0; tap < args.taps; ++tap)
      sum = fma(load_partial(args.conv + tap * args.channels() + channel, left),
                load_partial(inputs.row(t, args.taps - 1 - tap) + channel, left), sum);
    store_partial(out + i, div(sum, add(set1(1.0f), exp_lanes(sub(zero(), sum)))), left);
  }
}

void keep_tail(const DeltaArgs& args, int64_t tokens, int64_t first, int64_t n) {
  for (int64_t row = 0; row < args.taps - 1; ++row)
    memcpy(args.next_tail + row * args.channels() + first,
           inputs_of(args).row(tokens - 1, args.taps - 2 - row) + first,
           static_cast<size_t>(n) * sizeof(float));
}

// x / sqrt(sum of squares + eps) * factor, in place.
void to_unit(float* x, int64_t n, float factor) {
  F squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F v = load_partial(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const F scale = set1(1.0f / sqrtf(reduce_add(squares) + kSquaresEps));
  for (int64_t i = 0; i < n; i += 16)
    store_partial(x + i, mul(mul(load_partial(x + i, n - i), scale), set1(factor)), n - i);
}

// One token's step of 16 * N columns of a head's state (key_width, width), which begin at `from` and `to`,
// rows from_width and to_width apart: S' = decay * S + k (beta * (v - k^T decay S))^T; out = q^T S'. Sums run
// over ascending rows.
template <int N, bool WHOLE>
void step(const float* from, int64_t from_width, float* to, int64_t to_width, int64_t rows, int64_t left,
          const float* q, const float* k, const float* v, float decay, float beta, float* out) {
  F sums[N], change[N];
  const auto read = [left](const float* at, int n) {
    return WHOLE ? load(at + 16 * n) : load_partial(at + 16 * n, left - 16 * n);
  };
  const auto write = [left](float* at, int n, F value) {
    if (WHOLE)
      store(at + 16 * n, value);
    else
      store_partial(at + 16 * n, value, left - 16 * n);
  };
  const F factor = set1(decay);
  for (int n = 0; n < N; ++n) sums[n] = zero();
  for (int64_t row = 0; row < rows; ++row) {
    const F key = set1(k[row]);
    for (int n = 0; n < N; ++n) sums[n] = fma(key, mul(factor, read(from + row * from_width, n)), sums[n]);
  }
  for (int n = 0; n < N; ++n) {
    change[n] = mul(sub(read(v, n), sums[n]), set1(beta));
    sums[n] = zero();
  }
  for (int64_t row = 0; row < rows; ++row) {
    const F key = set1(k[row]), query = set1(q[row]);
    for (int n = 0; n < N; ++n) {
      const F old = mul(factor, read(from + row * from_width, n));
      const F value = fma(key, change[n], old);
      write(to + row * to_width, n, value);
      sums[n] = fma(query, value, sums[n]);
    }
  }
  for (int n = 0; n < N; ++n) write(out, n, sums[n]);
}

// `count` tokens from token `first` on, of one key head and its value heads.
void run_tokens(const DeltaArgs& args, int64_t head, int64_t first, int64_t count, float* scratch) {
  const int64_t K = args.key_width, V = args.value_width, group = args.value_heads / args.key_heads;
  const int64_t row = 2 * K + group * (V + 2);  // queries, keys, values, decays and betas of a token
  const int64_t key_size = args.key_heads * K;
  for (int64_t t = 0; t < count; ++t) {
    float* q = scratch + t * row;
    float* k = q + K;
    float* v = k + K;
    convolve(args, first + t, head * K, K, q);
    convolve(args, first + t, key_size + head * K, K, k);
    convolve(args, first + t, 2 * key_size + head * group * V, group * V, v);
    to_unit(q, K, args.query_scale);
    to_unit(k, K, 1.0f);
    const float* gates = args.gates + (first + t) * 2 * args.value_heads;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t own = head * group + g;
      const F time = softplus(set1(gates[args.value_heads + own] + args.time_bias[own]));
      float* into = v + group * V + 2 * g;
      into[0] = first_lane(exp_lanes(mul(set1(args.decay[own]), time)));
      into[1] = first_lane(div(set1(1.0f), add(set1(1.0f), exp_lanes(set1(-gates[own])))));
    }
  }
  float* slots = scratch + count * row;
  for (int64_t g = 0; g < group; ++g) {
    const int64_t own = head * group + g, at = own * K * V;
    for (int64_t column = 0; column < V;) {
      // A stripe of a state stays in the fastest cache for all tokens.
      const int64_t left = V - column;
      float unused[kDeltaColumns];
      for (int64_t t = 0; t < count; ++t) {
        const float* q = scratch + t * row;
        const float* scalars = q + 2 * K + group * V + 2 * g;
        const float* from = args.state + at + column;
        float *to, *out = unused;
        int64_t from_width = V, to_width = V;
        if (args.parents == nullptr) {
          to = args.next_state + at + column;
          if (first + t > 0) from = to;
        } else {
          to = slots + args.slots[t] * args.slot_floats();
          to_width = kDeltaColumns;
          if (args.parents[t] >= 0) {
            from = slots + args.slots[args.parents[t]] * args.slot_floats();
            from_width = kDeltaColumns;
          }
        }
        if (args.out != nullptr && first + t >= args.first)
          out = args.out + (first + t - args.first) * args.value_heads * V + own * V + column;
        const auto run = left >= kDeltaColumns ? &step<4, true>
                         : left >= 16          ? &step<1, true>
                                               : &step<1, false>;
        run(from, from_width, to, to_width, K, left, q, q + K, q + 2 * K + g * V + column, scalars[0],
            scalars[1], out);
      }
      column += left >= kDeltaColumns ? kDeltaColumns : 16;
    }
  }
}

}  // namespace

void gated_delta(const DeltaArgs& args, int64_t tokens, int64_t begin, int64_t end, float* scratch) {
  const int64_t K = args.key_width, V = args.value_width, group = args.value_heads / args.key_heads;
  const GateForm silu{Activation::kSilu};
  for (int64_t head = begin; head < end; ++head) {
    for (int64_t first = 0; first < tokens; first += kDeltaTokens)
      run_tokens(args, head, first, tokens - first < kDeltaTokens ? tokens - first : kDeltaTokens, scratch);
    if (args.next_tail != nullptr) {
      keep_tail(args, tokens, head * K, K);
      keep_tail(args, tokens, (args.key_heads + head) * K, K);
      keep_tail(args, tokens, 2 * args.key_heads * K + head * group * V, group * V);
    }
    if (args.out == nullptr) continue;
    for (int64_t t = 0; t < tokens - args.first; ++t)
      for (int64_t own = head * group; own < (head + 1) * group; ++own) {
        float* out = args.out + t * args.value_heads * V + own * V;
        norm(out, args.norm, V, out);
        activate(silu, args.output_gates + t * args.gate_stride + own * V, out, out, V);
      }
  }
}

void sigmoid_gate(const float* gates, float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const F divisor = add(set1(1.0f), exp_lanes(sub(zero(), load_partial(gates + i, n - i))));
    store_partial(x + i, div(load_partial(x + i, n - i), divisor), n - i);
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
