#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "layers.h"

namespace ondevice {
namespace {

using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
using Halves2 = nb::ndarray<const uint16_t, nb::ndim<2>, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Added = std::optional<CArray<const float, 2>>;  // has the shape of what it is added to

int64_t rows_of(const Rows& x, int64_t cols) {
  require(static_cast<int64_t>(x.shape(1)) == cols && (x.stride(1) == 1 || cols == 1),
          "x is (T, cols) floats");
  require(x.shape(0) > 0, "x has no rows");
  return static_cast<int64_t>(x.shape(0));
}

const float* added_to(const CArray<float, 2>& out, const Added& added) {
  if (!added) return nullptr;
  require(added->shape(0) == out.shape(0) && added->shape(1) == out.shape(1), "added has the shape of out");
  return added->data();
}

// The same where out has a feed-forward's outputs.
const float* added_to(const CArray<float, 2>& out, const FeedForward& layer, int64_t tokens,
                      const Added& added) {
  require(
      static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == layer.hidden(),
      "out is (T, hidden)");
  return added_to(out, added);
}

void check_bits(int bits) { require(bits == 4 || bits == 8 || bits == 16, "bits must be 4, 8 or 16"); }

void load_rows(Matrix& matrix, Engine& engine, int64_t row0, const Bytes2& codes, const Halves2& scales,
               const Halves2& biases) {
  const int64_t n = codes.shape(0), groups = matrix.bits() == 16 ? 0 : matrix.groups();
  require(row0 >= 0 && n > 0 && row0 + n <= matrix.rows(), "rows are outside the matrix");
  require(static_cast<int64_t>(codes.shape(1)) == matrix.groups() * kGroup * matrix.bits() / 8 &&
              codes.stride(1) == 1,
          "codes are (n, padded_cols * bits / 8)");
  if (groups)
    for (const Halves2* values : {&scales, &biases})
      require(static_cast<int64_t>(values->shape(0)) == n &&
                  static_cast<int64_t>(values->shape(1)) == groups && (values->stride(1) == 1 || groups == 1),
              "scales and biases are (n, G)");
  const StoredRows rows{codes.data(),
                        reinterpret_cast<const uint8_t*>(scales.data()),
                        reinterpret_cast<const uint8_t*>(biases.data()),
                        codes.stride(0),
                        groups ? scales.stride(0) * 2 : 0,
                        groups ? biases.stride(0) * 2 : 0};
  nb::gil_scoped_release release;
  matrix.load_rows(engine, row0, n, rows);
}

void pack(FeedForward& layer, Engine& engine, Segment& segment, int64_t blocks, int64_t block0,
          const CArray<const uint8_t, 2>& records) {
  const int64_t count = records.shape(0);
  require(static_cast<int64_t>(records.shape(1)) == layer.stride(), "records are (n, stride)");
  require(blocks > 0 && layer.segment_bytes(blocks) <= segment.nbytes(), "the segment is too small");
  require(count > 0 && block0 >= 0 && block0 + (count + kGroup - 1) / kGroup <= blocks,
          "records are outside the segment");
  layer.shape(segment, blocks);
  nb::gil_scoped_release release;
  layer.pack(engine, segment, block0, records.data(), count);
}

void check_pass(int64_t tokens, int activation) {
  require(tokens > 0 && activation >= 0 && activation <= 4, "tokens or activation is out of range");
}

void forward(const FeedForward& layer, Engine& engine, const Rows& x,
             const std::vector<const Segment*>& segments, int activation, const CArray<float, 2>& out,
             const Weight& norm, float eps, const Added& added) {
  const int64_t tokens = rows_of(x, layer.hidden());
  check_pass(tokens, activation);
  const Norm norms = norm_of(norm, eps, layer.hidden());
  const float* base = added_to(out, layer, tokens, added);
  nb::gil_scoped_release release;
  layer.forward(engine, segments, x.data(), x.stride(0), tokens, static_cast<Activation>(activation),
                out.data(), norms, base);
}

int64_t forward_selected(const FeedForward& layer, Engine& engine, const Rows& x, const Matrix& scorer,
                         const Weight& bias, const Matrix* narrow, const CArray<const int32_t, 1>& slots,
                         const CArray<const uint64_t, 1>& addresses, bool whole, int activation,
                         const CArray<float, 2>& out, const Weight& norm, float eps, const Added& added) {
  const int64_t tokens = rows_of(x, layer.hidden()), neurons = scorer.rows();
  check_pass(tokens, activation);
  require((narrow ? narrow->cols() : scorer.cols()) == layer.hidden() &&
              (!narrow || scorer.cols() == narrow->rows()),
          "matrices don't follow each other, from x on");
  require(!bias || static_cast<int64_t>(bias->shape(0)) == neurons, "bias is (rows,)");
  require(static_cast<int64_t>(slots.shape(0)) == neurons, "slots are (F,)");
  int32_t lowest = 0, highest = -1;
  for (int64_t i = 0; i < neurons; ++i) {
    lowest = std::min(lowest, slots.data()[i]);
    highest = std::max(highest, slots.data()[i]);
  }
  require(lowest >= 0 && highest < static_cast<int64_t>(addresses.shape(0)), "a neuron has no slot");
  const Norm norms = norm_of(norm, eps, layer.hidden());
  const float* base = added_to(out, layer, tokens, added);
  const Placed placed{slots.data(), reinterpret_cast<const uint8_t* const*>(addresses.data()), whole};
  nb::gil_scoped_release release;
  return layer.forward_selected(engine, {scorer, bias ? bias->data() : nullptr, narrow}, placed, x.data(),
                                x.stride(0), tokens, static_cast<Activation>(activation), out.data(), norms,
                                base);
}

}  // namespace

void bind_layers(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, int64_t rows, int64_t cols, int bits) {
             check_bits(bits);
             require(rows > 0 && cols > 0, "rows and cols must be positive");
             new (self) Matrix(rows, cols, bits);
           })
      .def_prop_ro("nbytes", &Matrix::nbytes)
      .def_prop_ro("rows", &Matrix::rows)
      .def_prop_ro("cols", &Matrix::cols)
      .def("load_rows", &load_rows, nb::arg("engine"), nb::arg("row0"), nb::arg("codes"), nb::arg("scales"),
           nb::arg("biases"))
      .def(
          "forward",
          [](const Matrix& matrix, Engine& engine, const Rows& x,
             const std::optional<CArray<const float, 1>>& bias, const CArray<float, 2>& out,
             const Weight& norm, float eps, const Added& added) {
            const int64_t tokens = rows_of(x, matrix.cols());
            require(static_cast<int64_t>(out.shape(0)) == tokens &&
                        static_cast<int64_t>(out.shape(1)) == matrix.rows(),
                    "out is (T, rows)");
            require(!bias || static_cast<int64_t>(bias->shape(0)) == matrix.rows(), "bias is (rows,)");
            const Norm norms = norm_of(norm, eps, matrix.cols());
            const float* base = added_to(out, added);
            nb::gil_scoped_release release;
            matrix.forward(engine, x.data(), x.stride(0), tokens, bias ? bias->data() : nullptr, out.data(),
                           norms, base);
          },
          nb::arg("engine"), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"),
          nb::arg("norm").none() = nb::none(), nb::arg("eps") = 0.0f, nb::arg("added").none() = nb::none());

  m.def(
      "select",
      [](const CArray<const float, 2>& scores, const CArray<int32_t, 1>& ids) {
        const int64_t tokens = scores.shape(0), neurons = scores.shape(1);
        require(static_cast<int64_t>(ids.shape(0)) >= neurons, "ids has room for every column");
        nb::gil_scoped_release release;
        return select(scores.data(), tokens, neurons, ids.data());
      },
      nb::arg("scores"), nb::arg("ids"));

  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def("__init__",
           [](Segment* self, int64_t nbytes) {
             require(nbytes > 0, "a segment needs bytes");
             nb::gil_scoped_release release;
             new (self) Segment(nbytes);
           })
      .def_prop_ro("nbytes", &Segment::nbytes);

  nb::class_<FeedForward>(m, "FeedForward")
      .def("__init__",
           [](FeedForward* self, int64_t hidden, int bits, int64_t stride, int64_t gate, int64_t up,
              int64_t down) {
             check_bits(bits);
             require(hidden > 0, "hidden must be positive");
             const int64_t groups = (hidden + kGroup - 1) / kGroup;
             const int64_t row = groups * kGroup * bits / 8 + (bits == 16 ? 0 : 4 * groups);
             for (const int64_t offset : {gate, up, down})
               require(offset >= 0 && offset + row <= stride, "a row lies outside the record");
             new (self) FeedForward(hidden, bits, {stride, gate, up, down});
           })
      .def("segment_bytes", &FeedForward::segment_bytes, nb::arg("blocks"))
      .def("pack", &pack, nb::arg("engine"), nb::arg("segment"), nb::arg("blocks"), nb::arg("block0"),
           nb::arg("records"))
      .def("forward", &forward, nb::arg("engine"), nb::arg("x"), nb::arg("segments"), nb::arg("activation"),
           nb::arg("out"), nb::arg("norm").none() = nb::none(), nb::arg("eps") = 0.0f,
           nb::arg("added").none() = nb::none())
      .def("forward_selected", &forward_selected, nb::arg("engine"), nb::arg("x"), nb::arg("scorer"),
           nb::arg("bias").none(), nb::arg("narrow").none(), nb::arg("slots"), nb::arg("addresses"),
           nb::arg("whole"), nb::arg("activation"), nb::arg("out"), nb::arg("norm").none() = nb::none(),
           nb::arg("eps") = 0.0f, nb::arg("added").none() = nb::none())
      .def(
          "begin",
          [](const FeedForward& layer, Engine& engine, const Rows& x, const Weight& norm, float eps) {
            const int64_t tokens = rows_of(x, layer.hidden());
            const Norm norms = norm_of(norm, eps, layer.hidden());
            nb::gil_scoped_release release;
            layer.begin(engine, x.data(), x.stride(0), tokens, norms);
          },
          nb::arg("engine"), nb::arg("x"), nb::arg("norm").none() = nb::none(), nb::arg("eps") = 0.0f)
      .def(
          "add",
          [](const FeedForward& layer, Engine& engine, const std::vector<const Segment*>& segments,
             int64_t tokens, int activation) {
            check_pass(tokens, activation);
            nb::gil_scoped_release release;
            layer.add(engine, segments, tokens, static_cast<Activation>(activation));
          },
          nb::arg("engine"), nb::arg("segments"), nb::arg("tokens"), nb::arg("activation"))
      .def(
          "add_gathered",
          [](const FeedForward& layer, Engine& engine, const CArray<const int32_t, 1>& ids,
             const CArray<const uint64_t, 1>& parts, bool whole, const CArray<const float, 2>& scores,
             int activation) {
            const int64_t count = ids.shape(0), tokens = scores.shape(0), neurons = scores.shape(1);
            require(parts.shape(0) == ids.shape(0), "ids and parts are (n,)");
            check_pass(tokens, activation);
            for (int64_t k = 0; k < count; ++k)
              require(ids.data()[k] >= 0 && ids.data()[k] < neurons &&
                          (k == 0 || ids.data()[k] > ids.data()[k - 1]),
                      "ids ascend, from 0 to below the number of scores");
            nb::gil_scoped_release release;
            layer.add_gathered(engine,
                               {ids.data(), reinterpret_cast<const uint8_t* const*>(parts.data()), count,
                                whole, scores.data(), neurons},
                               tokens, static_cast<Activation>(activation));
          },
          nb::arg("engine"), nb::arg("ids"), nb::arg("parts"), nb::arg("whole"), nb::arg("scores"),
          nb::arg("activation"))
      .def(
          "finish",
          [](const FeedForward& layer, Engine& engine, const CArray<float, 2>& out, const Added& added) {
            const int64_t tokens = out.shape(0);
            const float* base = added_to(out, layer, tokens, added);
            nb::gil_scoped_release release;
            layer.finish(engine, tokens, out.data(), base);
          },
          nb::arg("engine"), nb::arg("out"), nb::arg("added").none() = nb::none());
}

}  // namespace ondevice
