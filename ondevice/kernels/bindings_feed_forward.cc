#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "feed_forward.h"
#include "feed_forward_pass.h"

namespace ondevice {
namespace {

// added_to where `out` holds a feed-forward's outputs.
const float* added_to(const CArray<float, 2>& out, const FeedForward& layer, int64_t tokens,
                      const Added& added) {
  require(
      static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == layer.hidden(),
      "out is (T, hidden)");
  return ondevice::added_to(out, added);
}

void pack(const FeedForward& layer, Runner& runner, Segment& segment, int64_t blocks, int64_t block0,
          const CArray<const uint8_t, 2>& records) {
  const int64_t count = records.shape(0);
  require(static_cast<int64_t>(records.shape(1)) == layer.record().stride, "records are (n, stride)");
  require(blocks > 0 && layer.segment_bytes(blocks) <= segment.nbytes(), "the segment is too small");
  require(count > 0 && block0 >= 0 && block0 + (count + kGroup - 1) / kGroup <= blocks,
          "records are outside the segment");
  segment.lay_out(blocks);
  const NativeCall call(runner);
  layer.pack(runner, segment, block0, records.data(), count);
}

void forward(const FeedForward& layer, Runner& runner, const Rows& x,
             const std::vector<const Segment*>& segments, const FormArg& form, const CArray<float, 2>& out,
             const NormArg& norm, const Added& added) {
  const int64_t tokens = rows_of(x, layer.hidden());
  const GateForm gates = form_of(form);
  const Norm norms = norm_of(norm, layer.hidden());
  const float* base = added_to(out, layer, tokens, added);
  const NativeCall call(runner);
  layer.forward(runner, segments, x.data(), x.stride(0), tokens, gates, out.data(), norms, base);
}

int64_t forward_selected(const FeedForward& layer, Runner& runner, const Rows& x, const Matrix& scorer,
                         const Weight& bias, const Matrix* low_rank, const CArray<const int32_t, 1>& slots,
                         const CArray<const uint64_t, 1>& addresses, bool whole, const FormArg& form,
                         const CArray<float, 2>& out, const NormArg& norm, const Added& added) {
  const int64_t tokens = rows_of(x, layer.hidden()), neurons = scorer.rows();
  const GateForm gates = form_of(form);
  require((low_rank ? low_rank->cols() : scorer.cols()) == layer.hidden() &&
              (!low_rank || scorer.cols() == low_rank->rows()),
          "matrices don't follow each other, from x on");
  require(!bias || static_cast<int64_t>(bias->shape(0)) == neurons, "bias is (rows,)");
  require(static_cast<int64_t>(slots.shape(0)) == neurons, "slots are (F,)");
  int32_t lowest = 0, highest = -1;
  for (int64_t i = 0; i < neurons; ++i) {
    lowest = std::min(lowest, slots.data()[i]);
    highest = std::max(highest, slots.data()[i]);
  }
  require(lowest >= 0 && highest < static_cast<int64_t>(addresses.shape(0)), "a neuron has no slot");
  const Norm norms = norm_of(norm, layer.hidden());
  const float* base = added_to(out, layer, tokens, added);
  const ResidentRecords resident{slots.data(), reinterpret_cast<const uint8_t* const*>(addresses.data()),
                                 whole};
  const NativeCall call(runner);
  return layer.forward_selected(runner, {scorer, bias ? bias->data() : nullptr, low_rank}, resident, x.data(),
                                x.stride(0), tokens, gates, out.data(), norms, base);
}

void forward_records(const FeedForward& layer, Runner& runner, const Rows& x, uint64_t address, int64_t count,
                     const FormArg& form, const CArray<float, 2>& out) {
  const int64_t tokens = rows_of(x, layer.hidden());
  const GateForm gates = form_of(form);
  require(address != 0 && count > 0 && count < (int64_t{1} << 31), "records have an address and a number");
  require(!layer.bias(), "experts have no biases");
  added_to(out, layer, tokens, {});
  const NativeCall call(runner);
  layer.forward_records(runner, reinterpret_cast<const uint8_t*>(address), count, x.data(), x.stride(0),
                        tokens, gates, out.data());
}

void begin(FeedForwardPass* self, Runner& runner, const FeedForward& layer, const Rows& x,
           const FormArg& form, const NormArg& norm) {
  const int64_t tokens = rows_of(x, layer.hidden());
  const GateForm gates = form_of(form);
  const Norm norms = norm_of(norm, layer.hidden());
  const NativeCall call(runner);
  const InputRows rows = runner.prepare(x.data(), x.stride(0), tokens, layer.hidden(), layer.format(), norms);
  new (self) FeedForwardPass(runner, layer, rows, gates);
}

void check_valid(const FeedForwardPass& pass) {
  require(pass.valid(), "the pass is finished, or another op has used the runner since it began");
}

void add(FeedForwardPass& pass, const std::vector<const Segment*>& segments, std::optional<int64_t> tokens,
         const std::optional<CArray<const float, 2>>& gates) {
  check_valid(pass);
  const int64_t first = tokens.value_or(pass.tokens());
  require(first >= 1 && first <= pass.tokens(), "tokens are from 1 to those of the pass");
  int64_t neurons = pass.added();
  for (const Segment* segment : segments) neurons += segment->blocks() * kGroup;
  require(!pass.layer().bias() || neurons <= pass.layer().biases(), "more neurons than biases");
  GivenGates given;
  if (gates) {
    require(static_cast<int64_t>(gates->shape(0)) == pass.tokens(), "gates are (T, neurons)");
    require(neurons < static_cast<int64_t>(gates->shape(1)) + kGroup, "more neurons than gates");
    given = {gates->data(), static_cast<int64_t>(gates->shape(1))};
  }
  nb::gil_scoped_release release;
  pass.add(segments, first, given);
}

void add_selected(FeedForwardPass& pass, const CArray<const int32_t, 1>& ids,
                  const CArray<const uint64_t, 1>& parts, bool whole, const CArray<const float, 2>& scores) {
  check_valid(pass);
  const int64_t count = ids.shape(0), neurons = scores.shape(1);
  require(parts.shape(0) == ids.shape(0), "ids and parts are (n,)");
  require(static_cast<int64_t>(scores.shape(0)) == pass.tokens(), "scores are (T, neurons)");
  require(!pass.layer().bias() || neurons <= pass.layer().biases(), "more neurons than biases");
  for (int64_t k = 0; k < count; ++k)
    require(ids.data()[k] >= 0 && ids.data()[k] < neurons && (k == 0 || ids.data()[k] > ids.data()[k - 1]),
            "ids ascend, from 0 to below the number of scores");
  nb::gil_scoped_release release;
  pass.add_selected({ids.data(), reinterpret_cast<const uint8_t* const*>(parts.data()), count, whole,
                     scores.data(), neurons});
}

void finish(FeedForwardPass& pass, const CArray<float, 2>& out, const Added& added) {
  check_valid(pass);
  const float* base = added_to(out, pass.layer(), pass.tokens(), added);
  nb::gil_scoped_release release;
  pass.finish(out.data(), base);
}

}  // namespace

void bind_feed_forward(nb::module_& m) {
  m.def(
      "select",
      [](const CArray<const float, 2>& scores, const CArray<int32_t, 1>& ids) {
        const int64_t tokens = scores.shape(0), neurons = scores.shape(1);
        require(static_cast<int64_t>(ids.shape(0)) >= neurons, "ids has room for every column");
        nb::gil_scoped_release release;
        return select(scores.data(), tokens, neurons, 0.0f, ids.data());
      },
      nb::arg("scores"), nb::arg("ids"));

  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def("__init__", [](Segment* self, int64_t nbytes) {
        require(nbytes > 0, "a segment needs bytes");
        nb::gil_scoped_release release;
        new (self) Segment(nbytes);
      });

  nb::class_<FeedForward>(m, "FeedForward")
      .def(
          "__init__",
          [](FeedForward* self, int64_t hidden, const FormatArg& rows, int64_t stride, int64_t gate,
             std::optional<int64_t> second, int64_t down, const Weight& bias) {
            const RowFormat format = format_of(rows);
            require(hidden > 0, "hidden must be positive");
            const int64_t row = format.row_bytes(groups_of(hidden));
            const int64_t down_row = RowFormat(format.bits).row_bytes(groups_of(hidden));
            const int64_t up = second.value_or(down), up_row = second ? row : down_row;
            require(gate >= 0 && gate + row <= stride && up >= 0 && up + up_row <= stride && down >= 0 &&
                        down + down_row <= stride,
                    "a row lies outside the record");
            require(!second || up != down, "up and down are two rows");
            require(!bias || !second, "only gates without an up projection have a bias");
            new (self) FeedForward(hidden, format, {stride, gate, up, down}, bias ? bias->data() : nullptr,
                                   bias ? static_cast<int64_t>(bias->shape(0)) : 0);
          },
          nb::arg("hidden"), nb::arg("rows"), nb::arg("stride"), nb::arg("gate"), nb::arg("up").none(),
          nb::arg("down"), nb::arg("bias").none() = nb::none())
      .def("segment_bytes", &FeedForward::segment_bytes, nb::arg("blocks"))
      .def("pack", &pack, nb::arg("runner"), nb::arg("segment"), nb::arg("blocks"), nb::arg("block0"),
           nb::arg("records"))
      .def("forward", &forward, nb::arg("runner"), nb::arg("x"), nb::arg("segments"), nb::arg("form"),
           nb::arg("out"), nb::arg("norm").none() = nb::none(), nb::arg("added").none() = nb::none())
      .def("forward_selected", &forward_selected, nb::arg("runner"), nb::arg("x"), nb::arg("scorer"),
           nb::arg("bias").none(), nb::arg("low_rank").none(), nb::arg("slots"), nb::arg("addresses"),
           nb::arg("whole"), nb::arg("form"), nb::arg("out"), nb::arg("norm").none() = nb::none(),
           nb::arg("added").none() = nb::none())
      .def("forward_records", &forward_records, nb::arg("runner"), nb::arg("x"), nb::arg("address"),
           nb::arg("count"), nb::arg("form"), nb::arg("out"));

  nb::class_<FeedForwardPass>(m, "FeedForwardPass")
      .def("__init__", &begin, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg("runner"),
           nb::arg("layer"), nb::arg("x"), nb::arg("form"), nb::arg("norm").none() = nb::none())
      .def("add", &add, nb::arg("segments"), nb::arg("tokens").none() = nb::none(),
           nb::arg("gates").none() = nb::none())
      .def("add_selected", &add_selected, nb::arg("ids"), nb::arg("parts"), nb::arg("whole"),
           nb::arg("scores"))
      .def("finish", &finish, nb::arg("out"), nb::arg("added").none() = nb::none());
}

}  // namespace ondevice
