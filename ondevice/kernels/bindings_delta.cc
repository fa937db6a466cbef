#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <tuple>

#include "bindings.h"
#include "gated_delta.h"

namespace ondevice {
namespace {

using Heads = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // key heads, value heads, widths of both

void gated_delta(Runner& runner, const CArray<const float, 2>& projected, const CArray<const float, 2>& gates,
                 const Heads& heads, const CArray<const float, 2>& conv, const CArray<const float, 1>& decay,
                 const CArray<const float, 1>& time_bias, const NormArg& norm,
                 const CArray<const float, 1>& state, const CArray<float, 1>& next_state,
                 const CArray<float, 2>& out) {
  const auto size = [](size_t n) { return static_cast<int64_t>(n); };
  const int64_t tokens = size(projected.shape(0)), taps = size(conv.shape(0));
  const auto [key_heads, value_heads, key_width, value_width] = heads;
  require(key_heads > 0 && key_width > 0 && value_width > 0 && value_heads > 0, "sizes must be positive");
  require(value_heads % key_heads == 0, "value heads must be a multiple of key heads");
  require(tokens > 0 && taps > 1, "there is a token, and a convolution of two taps or more");
  const int64_t values = value_heads * value_width;
  DeltaArgs args{projected.data(),
                 size(projected.shape(1)),
                 gates.data(),
                 key_heads,
                 value_heads,
                 key_width,
                 value_width,
                 taps,
                 conv.data(),
                 decay.data(),
                 time_bias.data(),
                 norm_of(norm, value_width),
                 1.0f / std::sqrt(static_cast<float>(key_width)),
                 state.data(),
                 state.data() + values * key_width,
                 next_state.data(),
                 next_state.data() + values * key_width,
                 out.data()};
  const int64_t channels = args.channels(), floats = values * key_width + (taps - 1) * channels;
  require(args.norm.weight != nullptr, "outputs are normed");
  require(args.stride == channels + values, "projected is (T, channels + values)");
  require(size(gates.shape(0)) == tokens && size(gates.shape(1)) == 2 * value_heads,
          "gates are (T, 2 * value heads)");
  require(size(conv.shape(1)) == channels, "conv is (taps, channels)");
  require(size(decay.shape(0)) == value_heads && size(time_bias.shape(0)) == value_heads,
          "decay and time_bias are (value heads,)");
  require(size(state.shape(0)) == floats && size(next_state.shape(0)) == floats,
          "states are (value heads * key width * value width + (taps - 1) * channels,)");
  require(state.data() != next_state.data(), "the next state takes other memory");
  require(size(out.shape(0)) == tokens && size(out.shape(1)) == values, "out is (T, values)");
  nb::gil_scoped_release release;
  const int64_t scratch = args.scratch(tokens);
  float* memory = runner.scratch(scratch);
  runner.pool().parallel_for(key_heads, 1, [&](int64_t begin, int64_t end, int thread) {
    runner.kernels().gated_delta(args, tokens, begin, end, memory + thread * scratch);
  });
}

}  // namespace

void bind_delta(nb::module_& m) {
  m.def("gated_delta", &gated_delta, nb::arg("runner"), nb::arg("projected"), nb::arg("gates"),
        nb::arg("heads"), nb::arg("conv"), nb::arg("decay"), nb::arg("time_bias"), nb::arg("norm"),
        nb::arg("state"), nb::arg("next_state"), nb::arg("out"));
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
