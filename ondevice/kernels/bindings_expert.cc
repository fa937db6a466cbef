#include <algorithm>

#include "bindings.h"
#include "expert.h"
#include "matrix.h"

namespace ondevice {
namespace {

// A matrix's format, its first byte in a record, and that of its biases, if it has any.
using Place = std::tuple<FormatArg, int64_t, std::optional<int64_t>>;

RecordMatrix matrix_of(const Place& place, int64_t rows, int64_t cols) {
  const auto& [stored, offset, bias] = place;
  const RecordMatrix matrix{format_of(stored), rows, cols, offset, bias.value_or(-1)};
  require(offset >= 0 && offset % 64 == 0, "a matrix begins at a multiple of 64 bytes");
  require(!bias || (*bias >= 0 && *bias % static_cast<int64_t>(sizeof(float)) == 0),
          "biases begin at a multiple of 4 bytes");
  return matrix;
}

void make(Expert* self, int64_t hidden, int64_t neurons, const Place& gate, const std::optional<Place>& up,
          const Place& down) {
  require(hidden > 0 && neurons > 0, "hidden and neurons must be positive");
  const RecordMatrix gates = matrix_of(gate, neurons, hidden);
  std::optional<RecordMatrix> ups;
  if (up) {
    ups = matrix_of(*up, neurons, hidden);
    require(ups->format == gates.format, "gate and up have one format");
  }
  new (self) Expert(gates, ups, matrix_of(down, hidden, neurons));
}

void forward(const Expert& expert, Runner& runner, const Rows& x, uint64_t address, const FormArg& form,
             const CArray<float, 2>& out) {
  const int64_t tokens = rows_of(x, expert.hidden());
  const GateForm gates = form_of(form);
  require(address != 0 && address % 64 == 0, "a record begins at a multiple of 64 bytes");
  require(
      static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == expert.hidden(),
      "out is (T, hidden)");
  nb::gil_scoped_release release;
  expert.forward(runner, reinterpret_cast<const uint8_t*>(address), x.data(), x.stride(0), tokens, gates,
                 out.data());
}

using Bytes2 = CArray<const uint8_t, 2>;

void tile_rows(Runner& runner, const FormatArg& stored, const Bytes2& codes, const Bytes2& scales,
               const Bytes2& biases, const CArray<uint8_t, 1>& tiles) {
  const RowFormat format = format_of(stored);
  const int64_t rows = codes.shape(0), width = codes.shape(1), groups = width / format.codes_bytes();
  require(rows > 0 && groups > 0 && width == groups * format.codes_bytes(),
          "codes are (R, padded_cols * bits / 8)");
  const int64_t wide = format.bits == 16 ? 0 : groups * format.scales() * format.scale_bytes();
  for (const Bytes2* values : {&scales, format.has_biases() ? &biases : &scales})
    require(static_cast<int64_t>(values->shape(0)) == rows && static_cast<int64_t>(values->shape(1)) == wide,
            "scales and biases are the bytes of (R, G)");
  const int64_t tile = kTile * format.row_bytes(groups), count = (rows + kTile - 1) / kTile;
  require(static_cast<int64_t>(tiles.shape(0)) == count * tile, "tiles have 16 rows each");
  nb::gil_scoped_release release;
  std::fill_n(tiles.data() + (count - 1) * tile, tile, uint8_t{0});
  if (format.bits == 16)
    std::copy_n(codes.data(), rows * width, tiles.data());
  else
    interleave_rows(runner.pool(), format, groups, 0, rows,
                    {codes.data(), scales.data(), biases.data(), width, wide, format.has_biases() ? wide : 0},
                    tiles.data(), tile);
}

}  // namespace

void bind_expert(nb::module_& m) {
  nb::class_<Expert>(m, "Expert")
      .def("__init__", &make, nb::arg("hidden"), nb::arg("neurons"), nb::arg("gate"), nb::arg("up").none(),
           nb::arg("down"))
      .def_prop_ro("record_bytes", &Expert::record_bytes)
      .def("forward", &forward, nb::arg("runner"), nb::arg("x"), nb::arg("address"), nb::arg("form"),
           nb::arg("out"));
  m.def("tile_rows", &tile_rows, nb::arg("runner"), nb::arg("stored"), nb::arg("codes"), nb::arg("scales"),
        nb::arg("biases"), nb::arg("tiles"));
}

}  // namespace ondevice
