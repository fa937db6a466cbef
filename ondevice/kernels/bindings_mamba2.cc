#include "bindings_recurrence.h"
#include "mamba2.h"

namespace ondevice {
namespace {

struct MixerLayer {
  using Args = MixerArgs;
  // Groups, heads, rows and width; time_factor, gate_factor, out_factor, least_time and most_time;
  // norm_groups and norm_before.
  using Sizes =
      std::tuple<int64_t, int64_t, int64_t, int64_t, float, float, float, float, float, int64_t, bool>;
  using Weights = std::tuple<Table, Weight, Vector, Vector, Vector, NormArg>;  // as MixerWeights

  static MixerArgs args(const Sizes& sizes, const Weights& weights) {
    MixerArgs args{};
    int64_t groups, heads, rows, width;
    std::tie(groups, heads, rows, width, args.time_factor, args.gate_factor, args.out_factor, args.least_time,
             args.most_time, args.norm_groups, args.norm_before) = sizes;
    const auto& [conv, conv_bias, decay, time_bias, skip, norm] = weights;
    set_heads(args, groups, heads, rows, width);
    set_weights(args, conv, conv_bias, decay, time_bias);
    args.skip = skip.data();
    require(static_cast<int64_t>(skip.shape(0)) == heads, "skip is (heads,)");
    require(args.norm_groups > 0 && args.values() % args.norm_groups == 0, "norm_groups must divide values");
    require(args.least_time >= 0.0f && args.least_time <= args.most_time, "least_time is above most_time");
    return args;
  }

  static void norm(MixerArgs& args, const Weights& weights) {
    args.norm = norm_of(std::get<5>(weights), args.values());
    require(args.norm.bias == nullptr && !args.norm.centred, "outputs have an RMS norm without a bias");
  }

  static void run(Runner& runner, const MixerArgs& args, int64_t tokens) {
    const int64_t scratch = args.scratch(tokens);
    float* memory = runner.scratch(scratch);
    // Each piece makes B and C of its groups anew: few pieces, but two for each thread.
    const int64_t grain = std::max<int64_t>(1, args.heads / (2 * runner.pool().threads()));
    runner.pool().parallel_for(args.heads, grain, [&](int64_t begin, int64_t end, int thread) {
      runner.kernels().mamba2(args, tokens, begin, end, memory + thread * scratch);
    });
    if (args.out == nullptr) return;
    const int64_t parts = args.norm.weight ? args.norm_groups : args.heads, width = args.values() / parts;
    runner.pool().parallel_for((tokens - args.first) * parts, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t row = part / parts;
        runner.kernels().mixer_gate(args, args.gates + row * args.gate_stride, part % parts * width, width,
                                    args.out + row * args.values());
      }
    });
  }
};

}  // namespace

void bind_mamba2(nb::module_& m) {
  RecurrenceOps<MixerLayer>::bind(m, "mamba2", "mamba2_ahead", "replay_mamba2");
}

}  // namespace ondevice
