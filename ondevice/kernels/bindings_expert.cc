#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

#include "bindings.h"
#include "expert.h"
#include "expert_pass.h"
#include "expert_reuse.h"
#include "feed_forward.h"
#include "matrix.h"
#include "planes.h"
#include "routing.h"
#include "slice_pass.h"

namespace ondevice {
namespace {

// A matrix's format, its first byte in a record, and that of its biases, if it has any.
using Place = std::tuple<FormatArg, int64_t, std::optional<int64_t>>;

// Where a matrix begins in a slice's high plane, and in its low one, if its codes are divided.
using PlanePlace = std::pair<int64_t, std::optional<int64_t>>;

RecordMatrix matrix_of(const Place& place, int64_t rows, int64_t cols) {
  const auto& [stored, offset, bias] = place;
  const RecordMatrix matrix{tile_format_of(stored), rows, cols, offset, bias.value_or(-1)};
  check_columns(matrix.format, cols);
  require(offset >= 0 && offset % 64 == 0, "a matrix begins at a multiple of 64 bytes");
  require(!bias || (*bias >= 0 && *bias % static_cast<int64_t>(sizeof(float)) == 0),
          "biases begin at a multiple of 4 bytes");
  return matrix;
}

void put_in_planes(RecordMatrix& matrix, const PlanePlace& place) {
  const auto& [high, low] = place;
  require(matrix.bias < 0, "matrices in planes have no biases");
  require(low.has_value() == (low_plane_bits_of(matrix.format.bits) > 0),
          "a matrix has a low plane where its codes are divided");
  require(high >= 0 && high % 64 == 0 && low.value_or(0) >= 0 && low.value_or(0) % 64 == 0,
          "a plane begins at a multiple of 64 bytes");
  matrix.high = high;
  matrix.low = low.value_or(-1);
}

void make(Expert* self, int64_t hidden, int64_t neurons, const Place& gate, const std::optional<Place>& up,
          const Place& down, const std::vector<PlanePlace>& planes) {
  require(hidden > 0 && neurons > 0, "hidden and neurons must be positive");
  RecordMatrix gates = matrix_of(gate, neurons, hidden), downs = matrix_of(down, hidden, neurons);
  std::optional<RecordMatrix> ups;
  if (up) {
    ups = matrix_of(*up, neurons, hidden);
    require(ups->format == gates.format, "gate and up have one format");
  }
  if (!planes.empty()) {
    require(planes.size() == (up ? 3 : 2), "planes are those of gate, up and down");
    put_in_planes(gates, planes.front());
    if (ups) put_in_planes(*ups, planes[1]);
    put_in_planes(downs, planes.back());
  }
  new (self) Expert(gates, ups, downs);
}

void forward(const Expert& expert, Runner& runner, const Rows& x, uint64_t address, const FormArg& form,
             const CArray<float, 2>& out) {
  const int64_t tokens = rows_of(x, expert.hidden());
  const GateForm gates = form_of(form);
  require(address != 0 && address % 64 == 0, "a record begins at a multiple of 64 bytes");
  require(
      static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == expert.hidden(),
      "out is (T, hidden)");
  const NativeCall call(runner);
  expert.forward(runner, reinterpret_cast<const uint8_t*>(address), x.data(), x.stride(0), tokens, gates,
                 out.data());
}

using Ids = CArray<const int32_t, 2>;
using Weights = CArray<const float, 2>;

RouterForm router_form(int scoring, int64_t experts, int64_t chosen, bool renormalised, double factor,
                       int64_t groups, int64_t chosen_groups, double jitter, int64_t group_best) {
  require(scoring >= 0 && scoring <= static_cast<int>(Scoring::kSparsemixer), "scoring must be 0 to 2");
  const Scoring of = static_cast<Scoring>(scoring);
  require(chosen > 0 && chosen <= experts, "experts are chosen among those that there are");
  require(of != Scoring::kSparsemixer || chosen == 2, "sparsemixer chooses 2 experts");
  require(groups > 0 && experts % groups == 0 && chosen_groups > 0 && chosen_groups <= groups &&
              (groups == 1 || (experts / groups >= 2 && chosen <= chosen_groups * (experts / groups))),
          "experts can't be chosen from these groups");
  require(group_best == 1 || group_best == 2, "a group is as good as its best score, or its two best");
  return {of, experts, chosen, renormalised, factor, groups, chosen_groups, group_best, jitter};
}

void route(const RouterForm& form, const CArray<const float, 2>& logits, const Weight& choice_bias,
           const Weight& scales, const CArray<int32_t, 2>& ids, const CArray<float, 2>& weights) {
  const int64_t tokens = logits.shape(0);
  require(static_cast<int64_t>(logits.shape(1)) == form.experts, "logits are (T, experts)");
  for (const Weight* values : {&choice_bias, &scales})
    require(!*values || static_cast<int64_t>((*values)->shape(0)) == form.experts,
            "a bias and scales are (experts,)");
  require(static_cast<int64_t>(ids.shape(0)) == tokens && static_cast<int64_t>(weights.shape(0)) == tokens &&
              static_cast<int64_t>(ids.shape(1)) == form.chosen &&
              static_cast<int64_t>(weights.shape(1)) == form.chosen,
          "ids and weights are (T, chosen)");
  nb::gil_scoped_release release;
  Routes routes(form);
  for (int64_t t = 0; t < tokens; ++t)
    routes.of(logits.data() + t * form.experts, choice_bias ? choice_bias->data() : nullptr,
              scales ? scales->data() : nullptr, ids.data() + t * form.chosen,
              weights.data() + t * form.chosen);
}

// Experts of the layer are matrices, or else runs of `neurons` neurons.
MultiplyExpert multiplier(Runner& runner, const Expert* expert, const FeedForward& layer, int64_t neurons,
                          const GateForm& form) {
  if (expert)
    return [&runner, expert, form](int32_t, const uint8_t* record, const float* x, int64_t stride,
                                   int64_t tokens, float* out) {
      expert->forward(runner, record, x, stride, tokens, form, out);
    };
  return [&runner, &layer, neurons, form](int32_t, const uint8_t* records, const float* x, int64_t stride,
                                          int64_t tokens, float* out) {
    layer.forward_records(runner, records, neurons, x, stride, tokens, form, out);
  };
}

void begin(ExpertPass* self, Runner& runner, const FeedForward& layer, const Expert* expert, int64_t neurons,
           const Rows& x, const Ids& ids, const Weights& weights, const FormArg& form, bool in_order,
           const CArray<float, 2>& total) {
  const int64_t tokens = rows_of(x, layer.hidden());
  require(expert ? expert->hidden() == layer.hidden() && expert->neurons() == neurons
                 : neurons > 0 && neurons < (int64_t{1} << 31) && !layer.bias(),
          "experts have the layer's width and their own neurons, and neurons no biases");
  require(static_cast<int64_t>(ids.shape(0)) == tokens && ids.shape(1) > 0 &&
              weights.shape(0) == ids.shape(0) && weights.shape(1) == ids.shape(1),
          "ids and weights are (T, chosen)");
  require(static_cast<int64_t>(total.shape(0)) == tokens &&
              static_cast<int64_t>(total.shape(1)) == layer.hidden(),
          "total is (T, hidden)");
  const ChosenExperts chosen{ids.data(), weights.data(), tokens, static_cast<int64_t>(ids.shape(1))};
  const GateForm gates = form_of(form);
  MultiplyExpert multiply = multiplier(runner, expert, layer, neurons, gates);
  const NativeCall call(runner);
  new (self) ExpertPass(runner, std::move(multiply), x.data(), x.stride(0), layer.hidden(), chosen, in_order,
                        total.data());
}

void add(ExpertPass& pass, int32_t expert, uint64_t address) {
  require(address != 0 && address % 64 == 0, "a record begins at a multiple of 64 bytes");
  nb::gil_scoped_release release;
  pass.add(expert, reinterpret_cast<const uint8_t*>(address));
}

void begin_slices(SlicePass* self, Runner& runner, const Expert& slice, const Rows& x, const FormArg& form,
                  const NormArg& norm, const Weight& bias) {
  const int64_t tokens = rows_of(x, slice.hidden());
  const GateForm gates = form_of(form);
  const Norm norms = norm_of(norm, slice.hidden());
  require(!bias || static_cast<int64_t>(bias->shape(0)) % slice.neurons() == 0,
          "a bias is (slices * neurons of a slice,)");
  const NativeCall call(runner);
  const InputRows rows =
      runner.prepare(x.data(), x.stride(0), tokens, slice.hidden(), slice.gate().format, norms);
  new (self) SlicePass(runner, slice, rows, gates, bias ? bias->data() : nullptr,
                       bias ? static_cast<int64_t>(bias->shape(0)) / slice.neurons() : 0);
}

// Checks what slices are added to, and adds them.
void add_all(SlicePass& pass, const std::vector<RecordBytes>& records, std::optional<int64_t> tokens,
             const CArray<float, 2>& out, const Added& base) {
  require(pass.valid(), "another op has used the runner since the pass began");
  const int64_t first = tokens.value_or(pass.tokens());
  require(first >= 1 && first <= pass.tokens(), "tokens are from 1 to those of the pass");
  require(static_cast<int64_t>(out.shape(0)) >= first &&
              static_cast<int64_t>(out.shape(1)) == pass.slice().hidden(),
          "out is (T, hidden)");
  require(!pass.biased() || pass.added() + static_cast<int64_t>(records.size()) <= pass.biased(),
          "more slices than biases");
  const float* sums = added_to(out, base);
  nb::gil_scoped_release release;
  pass.add(records, first, sums, out.data());
}

using SliceBytes = CArray<const uint8_t, 1>;

// The bytes of a low plane; null where there is none, or the slice has none.
const uint8_t* low_plane(const Expert& slice, const std::optional<SliceBytes>& low) {
  return low && slice.low_bytes() ? slice_address(*low, slice.low_bytes()) : nullptr;
}

void add_slices(SlicePass& pass, const std::vector<SliceBytes>& records, std::optional<int64_t> tokens,
                const CArray<float, 2>& out, const Added& base) {
  std::vector<RecordBytes> all;
  for (const SliceBytes& record : records)
    all.emplace_back(slice_address(record, pass.slice().record_bytes()));
  add_all(pass, all, tokens, out, base);
}

void add_planes(SlicePass& pass, const std::vector<std::pair<SliceBytes, std::optional<SliceBytes>>>& planes,
                std::optional<int64_t> tokens, const CArray<float, 2>& out, const Added& base) {
  std::vector<RecordBytes> all;
  for (const auto& [high, low] : planes)
    all.emplace_back(slice_address(high, pass.slice().high_bytes()), low_plane(pass.slice(), low));
  add_all(pass, all, tokens, out, base);
}

void join(const Expert& slice, Runner& runner, const SliceBytes& high, const SliceBytes& low,
          const CArray<uint8_t, 1>& record) {
  require(static_cast<int64_t>(record.shape(0)) >= slice.record_bytes(), "a record has all matrices");
  const uint8_t *of_high = slice_address(high, slice.high_bytes()), *of_low = low_plane(slice, low);
  const NativeCall call(runner);
  slice.join(runner, of_high, of_low, record.data());
}

using Floats = CArray<float, 1>;

void make_scores(ReuseScores* self, int64_t experts, int64_t chosen, int64_t remembered, int64_t similar,
                 float slow_decay, float fast_decay, float fast_weight, float fade, float sharpness,
                 std::vector<float> ahead) {
  require(chosen > 0 && chosen <= experts && remembered > 1 && similar > 0,
          "experts are chosen and remembered");
  new (self) ReuseScores({experts, chosen, remembered, similar, slow_decay, fast_decay, fast_weight, fade,
                          sharpness, std::move(ahead)});
}

int64_t observe(ReuseScores& scores, const CArray<const float, 2>& gates, const Floats& slow,
                const Floats& fast, const Floats& total, const CArray<int32_t, 2>& past, int64_t seen,
                const Floats& alike) {
  const ReuseForm& form = scores.form();
  require(static_cast<int64_t>(gates.shape(1)) == form.experts, "gates are (T, experts)");
  for (const Floats* values : {&slow, &fast, &total})
    require(static_cast<int64_t>(values->shape(0)) == form.experts, "scores are (experts,)");
  require(static_cast<int64_t>(past.shape(0)) == form.chosen &&
              static_cast<int64_t>(past.shape(1)) == form.remembered &&
              static_cast<int64_t>(alike.shape(0)) == form.remembered && seen >= 0 && seen <= form.remembered,
          "a history is (chosen, remembered)");
  return scores.observe(gates.data(), gates.shape(0),
                        {slow.data(), fast.data(), total.data(), past.data(), seen}, alike.data());
}

std::vector<int32_t> least(const CArray<const int32_t, 1>& slots, const CArray<const float, 1>& worth,
                           int64_t first, const CArray<const int32_t, 1>& keep, int64_t count) {
  require(slots.shape(0) == worth.shape(0), "slots and worth are (N,)");
  return worth_least(slots.data(), worth.data(), slots.shape(0), first, keep.data(), keep.shape(0), count);
}

using Bytes2 = CArray<const uint8_t, 2>;

void tile_rows(Runner& runner, const FormatArg& stored, const Bytes2& codes, const Bytes2& scales,
               const Bytes2& biases, const CArray<uint8_t, 1>& tiles) {
  const RowFormat format = tile_format_of(stored);
  const int64_t rows = codes.shape(0), width = codes.shape(1), groups = width / format.codes_bytes();
  require(rows > 0 && groups > 0 && width == groups * format.codes_bytes(),
          "codes are (R, padded_cols * bits / 8)");
  check_columns(format, groups * kGroup);
  const int64_t wide = format.two_levels() ? groups / kSuperGroup * format.header_bytes()
                       : format.bits == 16 ? 0
                                           : groups * format.scales() * format.scale_bytes();
  for (const Bytes2* values : {&scales, format.has_biases() ? &biases : &scales})
    require(static_cast<int64_t>(values->shape(0)) == rows && static_cast<int64_t>(values->shape(1)) == wide,
            "scales and biases are the bytes of (R, G), or headers of 256 columns");
  const int64_t tile = kTile * format.row_bytes(groups), count = (rows + kTile - 1) / kTile;
  require(static_cast<int64_t>(tiles.shape(0)) == count * tile, "tiles have 16 rows each");
  nb::gil_scoped_release release;
  std::fill_n(tiles.data() + (count - 1) * tile, tile, uint8_t{0});
  if (format.bits == 16)
    std::copy_n(codes.data(), rows * width, tiles.data());
  else if (format.two_levels())
    tile_two_level(runner.pool(), format, groups, rows, codes.data(), scales.data(), tiles.data());
  else
    interleave_rows(runner.pool(), format, groups, 0, rows,
                    {codes.data(), scales.data(), biases.data(), width, wide, format.has_biases() ? wide : 0},
                    tiles.data(), tile);
}

void split_tiles(const FormatArg& stored, const Bytes2& tiles, const CArray<uint8_t, 2>& high,
                 const CArray<uint8_t, 2>& low) {
  const RowFormat format = tile_format_of(stored);
  require(low_plane_bits_of(format.bits) > 0, "codes of this format aren't divided");
  const int64_t count = tiles.shape(0), bytes = tiles.shape(1);
  // A tile of as many columns as share a header, or a scale, divides all tiles of the format.
  const int64_t least = format.two_levels() ? kSuperGroup : 1, unit = kTile * format.row_bytes(least);
  require(count > 0 && bytes > 0 && bytes % unit == 0, "tiles are those of whole blocks");
  const int64_t groups = bytes / unit * least;
  require(static_cast<int64_t>(high.shape(0)) == count && static_cast<int64_t>(low.shape(0)) == count &&
              static_cast<int64_t>(high.shape(1)) == high_tile_bytes(format, groups) &&
              static_cast<int64_t>(low.shape(1)) == low_tile_bytes(format, groups),
          "planes are (tiles, bytes of a tile's plane)");
  nb::gil_scoped_release release;
  for (int64_t tile = 0; tile < count; ++tile)
    split_tile(format, groups, tiles.data() + tile * bytes, high.data() + tile * high.shape(1),
               low.data() + tile * low.shape(1));
}

}  // namespace

void bind_expert(nb::module_& m) {
  nb::class_<Expert>(m, "Expert")
      .def("__init__", &make, nb::arg("hidden"), nb::arg("neurons"), nb::arg("gate"), nb::arg("up").none(),
           nb::arg("down"), nb::arg("planes") = std::vector<PlanePlace>())
      .def_prop_ro("record_bytes", &Expert::record_bytes)
      .def("join", &join, nb::arg("runner"), nb::arg("high"), nb::arg("low"), nb::arg("record"))
      .def("forward", &forward, nb::arg("runner"), nb::arg("x"), nb::arg("address"), nb::arg("form"),
           nb::arg("out"));
  nb::class_<RouterForm>(m, "Router")
      .def(
          "__init__",
          [](RouterForm* self, int scoring, int64_t experts, int64_t chosen, bool renormalised, double factor,
             int64_t groups, int64_t chosen_groups, double jitter, int64_t group_best) {
            new (self) RouterForm(router_form(scoring, experts, chosen, renormalised, factor, groups,
                                              chosen_groups, jitter, group_best));
          },
          nb::arg("scoring"), nb::arg("experts"), nb::arg("chosen"), nb::arg("renormalised"),
          nb::arg("factor"), nb::arg("groups"), nb::arg("chosen_groups"), nb::arg("jitter"),
          nb::arg("group_best") = 2)
      .def("route", &route, nb::arg("logits"), nb::arg("choice_bias").none(), nb::arg("scales").none(),
           nb::arg("ids"), nb::arg("weights"));
  nb::class_<ReuseScores>(m, "ReuseScores")
      .def("__init__", &make_scores, nb::arg("experts"), nb::arg("chosen"), nb::arg("remembered"),
           nb::arg("similar"), nb::arg("slow_decay"), nb::arg("fast_decay"), nb::arg("fast_weight"),
           nb::arg("fade"), nb::arg("sharpness"), nb::arg("ahead"))
      .def("observe", &observe, nb::arg("gates"), nb::arg("slow"), nb::arg("fast"), nb::arg("scores"),
           nb::arg("past"), nb::arg("seen"), nb::arg("alike"));
  m.def("worth_least", &least, nb::arg("slots"), nb::arg("worth"), nb::arg("first"), nb::arg("keep"),
        nb::arg("count"));
  // What a pass points into has to stay: the runner, the layer, x and the total. It copies what was chosen.
  nb::class_<ExpertPass>(m, "ExpertPass")
      .def("__init__", &begin, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 11>(), nb::arg("runner"), nb::arg("layer"),
           nb::arg("expert").none(), nb::arg("neurons"), nb::arg("x"), nb::arg("ids"), nb::arg("weights"),
           nb::arg("form"), nb::arg("in_order"), nb::arg("total"))
      .def("add", &add, nb::arg("expert"), nb::arg("address"))
      .def("finish", [](ExpertPass& pass) {
        nb::gil_scoped_release release;
        pass.finish();
      });
  // It points into the runner, the slice and its bias.
  nb::class_<SlicePass>(m, "SlicePass")
      .def("__init__", &begin_slices, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 7>(),
           nb::arg("runner"), nb::arg("slice"), nb::arg("x"), nb::arg("form"),
           nb::arg("norm").none() = nb::none(), nb::arg("bias").none() = nb::none())
      .def("add", &add_slices, nb::arg("records"), nb::arg("tokens").none(), nb::arg("out"),
           nb::arg("base").none() = nb::none())
      .def("add_planes", &add_planes, nb::arg("planes"), nb::arg("tokens").none(), nb::arg("out"),
           nb::arg("base").none() = nb::none());
  m.def("split_tiles", &split_tiles, nb::arg("stored"), nb::arg("tiles"), nb::arg("high"), nb::arg("low"));
  m.def("tile_rows", &tile_rows, nb::arg("runner"), nb::arg("stored"), nb::arg("codes"), nb::arg("scales"),
        nb::arg("biases"), nb::arg("tiles"));
}

}  // namespace ondevice
