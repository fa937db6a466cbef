#include "../gated_delta.h"

#include <math.h>

#include "recurrence.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

constexpr float kSquaresEps = 1e-6f;  // added to the sum of squares that queries and keys are divided by

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

// One token's step of 16 * N columns of a head's state: S' = decay * S + k (beta * (v - k^T decay S))^T;
// out = q^T S'. Sums run over ascending rows.
template <int N, bool WHOLE>
void step(const Stripe its, int64_t rows, const float* q, const float* k, const float* v, float decay,
          float beta) {
  F sums[N], change[N];
  const F factor = set1(decay);
  const auto decayed = [&](int64_t row, int n) {
    return mul(factor, its.read<WHOLE>(its.from + row * its.from_width, n));
  };
  for (int n = 0; n < N; ++n) sums[n] = zero();
  for (int64_t row = 0; row < rows; ++row) {
    const F key = set1(k[row]);
    for (int n = 0; n < N; ++n) sums[n] = fma(key, decayed(row, n), sums[n]);
  }
  for (int n = 0; n < N; ++n) {
    change[n] = mul(sub(its.read<WHOLE>(v, n), sums[n]), set1(beta));
    sums[n] = zero();
  }
  for (int64_t row = 0; row < rows; ++row) {
    const F key = set1(k[row]), query = set1(q[row]);
    for (int n = 0; n < N; ++n) {
      const F value = fma(key, change[n], decayed(row, n));
      its.write<WHOLE>(its.to + row * its.to_width, n, value);
      sums[n] = fma(query, value, sums[n]);
    }
  }
  for (int n = 0; n < N; ++n) its.write<WHOLE>(its.out, n, sums[n]);
}

// `count` tokens from token `first` on, of one key head and its value heads.
void run_tokens(const DeltaArgs& args, int64_t head, int64_t first, int64_t count, float* scratch) {
  const int64_t K = args.rows, V = args.width, group = args.of_group();
  const int64_t row = 2 * K + group * (V + 2);  // queries, keys, values, decays and betas of a token
  const int64_t key_size = args.groups * K;
  const Convolution convolution(args);
  for (int64_t t = 0; t < count; ++t) {
    float* q = scratch + t * row;
    float* k = q + K;
    float* v = k + K;
    convolution.run(first + t, head * K, K, q);
    convolution.run(first + t, key_size + head * K, K, k);
    convolution.run(first + t, 2 * key_size + head * group * V, group * V, v);
    to_unit(q, K, args.query_scale);
    to_unit(k, K, 1.0f);
    const float* given = args.inputs + (first + t) * args.input_floats();
    for (int64_t g = 0; g < group; ++g) {
      const int64_t own = head * group + g;
      const F time = softplus(set1(given[args.heads + own] + args.time_bias[own]));
      float* into = v + group * V + 2 * g;
      into[0] = first_lane(exp_lanes(mul(set1(args.decay[own]), time)));
      into[1] = first_lane(div(set1(1.0f), add(set1(1.0f), exp_lanes(set1(-given[own])))));
    }
  }
  float* slots = scratch + count * row;
  for (int64_t g = 0; g < group; ++g)
    for_stripes(args, head * group + g, first, count, slots,
                [&](const Stripe& its, int64_t t, int64_t column) {
                  const float* q = scratch + t * row;
                  const float* scalars = q + 2 * K + group * V + 2 * g;
                  const auto run = its.left >= kStateColumns ? &step<4, true>
                                   : its.left >= 16          ? &step<1, true>
                                                             : &step<1, false>;
                  run(its, K, q, q + K, q + 2 * K + g * V + column, scalars[0], scalars[1]);
                });
}

}  // namespace

void gated_delta(const DeltaArgs& args, int64_t tokens, int64_t begin, int64_t end, float* scratch) {
  const int64_t K = args.rows, V = args.width, group = args.of_group();
  const GateForm silu{Activation::kSilu};
  for (int64_t head = begin; head < end; ++head) {
    for (int64_t first = 0; first < tokens; first += kStateTokens)
      run_tokens(args, head, first, tokens - first < kStateTokens ? tokens - first : kStateTokens, scratch);
    if (args.next_tail != nullptr) {
      const Convolution convolution(args);
      convolution.keep_tail(tokens, head * K, K, args.next_tail);
      convolution.keep_tail(tokens, (args.groups + head) * K, K, args.next_tail);
      convolution.keep_tail(tokens, 2 * args.groups * K + head * group * V, group * V, args.next_tail);
    }
    if (args.out == nullptr) continue;
    for (int64_t t = 0; t < tokens - args.first; ++t)
      for (int64_t own = head * group; own < (head + 1) * group; ++own) {
        float* out = args.out + t * args.values() + own * V;
        norm(out, args.norm, V, out);
        activate(silu, args.gates + t * args.gate_stride + own * V, out, out, V);
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
