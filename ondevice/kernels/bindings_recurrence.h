// What the bindings of layers with recurrent states of heads have in common: three ops for each kind of
// layer.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "recurrence.h"

namespace ondevice {

using Vector = CArray<const float, 1>;
using Table = CArray<const float, 2>;

// Each sets some of a layer's args, and checks them against those that are set.
void set_heads(RecurrenceArgs& args, int64_t groups, int64_t heads, int64_t rows, int64_t width);
void set_weights(RecurrenceArgs& args, const Table& conv, const Weight& conv_bias, const Vector& decay,
                 const Vector& time_bias);
void set_state(RecurrenceArgs& args, const Vector& state);
void set_next_state(RecurrenceArgs& args, const CArray<float, 1>& next_state);
// channels: (T, stride), a layer's channels first. inputs: (T, of_token). Returns T.
int64_t set_tokens(RecurrenceArgs& args, const Table& channels, const Table& inputs, int64_t of_token);
// Of the last of the tokens, (n, values); gates are in projected, (n, channels + values).
void set_output(RecurrenceArgs& args, const Table& projected, const CArray<float, 2>& out);
// Returns what `slots` points to.
std::vector<int32_t> set_tree(RecurrenceArgs& args, const CArray<const int32_t, 1>& parents, int64_t tokens,
                              int64_t outputs);

// The ops of a Layer, which has Sizes and Weights, as tuples; `args`, which makes its args of these; `norm`,
// which sets their norm; and `run`.
template <class Layer>
struct RecurrenceOps {
  using Sizes = typename Layer::Sizes;
  using Weights = typename Layer::Weights;
  using Args = typename Layer::Args;

  static void pass(Runner& runner, const Table& projected, const Table& inputs, const Sizes& sizes,
                   const Weights& weights, const Vector& state, const CArray<float, 1>& next_state,
                   const CArray<float, 2>& out) {
    Args args = args_of(sizes, weights, state);
    const int64_t tokens = set_tokens(args, projected, inputs, args.input_floats());
    set_next_state(args, next_state);
    set_output(args, projected, out);
    Layer::norm(args, weights);
    const NativeCall call(runner, Step::kRecurrence);
    Layer::run(runner, args, tokens);
  }

  static void ahead(Runner& runner, const Table& channels, const Table& inputs,
                    const CArray<const int32_t, 1>& parents, const Table& projected, const Sizes& sizes,
                    const Weights& weights, const Vector& state, const CArray<float, 2>& out) {
    Args args = args_of(sizes, weights, state);
    const int64_t tokens = set_tokens(args, channels, inputs, args.input_floats());
    require(args.stride == args.channels(), "tokens that run ahead are (T, channels)");
    const std::vector<int32_t> slots =
        set_tree(args, parents, tokens, static_cast<int64_t>(projected.shape(0)));
    set_output(args, projected, out);
    Layer::norm(args, weights);
    const NativeCall call(runner, Step::kRecurrence);
    Layer::run(runner, args, tokens);
  }

  static void replay(Runner& runner, const Table& channels, const Table& inputs, const Sizes& sizes,
                     const Weights& weights, const Vector& state, const CArray<float, 1>& next_state) {
    Args args = args_of(sizes, weights, state);
    const int64_t tokens = set_tokens(args, channels, inputs, args.input_floats());
    require(args.stride == args.channels(), "tokens that are replayed are (T, channels)");
    set_next_state(args, next_state);
    const NativeCall call(runner, Step::kRecurrence);
    Layer::run(runner, args, tokens);
  }

  static void bind(nb::module_& m, const char* pass_name, const char* ahead_name, const char* replay_name) {
    m.def(pass_name, &pass, nb::arg("runner"), nb::arg("projected"), nb::arg("inputs"), nb::arg("sizes"),
          nb::arg("weights"), nb::arg("state"), nb::arg("next_state"), nb::arg("out"));
    m.def(ahead_name, &ahead, nb::arg("runner"), nb::arg("channels"), nb::arg("inputs"), nb::arg("parents"),
          nb::arg("projected"), nb::arg("sizes"), nb::arg("weights"), nb::arg("state"), nb::arg("out"));
    m.def(replay_name, &replay, nb::arg("runner"), nb::arg("channels"), nb::arg("inputs"), nb::arg("sizes"),
          nb::arg("weights"), nb::arg("state"), nb::arg("next_state"));
  }

 private:
  static Args args_of(const Sizes& sizes, const Weights& weights, const Vector& state) {
    Args args = Layer::args(sizes, weights);
    set_state(args, state);
    return args;
  }
};

}  // namespace ondevice
