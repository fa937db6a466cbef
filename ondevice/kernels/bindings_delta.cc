#include <cmath>

#include "bindings_recurrence.h"
#include "gated_delta.h"
#include "short_conv.h"

namespace ondevice {
namespace {

int64_t size(size_t n) { return static_cast<int64_t>(n); }

struct DeltaLayer {
  using Args = DeltaArgs;
  using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // key heads, value heads, widths of both
  using Weights = std::tuple<Table, Vector, Vector, NormArg>;    // as DeltaWeights

  static DeltaArgs args(const Sizes& sizes, const Weights& weights) {
    const auto& [key_heads, value_heads, key_width, value_width] = sizes;
    const auto& [conv, decay, time_bias, norm] = weights;
    DeltaArgs args{};
    set_heads(args, key_heads, value_heads, key_width, value_width);
    set_weights(args, conv, {}, decay, time_bias);
    args.query_scale = 1.0f / std::sqrt(static_cast<float>(key_width));
    return args;
  }

  static void norm(DeltaArgs& args, const Weights& weights) {
    args.norm = norm_of(std::get<3>(weights), args.width);
    require(args.norm.weight != nullptr, "outputs are normed");
  }

  static void run(Runner& runner, const DeltaArgs& args, int64_t tokens) {
    const int64_t scratch = args.scratch(tokens);
    float* memory = runner.scratch(scratch);
    runner.pool().parallel_for(args.groups, 1, [&](int64_t begin, int64_t end, int thread) {
      runner.kernels().gated_delta(args, tokens, begin, end, memory + thread * scratch);
    });
  }
};

// The args of a convolution, without products' own.
ConvArgs conv_args(const CArray<float, 2>& projected, const CArray<const float, 2>& conv,
                   const CArray<const float, 1>& state, const CArray<float, 2>& out) {
  ConvArgs args{};
  args.projected = projected.data();
  args.taps = size(conv.shape(0));
  args.channels = size(conv.shape(1));
  args.conv = conv.data();
  args.tail = state.data();
  args.out = out.data();
  require(args.taps > 1 && args.channels > 0, "a convolution has two taps or more, and channels");
  require(projected.shape(0) > 0, "there is a token");
  require(size(projected.shape(1)) == 3 * args.channels, "projected is (T, 3 * channels)");
  require(size(state.shape(0)) == (args.taps - 1) * args.channels, "states are ((taps - 1) * channels,)");
  require(out.shape(0) == projected.shape(0) && size(out.shape(1)) == args.channels, "out is (T, channels)");
  return args;
}

void run_conv(Runner& runner, const ConvArgs& args, int64_t tokens) {
  const int64_t parts = (args.channels + kConvChannels - 1) / kConvChannels;
  runner.pool().parallel_for(parts, 1, [&](int64_t begin, int64_t end, int) {
    runner.kernels().short_conv(args, tokens, begin * kConvChannels,
                                std::min(end * kConvChannels, args.channels));
  });
}

void short_conv(Runner& runner, const CArray<float, 2>& projected, const CArray<const float, 2>& conv,
                const CArray<const float, 1>& state, const CArray<float, 1>& next_state,
                const CArray<float, 2>& out) {
  ConvArgs args = conv_args(projected, conv, state, out);
  args.products = projected.data();
  args.stride = 3 * args.channels;
  require(next_state.shape(0) == state.shape(0), "both states have one size");
  require(state.data() != next_state.data(), "the next state takes other memory");
  args.next_tail = next_state.data();
  const int64_t tokens = size(projected.shape(0));
  const NativeCall call(runner, Step::kRecurrence);
  run_conv(runner, args, tokens);
}

void short_conv_ahead(Runner& runner, const CArray<float, 2>& inputs, const CArray<const int32_t, 1>& parents,
                      const CArray<float, 2>& projected, const CArray<const float, 2>& conv,
                      const CArray<const float, 1>& state, const CArray<float, 2>& out) {
  ConvArgs args = conv_args(projected, conv, state, out);
  const int64_t tokens = size(inputs.shape(0));
  args.products = inputs.data();
  args.stride = args.channels;
  args.parents = parents.data();
  args.first = tokens - size(projected.shape(0));
  require(size(inputs.shape(1)) == args.channels, "inputs are (T, channels)");
  require(args.first >= 0, "the last tokens have outputs");
  require(size(parents.shape(0)) == tokens, "parents are (T,)");
  for (int64_t t = 0; t < tokens; ++t)
    require(args.parents[t] >= -1 && args.parents[t] < t, "a parent comes before its child");
  const NativeCall call(runner, Step::kRecurrence);
  run_conv(runner, args, tokens);
}

}  // namespace

void bind_delta(nb::module_& m) {
  RecurrenceOps<DeltaLayer>::bind(m, "gated_delta", "gated_delta_ahead", "replay_delta");
  m.def("short_conv", &short_conv, nb::arg("runner"), nb::arg("projected"), nb::arg("conv"), nb::arg("state"),
        nb::arg("next_state"), nb::arg("out"));
  m.def("short_conv_ahead", &short_conv_ahead, nb::arg("runner"), nb::arg("inputs"), nb::arg("parents"),
        nb::arg("projected"), nb::arg("conv"), nb::arg("state"), nb::arg("out"));
  m.def(
      "sigmoid_gate",
      [](Runner& runner, const CArray<const float, 2>& gates, const CArray<float, 2>& x) {
        const int64_t rows = x.shape(0), n = x.shape(1);
        require(gates.shape(0) == x.shape(0) && gates.shape(1) == x.shape(1), "gates and x are (T, n)");
        const NativeCall call(runner);
        runner.pool().parallel_for(rows, 4, [&](int64_t begin, int64_t end, int) {
          runner.kernels().sigmoid_gate(gates.data() + begin * n, x.data() + begin * n, (end - begin) * n);
        });
      },
      nb::arg("runner"), nb::arg("gates"), nb::arg("x"));
}

}  // namespace ondevice
