#include "../mamba2.h"

#include "recurrence.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// One token's step of 16 * N columns of a head's state: S' = decay * S + b (time * x)^T; out = c S' + skip *
// x. Sums run over ascending rows.
template <int N, bool WHOLE>
void step(const Stripe its, int64_t rows, const float* b, const float* c, const float* x, float decay,
          float time, float skip) {
  F sums[N], change[N];
  const F factor = set1(decay);
  for (int n = 0; n < N; ++n) {
    change[n] = mul(set1(time), its.read<WHOLE>(x, n));
    sums[n] = zero();
  }
  for (int64_t row = 0; row < rows; ++row) {
    const F into = set1(b[row]), seen = set1(c[row]);
    for (int n = 0; n < N; ++n) {
      const F value = fma(into, change[n], mul(factor, its.read<WHOLE>(its.from + row * its.from_width, n)));
      its.write<WHOLE>(its.to + row * its.to_width, n, value);
      sums[n] = fma(seen, value, sums[n]);
    }
  }
  for (int n = 0; n < N; ++n) its.write<WHOLE>(its.out, n, fma(set1(skip), its.read<WHOLE>(x, n), sums[n]));
}

// What heads make of a token: B and C of their group, and for one head its decay, its time step and x.
struct Chunk {
  float *shared, *own;  // (count, 2 * rows) and (count, width + 2)
  float* slots;
};

// `count` tokens from token `first` on, of one head.
void run_head(const MixerArgs& args, int64_t head, int64_t first, int64_t count, const Chunk& chunk) {
  const int64_t N = args.rows, P = args.width;
  const F least = set1(args.least_time), most = set1(args.most_time);
  const Convolution convolution(args);
  for (int64_t t = 0; t < count; ++t) {
    float* own = chunk.own + t * (P + 2);
    convolution.run(first + t, head * P, P, own + 2);
    const float given = args.inputs[(first + t) * args.heads + head];
    const F raw = fma(set1(args.time_factor), set1(given), set1(args.time_bias[head]));
    const F time = min(max(softplus(raw), least), most);
    own[0] = first_lane(exp_lanes(mul(set1(args.decay[head]), time)));
    own[1] = first_lane(time);
  }
  for_stripes(args, head, first, count, chunk.slots, [&](const Stripe& its, int64_t t, int64_t column) {
    const float* own = chunk.own + t * (P + 2);
    const float* b = chunk.shared + t * 2 * N;
    const auto run = its.left >= kStateColumns ? &step<4, true>
                     : its.left >= 16          ? &step<1, true>
                                               : &step<1, false>;
    run(its, N, b, b + N, own + 2 + column, own[0], own[1], args.skip[head]);
  });
}

}  // namespace

void mamba2(const MixerArgs& args, int64_t tokens, int64_t begin, int64_t end, float* scratch) {
  const int64_t N = args.rows, P = args.width, of_group = args.of_group();
  const int64_t b_first = args.values(), c_first = b_first + args.groups * N;
  const int64_t most = tokens < kStateTokens ? tokens : kStateTokens;
  const Chunk chunk{scratch, scratch + most * 2 * N, scratch + most * (2 * N + P + 2)};
  const Convolution convolution(args);
  for (int64_t first = 0; first < tokens; first += kStateTokens) {
    const int64_t count = tokens - first < kStateTokens ? tokens - first : kStateTokens;
    int64_t held = -1;
    for (int64_t head = begin; head < end; ++head) {
      const int64_t group = head / of_group;
      if (group != held) {
        for (int64_t t = 0; t < count; ++t) {
          float* shared = chunk.shared + t * 2 * N;
          convolution.run(first + t, b_first + group * N, N, shared);
          convolution.run(first + t, c_first + group * N, N, shared + N);
        }
        held = group;
      }
      run_head(args, head, first, count, chunk);
    }
  }
  if (args.next_tail == nullptr) return;
  for (int64_t head = begin; head < end; ++head) {
    convolution.keep_tail(tokens, head * P, P, args.next_tail);
    if (head % of_group > 0) continue;
    convolution.keep_tail(tokens, b_first + head / of_group * N, N, args.next_tail);
    convolution.keep_tail(tokens, c_first + head / of_group * N, N, args.next_tail);
  }
}

void mixer_gate(const MixerArgs& args, const float* gates, int64_t first, int64_t n, float* out) {
  Norm own = args.norm;
  if (own.weight) own.weight += first;
  gates += first;
  out += first;
  if (own.weight && args.norm_before) norm(out, own, n, out);
  const bool normed_last = own.weight && !args.norm_before;
  const F factor = set1(normed_last ? 1.0f : args.out_factor);
  for (int64_t i = 0; i < n; i += 16) {
    const F gate = silu_lanes(mul(set1(args.gate_factor), load_partial(gates + i, n - i)));
    store_partial(out + i, mul(mul(load_partial(out + i, n - i), gate), factor), n - i);
  }
  if (!normed_last) return;
  norm(out, own, n, out);
  for (int64_t i = 0; i < n; i += 16)
    store_partial(out + i, mul(load_partial(out + i, n - i), set1(args.out_factor)), n - i);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
