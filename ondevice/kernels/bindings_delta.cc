#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "gated_delta.h"
#include "short_conv.h"

namespace ondevice {
namespace {

using Heads = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // key heads, value heads, widths of both

int64_t size(size_t n) { return static_cast<int64_t>(n); }

// The args of one layer, without tokens' own.
DeltaArgs layer_args(const Heads& heads, const CArray<const float, 2>& conv,
                     const CArray<const float, 1>& decay, const CArray<const float, 1>& time_bias,
                     const CArray<const float, 1>& state) {
  const auto [key_heads, value_heads, key_width, value_width] = heads;
  require(key_heads > 0 && key_width > 0 && value_width > 0 && value_heads > 0, "sizes must be positive");
  require(value_heads % key_heads == 0, "value heads must be a multiple of key heads");
  DeltaArgs args{};
  args.key_heads = key_heads;
  args.value_heads = value_heads;
  args.key_width = key_width;
  args.value_width = value_width;
  args.taps = size(conv.shape(0));
  args.conv = conv.data();
  args.decay = decay.data();
  args.time_bias = time_bias.data();
  args.query_scale = 1.0f / std::sqrt(static_cast<float>(key_width));
  args.state = state.data();
  args.tail = state.data() + value_heads * value_width * key_width;
  require(args.taps > 1, "a convolution has two taps or more");
  require(size(conv.shape(1)) == args.channels(), "conv is (taps, channels)");
  require(size(decay.shape(0)) == value_heads && size(time_bias.shape(0)) == value_heads,
          "decay and time_bias are (value heads,)");
  require(size(state.shape(0)) == args.state_floats(),
          "states are (value heads * key width * value width + (taps - 1) * channels,)");
  return args;
}

// Tokens' inputs, (T, stride) with the channels first, and their gates. Returns T.
int64_t take_inputs(DeltaArgs& args, const CArray<const float, 2>& inputs,
                    const CArray<const float, 2>& gates) {
  const int64_t tokens = size(inputs.shape(0));
  args.projected = inputs.data();
  args.stride = size(inputs.shape(1));
  args.gates = gates.data();
  require(tokens > 0, "there is a token");
  require(size(gates.shape(0)) == tokens && size(gates.shape(1)) == 2 * args.value_heads,
          "gates are (T, 2 * value heads)");
  return tokens;
}

void take_next(DeltaArgs& args, const CArray<float, 1>& next_state) {
  require(size(next_state.shape(0)) == args.state_floats(), "both states have one size");
  require(args.state != next_state.data(), "the next state takes other memory");
  args.next_state = next_state.data();
  args.next_tail = next_state.data() + args.value_heads * args.value_width * args.key_width;
}

// The output of the last of the tokens, (n, values), and what their output gates are in, (n, channels +
// values).
void take_output(DeltaArgs& args, const CArray<const float, 2>& projected, const NormArg& norm,
                 const CArray<float, 2>& out) {
  const int64_t values = args.value_heads * args.value_width;
  args.output_gates = projected.data() + args.channels();
  args.gate_stride = size(projected.shape(1));
  args.norm = norm_of(norm, args.value_width);
  args.out = out.data();
  require(args.norm.weight != nullptr, "outputs are normed");
  require(args.gate_stride == args.channels() + values, "projected is (T, channels + values)");
  require(out.shape(0) == projected.shape(0) && size(out.shape(1)) == values, "out is (T, values)");
}

void run(Runner& runner, const DeltaArgs& args, int64_t tokens) {
  const int64_t scratch = args.scratch(tokens);
  float* memory = runner.scratch(scratch);
  runner.pool().parallel_for(args.key_heads, 1, [&](int64_t begin, int64_t end, int thread) {
    runner.kernels().gated_delta(args, tokens, begin, end, memory + thread * scratch);
  });
}

void gated_delta(Runner& runner, const CArray<const float, 2>& projected, const CArray<const float, 2>& gates,
                 const Heads& heads, const CArray<const float, 2>& conv, const CArray<const float, 1>& decay,
                 const CArray<const float, 1>& time_bias, const NormArg& norm,
                 const CArray<const float, 1>& state, const CArray<float, 1>& next_state,
                 const CArray<float, 2>& out) {
  DeltaArgs args = layer_args(heads, conv, decay, time_bias, state);
  const int64_t tokens = take_inputs(args, projected, gates);
  take_next(args, next_state);
  take_output(args, projected, norm, out);
  nb::gil_scoped_release release;
  run(runner, args, tokens);
}

// Where the states of a tree's tokens lie: a token's last child takes its place, every other one a new place.
std::vector<int32_t> slots_of(const int32_t* parents, int64_t tokens) {
  std::vector<int32_t> last(static_cast<size_t>(tokens), -1), found(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    require(parents[t] >= -1 && parents[t] < t, "a parent comes before its child");
    if (parents[t] >= 0) last[static_cast<size_t>(parents[t])] = static_cast<int32_t>(t);
  }
  int32_t slots = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const bool follows = parents[t] >= 0 && last[static_cast<size_t>(parents[t])] == t;
    found[static_cast<size_t>(t)] = follows ? found[static_cast<size_t>(parents[t])] : slots++;
  }
  return found;
}

void gated_delta_ahead(Runner& runner, const CArray<const float, 2>& inputs,
                       const CArray<const float, 2>& gates, const CArray<const int32_t, 1>& parents,
                       const CArray<const float, 2>& projected, const Heads& heads,
                       const CArray<const float, 2>& conv, const CArray<const float, 1>& decay,
                       const CArray<const float, 1>& time_bias, const NormArg& norm,
                       const CArray<const float, 1>& state, const CArray<float, 2>& out) {
  DeltaArgs args = layer_args(heads, conv, decay, time_bias, state);
  const int64_t tokens = take_inputs(args, inputs, gates);
  require(args.stride == args.channels(), "inputs are (T, channels)");
  require(tokens <= kDeltaTokens, "at most 64 tokens run ahead of a state");
  require(size(parents.shape(0)) == tokens, "parents are (T,)");
  require(projected.shape(0) > 0 && size(projected.shape(0)) <= tokens, "the last tokens have outputs");
  take_output(args, projected, norm, out);
  args.first = tokens - size(projected.shape(0));
  const std::vector<int32_t> slots = slots_of(parents.data(), tokens);
  args.parents = parents.data();
  args.slots = slots.data();
  args.num_slots = *std::max_element(slots.begin(), slots.end()) + 1;
  nb::gil_scoped_release release;
  run(runner, args, tokens);
}

void replay_delta(Runner& runner, const CArray<const float, 2>& inputs, const CArray<const float, 2>& gates,
                  const Heads& heads, const CArray<const float, 2>& conv, const CArray<const float, 1>& decay,
                  const CArray<const float, 1>& time_bias, const CArray<const float, 1>& state,
                  const CArray<float, 1>& next_state) {
  DeltaArgs args = layer_args(heads, conv, decay, time_bias, state);
  const int64_t tokens = take_inputs(args, inputs, gates);
  require(args.stride == args.channels(), "inputs are (T, channels)");
  take_next(args, next_state);
  nb::gil_scoped_release release;
  run(runner, args, tokens);
}

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
  nb::gil_scoped_release release;
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
  nb::gil_scoped_release release;
  run_conv(runner, args, tokens);
}

}  // namespace

void bind_delta(nb::module_& m) {
  m.def("gated_delta", &gated_delta, nb::arg("runner"), nb::arg("projected"), nb::arg("gates"),
        nb::arg("heads"), nb::arg("conv"), nb::arg("decay"), nb::arg("time_bias"), nb::arg("norm"),
        nb::arg("state"), nb::arg("next_state"), nb::arg("out"));
  m.def("gated_delta_ahead", &gated_delta_ahead, nb::arg("runner"), nb::arg("inputs"), nb::arg("gates"),
        nb::arg("parents"), nb::arg("projected"), nb::arg("heads"), nb::arg("conv"), nb::arg("decay"),
        nb::arg("time_bias"), nb::arg("norm"), nb::arg("state"), nb::arg("out"));
  m.def("replay_delta", &replay_delta, nb::arg("runner"), nb::arg("inputs"), nb::arg("gates"),
        nb::arg("heads"), nb::arg("conv"), nb::arg("decay"), nb::arg("time_bias"), nb::arg("state"),
        nb::arg("next_state"));
  m.def("short_conv", &short_conv, nb::arg("runner"), nb::arg("projected"), nb::arg("conv"), nb::arg("state"),
        nb::arg("next_state"), nb::arg("out"));
  m.def("short_conv_ahead", &short_conv_ahead, nb::arg("runner"), nb::arg("inputs"), nb::arg("parents"),
        nb::arg("projected"), nb::arg("conv"), nb::arg("state"), nb::arg("out"));
  m.def(
      "sigmoid_gate",
      [](Runner& runner, const CArray<const float, 2>& gates, const CArray<float, 2>& x) {
        const int64_t rows = x.shape(0), n = x.shape(1);
        require(gates.shape(0) == x.shape(0) && gates.shape(1) == x.shape(1), "gates and x are (T, n)");
        nb::gil_scoped_release release;
        runner.pool().parallel_for(rows, 4, [&](int64_t begin, int64_t end, int) {
          runner.kernels().sigmoid_gate(gates.data() + begin * n, x.data() + begin * n, (end - begin) * n);
        });
      },
      nb::arg("runner"), nb::arg("gates"), nb::arg("x"));
}

}  // namespace ondevice
