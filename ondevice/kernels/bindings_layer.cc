#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "plain_layer.h"

namespace ondevice {
namespace {

using Slices = std::vector<CArray<const uint8_t, 1>>;
using Places = std::pair<Blocks, Blocks>;  // of layers that keep all tokens, and of windowed ones
using Sequence = std::tuple<int64_t, Places, int64_t, std::optional<Tree>>;  // rows, blocks, position, tree
using LowRankArg = std::pair<const Matrix*, const Matrix*>;                  // down, up
using RotaryTables = std::pair<CArray<const float, 2>, CArray<const float, 2>>;  // cosines and sines

const float* vector_of(const Weight& values, int64_t size, const char* message) {
  require(!values || static_cast<int64_t>(values->shape(0)) == size, message);
  return values ? values->data() : nullptr;
}

// The adapter of a product from `cols` values to `rows`.
LowRank low_rank(const LowRankArg& adapter, int64_t cols, int64_t rows) {
  const auto& [down, up] = adapter;
  require(down && up && down->cols() == cols && up->cols() == down->rows() && up->rows() == rows,
          "an adapter is (rank, columns) and (rows, rank)");
  return {down, up};
}

void make(PlainLayer* self, const NormArg& attention_norm, const Matrix& qkv, const Weight& qkv_bias,
          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rope, int64_t window, float scale,
          float soft_cap, const std::optional<HeadNorms>& norms, const Weight& sinks, const Matrix& out,
          const Weight& out_bias, const NormArg& attention_output_norm, const NormArg& feed_forward_norm,
          const Expert& slice, const Slices& slices, const FormArg& form, const Weight& gate_bias,
          const Weight& output_bias, const NormArg& feed_forward_output_norm,
          const std::optional<std::array<LowRankArg, 3>>& adapters) {
  const int64_t hidden = qkv.cols(), count = static_cast<int64_t>(slices.size());
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "query heads must be a multiple of kv heads");
  require(head_dim > 0 && head_dim % 2 == 0 && qkv.rows() == (heads + 2 * kv_heads) * head_dim,
          "qkv is ((heads + 2 * kv_heads) * head_dim, hidden)");
  require(out.rows() == hidden && out.cols() == heads * head_dim, "out is (hidden, heads * head_dim)");
  require(slice.hidden() == hidden && count > 0, "there are slices, as wide as the layer");
  require(rope >= 0 && window >= 0 && scale > 0.0f && soft_cap >= 0.0f,
          "scale must be positive, rope, window and soft_cap not negative");
  PlainLayer layer{};
  layer.hidden = hidden;
  layer.attention_norm = norm_of(attention_norm, hidden);
  layer.attention_output_norm = norm_of(attention_output_norm, hidden);
  layer.feed_forward_norm = norm_of(feed_forward_norm, hidden);
  layer.feed_forward_output_norm = norm_of(feed_forward_output_norm, hidden);
  layer.qkv = &qkv;
  layer.out = &out;
  layer.qkv_bias = vector_of(qkv_bias, qkv.rows(), "a bias is (rows,)");
  layer.out_bias = vector_of(out_bias, hidden, "a bias is (rows,)");
  layer.heads = heads;
  layer.kv_heads = kv_heads;
  layer.head_dim = head_dim;
  layer.window = window;
  layer.scale = scale;
  layer.soft_cap = soft_cap;
  layer.transform = head_transform(norms, heads, kv_heads, head_dim, head_dim, true);
  layer.rope = rope;
  layer.sinks = vector_of(sinks, heads, "sinks are (heads,)");
  layer.slice = &slice;
  for (const auto& bytes : slices) layer.slices.emplace_back(slice_address(bytes, slice.record_bytes()));
  layer.form = form_of(form);
  layer.gate_bias = vector_of(gate_bias, count * slice.neurons(), "a bias is (slices * neurons of a slice,)");
  layer.output_bias = vector_of(output_bias, hidden, "a bias is (hidden,)");
  if (adapters) {
    const auto& [of_qkv, of_out, of_feed_forward] = *adapters;
    layer.qkv_adapter = low_rank(of_qkv, hidden, qkv.rows());
    layer.out_adapter = low_rank(of_out, out.cols(), hidden);
    layer.feed_forward_adapter = low_rank(of_feed_forward, hidden, hidden);
  }
  new (self) PlainLayer(std::move(layer));
}

// The rows of each sequence. Raises if they aren't those of a pass over `tokens` rows.
std::vector<SequenceRows> sequence_rows(const std::vector<Sequence>& sequences, int64_t tokens) {
  std::vector<SequenceRows> result;
  int64_t first = 0;
  for (const auto& [count, places, position, tree] : sequences) {
    require(count > 0 && position >= 0, "a sequence has rows, and its position isn't negative");
    result.push_back({first, count, position, tree ? tree_view(*tree, count) : TreeView{nullptr, nullptr}});
    first += count;
  }
  require(!result.empty() && first == tokens, "x has the rows of all sequences");
  return result;
}

void run_layers(Runner& runner, const std::vector<const PlainLayer*>& layers, const CArray<float, 2>& x,
                const std::vector<Sequence>& sequences, const std::vector<int64_t>& windows,
                const std::vector<int64_t>& offsets, int bits, const std::vector<RotaryTables>& ropes,
                const CArray<float, 2>& projected, const CArray<float, 2>& attended, int64_t adapted,
                const std::optional<CArray<float, 2>>& narrow) {
  const int64_t tokens = x.shape(0), hidden = x.shape(1);
  require(adapted >= 0 && adapted <= tokens, "adapted is a row of x, or behind the last");
  require(!narrow || static_cast<int64_t>(narrow->shape(0)) >= tokens - adapted,
          "narrow has the adapted rows");
  const LayerRows rows{tokens,           adapted,         sequence_rows(sequences, tokens),
                       projected.data(), attended.data(), narrow ? narrow->data() : nullptr};
  require(offsets.size() == layers.size() && windows.size() == layers.size(),
          "each layer has an offset, and a window or 0");
  for (const auto* scratch : {&projected, &attended})
    require(static_cast<int64_t>(scratch->shape(0)) == tokens, "scratch memory has x's rows");
  std::vector<KvView> views;
  for (size_t i = 0; i < layers.size(); ++i) {
    const PlainLayer& layer = *layers[i];
    require(layer.hidden == hidden, "x is (T, hidden)");
    require(static_cast<int64_t>(projected.shape(1)) >= std::max(layer.projected_width(), hidden) &&
                static_cast<int64_t>(attended.shape(1)) >= layer.attended_width(),
            "scratch memory is too narrow");
    require(adapted == tokens || !layer.qkv_adapter.down ||
                (narrow && static_cast<int64_t>(narrow->shape(1)) >= layer.most_rank()),
            "memory for an adapter's rank is too narrow");
    require(layer.rope < static_cast<int64_t>(ropes.size()), "a layer's rotary tables are missing");
    const auto& [cos, sin] = ropes[static_cast<size_t>(layer.rope)];
    for (const auto* table : {&cos, &sin})
      require(static_cast<int64_t>(table->shape(0)) == tokens &&
                  static_cast<int64_t>(table->shape(1)) * 2 == layer.head_dim,
              "cos and sin are half as wide as a head");
    for (const auto& [count, places, position, tree] : sequences) {
      const Blocks& blocks = windows[i] > 0 ? places.second : places.first;
      const int64_t end = position + count;
      views.push_back(kv_view(blocks, offsets[i], layer.kv_heads, layer.head_dim, bits, end));
      require_blocks(blocks, layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0, end);
    }
  }
  const NativeCall call(runner);
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto& [cos, sin] = ropes[static_cast<size_t>(layers[i]->rope)];
    layers[i]->forward(runner, rows, &views[i * sequences.size()], cos.data(), sin.data(), x.data());
  }
}

}  // namespace

void bind_layer(nb::module_& m) {
  // It points into its arguments and keeps none of them: a budget may free matrices and slices at any time.
  nb::class_<PlainLayer>(m, "PlainLayer")
      .def("__init__", &make, nb::arg("attention_norm").none(), nb::arg("qkv"), nb::arg("qkv_bias").none(),
           nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("rope"), nb::arg("window"),
           nb::arg("scale"), nb::arg("soft_cap"), nb::arg("norms").none(), nb::arg("sinks").none(),
           nb::arg("out"), nb::arg("out_bias").none(), nb::arg("attention_output_norm").none(),
           nb::arg("feed_forward_norm").none(), nb::arg("slice"), nb::arg("slices"), nb::arg("form"),
           nb::arg("gate_bias").none(), nb::arg("output_bias").none(),
           nb::arg("feed_forward_output_norm").none(), nb::arg("adapters").none());
  m.def("run_layers", &run_layers, nb::arg("runner"), nb::arg("layers"), nb::arg("x"), nb::arg("sequences"),
        nb::arg("windows"), nb::arg("offsets"), nb::arg("bits"), nb::arg("ropes"), nb::arg("projected"),
        nb::arg("attended"), nb::arg("adapted"), nb::arg("narrow").none());
}

}  // namespace ondevice
