
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings.h"
#include "error_feedback.h"
#include "matrix.h"
#include "quantize_rows.h"
#include "tile_lane.h"

namespace ondevice {
namespace {

using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

void load_rows(Matrix& matrix, Runner& runner, int64_t row0, const Bytes2& codes, const Bytes2& scales,
               const Bytes2& biases) {
  const RowFormat& format = matrix.format();
  require(matrix.sections() == 1 && !format.two_levels(),
          "rows of several sections, or with two levels of scales, are loaded as tiles");
  const int64_t n = codes.shape(0), groups = format.bits == 16 ? 0 : matrix.groups() * format.scales();
  require(row0 >= 0 && n > 0 && row0 + n <= matrix.rows(), "rows are outside the matrix");
  require(
      static_cast<int64_t>(codes.shape(1)) == matrix.groups() * format.codes_bytes() && codes.stride(1) == 1,
      "codes are (n, padded_cols * bits / 8)");
  if (groups)
    for (const Bytes2* values : {&scales, format.has_biases() ? &biases : &scales})
      require(static_cast<int64_t>(values->shape(0)) == n &&
                  static_cast<int64_t>(values->shape(1)) == groups * format.scale_bytes() &&
                  values->stride(1) == 1,
              "scales and biases are the bytes of (n, G)");
  const StoredRows rows{codes.data(),
                        scales.data(),
                        biases.data(),
                        codes.stride(0),
                        groups ? scales.stride(0) : 0,
                        groups && format.has_biases() ? biases.stride(0) : 0};
  nb::gil_scoped_release release;
  matrix.load_rows(runner, row0, n, rows);
}

void make(Matrix* self, const std::vector<std::pair<int64_t, FormatArg>>& sections, int64_t cols) {
  require(!sections.empty() && cols > 0, "a matrix has sections and columns");
  std::vector<Section> made;
  for (const auto& [rows, stored] : sections) {
    require(rows > 0, "rows must be positive");
    made.push_back({rows, tile_format_of(stored)});
    check_columns(made.back().format, cols);
  }
  // Its pages are made here, which takes as long as reading them.
  nb::gil_scoped_release release;
  new (self) Matrix(made, cols);
}

void load_tiles(Matrix& matrix, int64_t section, int64_t first, const Bytes2& tiles) {
  require(section >= 0 && section < matrix.sections(), "the matrix has no such section");
  const int64_t n = tiles.shape(0), most = matrix.section(section).tiles();
  require(first >= 0 && first <= most && n > 0 && n <= most - first, "tiles are outside the section");
  require(static_cast<int64_t>(tiles.shape(1)) == matrix.tile_bytes(section) && tiles.stride(1) == 1,
          "tiles are (n, bytes of 16 rows)");
  nb::gil_scoped_release release;
  matrix.load_tiles(section, first, n, tiles.data(), tiles.stride(0));
}

using Matrices = std::vector<const Matrix*>;  // rows of the first, then of the second, and so on

constexpr int64_t kFewRows = 16;  // a token's, or a draft's
bool look_up(Runner& runner, const Matrices& matrices, int64_t unit, const CArray<const int32_t, 1>& rows,
             const CArray<float, 2>& out) {
  const int64_t count = rows.shape(0), cols = out.shape(1);
  require(unit > 0 && static_cast<int64_t>(out.shape(0)) == count, "out is (n, padded_cols)");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = rows.data()[i], index = row / unit;
    require(row >= 0 && index < static_cast<int64_t>(matrices.size()), "rows are outside the matrices");
    const Matrix* matrix = matrices[static_cast<size_t>(index)];
    if (!matrix) return false;
    require(matrix->sections() == 1 && matrix->groups() * kGroup == cols && row % unit < matrix->rows(),
            "rows are looked up in matrices of one section, with padded_cols columns");
  }
  // A few rows take less time than the interpreter's next thread would keep it.
  std::optional<nb::gil_scoped_release> release;
  if (count > kFewRows) release.emplace();
  const Timed timed(runner.times(), Step::kRest);
  for (int64_t i = 0; i < count; ++i)
    matrices[static_cast<size_t>(rows.data()[i] / unit)]->look_up(runner.kernels(), rows.data()[i] % unit,
                                                                  out.data() + i * cols);
  return true;
}

void forward_stacked(Runner& runner, const Matrices& matrices, const Rows& x, const CArray<float, 2>& out,
                     int64_t column, const NormArg& norm) {
  require(!matrices.empty(), "there is a matrix");
  const Matrix& first = *matrices.front();
  const int64_t tokens = rows_of(x, first.cols()), width = out.shape(1);
  int64_t end = column;
  for (const Matrix* matrix : matrices) {
    const bool is_last = matrix == matrices.back();
    require(matrix->sections() == 1 && matrix->format() == first.format() && matrix->cols() == first.cols() &&
                (is_last ? matrix->rows() <= first.rows()
                         : matrix->rows() == first.rows() && first.rows() % kTile == 0),
            "matrices have one section of one format, and as many rows, but for the last");
    end += matrix->rows();
  }
  require(static_cast<int64_t>(out.shape(0)) == tokens && column >= 0 && end <= width,
          "out is (T, rows of all matrices, or more)");
  const Norm norms = norm_of(norm, first.cols());
  const NativeCall call(runner);
  Matrix::forward_stacked(runner, matrices, x.data(), x.stride(0), tokens, out.data() + column, width, norms);
}

void dequantize_lanes(Runner& runner, const FormatArg& stored, const Bytes2& tiles,
                      const CArray<const int32_t, 1>& lanes, int64_t cols, const CArray<float, 2>& out) {
  const RowFormat format = tile_format_of(stored);
  check_columns(format, cols);
  const int64_t groups = groups_of(cols), count = lanes.shape(0);
  require(cols > 0 && static_cast<int64_t>(tiles.shape(0)) == count && tiles.stride(1) == 1 &&
              static_cast<int64_t>(tiles.shape(1)) >= kTile * format.row_bytes(groups),
          "a tile of 16 rows for each lane");
  require(
      static_cast<int64_t>(out.shape(0)) == count && static_cast<int64_t>(out.shape(1)) == groups * kGroup,
      "out is (n, padded_cols)");
  for (int64_t i = 0; i < count; ++i)
    require(lanes.data()[i] >= 0 && lanes.data()[i] < kTile, "lanes are from 0 to 15");
  const NativeCall call(runner);
  for (int64_t i = 0; i < count; ++i)
    dequantize_lane(runner.kernels(), format, tiles.data() + i * tiles.stride(0), lanes.data()[i], groups,
                    out.data() + i * groups * kGroup);
}

using Source = nb::ndarray<nb::ndim<2>, nb::device::cpu>;  // float32, float16, or bfloat16 as uint16

SourceRows source_rows(const Source& x) {
  const SourceRows rows{static_cast<const uint8_t*>(x.data()), SourceType::kFloat, x.stride(0), x.stride(1)};
  if (x.dtype() == nb::dtype<float>()) return rows;
  if (x.dtype() == nb::dtype<uint16_t>())
    return {rows.data, SourceType::kBfloat, rows.row_stride, rows.col_stride};
  const nb::dlpack::dtype half{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  require(x.dtype() == half, "x is float32, float16, or bfloat16 as uint16");
  return {rows.data, SourceType::kHalf, rows.row_stride, rows.col_stride};
}

void bind_quantisation(nb::module_& m) {
  m.def("dequantize_lanes", &dequantize_lanes, nb::arg("runner"), nb::arg("stored"), nb::arg("tiles"),
        nb::arg("lanes"), nb::arg("cols"), nb::arg("out"));
  m.def("quantize_rows", [](Runner& runner, const Source& x, const FormatArg& stored,
                            const CArray<uint8_t, 2>& codes, const CArray<uint16_t, 2>& scales,
                            const CArray<uint16_t, 2>& biases) {
    const RowFormat format = format_of(stored);
    require(format.bits == 16 || format.has_biases(), "rows are rounded with biases of their own");
    const SourceRows source = source_rows(x);
    const int64_t rows = x.shape(0), cols = x.shape(1), groups = groups_of(cols);
    require(cols > 0 && static_cast<int64_t>(codes.shape(0)) == rows &&
                static_cast<int64_t>(codes.shape(1)) == groups * format.codes_bytes(),
            "codes are (R, padded_cols * bits / 8)");
    for (const auto* values : {&scales, &biases})
      require(format.bits == 16 || (static_cast<int64_t>(values->shape(0)) == rows &&
                                    static_cast<int64_t>(values->shape(1)) == groups * format.scales()),
              "scales and biases are (R, G)");
    nb::gil_scoped_release release;
    return quantize_rows(runner, source, rows, cols, format, codes.data(), scales.data(), biases.data());
  });
  m.def("dequantize_rows", [](Runner& runner, const FormatArg& stored, const CArray<const uint8_t, 2>& rows,
                              int64_t cols, const CArray<float, 2>& out) {
    const RowFormat format = format_of(stored);
    const int64_t groups = groups_of(cols), codes = groups * format.codes_bytes();
    require(cols > 0 && static_cast<int64_t>(rows.shape(1)) >= format.row_bytes(groups),
            "rows are [codes | scales | biases]");
    require(out.shape(0) == rows.shape(0) && static_cast<int64_t>(out.shape(1)) == groups * kGroup,
            "out is (R, padded_cols)");
    const NativeCall call(runner);
    for (size_t r = 0; r < rows.shape(0); ++r) {
      const uint8_t* row = rows.data() + r * rows.shape(1);
      float* to = out.data() + r * out.shape(1);
      if (format.bits == 16)
        runner.kernels().half_to_float(reinterpret_cast<const uint16_t*>(row), to, groups * kGroup);
      else
        runner.kernels().dequantize_row(
            format, row, row + codes,
            reinterpret_cast<const uint16_t*>(row + codes + 2 * groups * format.scales()), groups, to);
    }
  });
}

void check_rounding(const CArray<const float, 2>& w, int64_t inputs, const RowFormat& format,
                    const CArray<const float, 2>& factor, const CArray<uint8_t, 2>& codes,
                    const CArray<uint16_t, 2>& scales, const CArray<uint16_t, 2>& biases) {
  const int64_t rows = w.shape(0), cols = w.shape(1), groups = groups_of(cols);
  require(rows > 0 && cols > 0, "w is (R, C)");
  require(format.bits < 8 && format.has_biases(),
          "rows are rounded to 4 to 6 bits, with biases of their own");
  require(static_cast<int64_t>(factor.shape(0)) == inputs && static_cast<int64_t>(factor.shape(1)) == inputs,
          "factor is (n, n) for n inputs");
  require(static_cast<int64_t>(codes.shape(0)) == rows &&
              static_cast<int64_t>(codes.shape(1)) == groups * format.codes_bytes(),
          "codes are (R, padded_cols * bits / 8)");
  for (const auto* values : {&scales, &biases})
    require(static_cast<int64_t>(values->shape(0)) == rows &&
                static_cast<int64_t>(values->shape(1)) == groups * format.scales(),
            "scales and biases are (R, G)");
}

void bind_error_feedback(nb::module_& m) {
  m.def("feedback_factor", [](Runner& runner, const CArray<double, 2>& h, const CArray<float, 2>& factor) {
    const int64_t n = h.shape(0);
    require(n > 0 && static_cast<int64_t>(h.shape(1)) == n, "h is (n, n)");
    require(static_cast<int64_t>(factor.shape(0)) == n && static_cast<int64_t>(factor.shape(1)) == n,
            "factor is (n, n)");
    nb::gil_scoped_release release;
    return feedback_factor(runner, h.data(), n, factor.data());
  });
  m.def("round_columns", [](Runner& runner, const CArray<const float, 2>& w, const FormatArg& stored,
                            const CArray<const float, 2>& factor, const CArray<uint8_t, 2>& codes,
                            const CArray<uint16_t, 2>& scales, const CArray<uint16_t, 2>& biases) {
    const RowFormat format = format_of(stored);
    check_rounding(w, w.shape(1), format, factor, codes, scales, biases);
    nb::gil_scoped_release release;
    return round_columns(runner, w.data(), w.shape(0), w.shape(1), format, factor.data(), codes.data(),
                         scales.data(), biases.data());
  });
  m.def("round_rows", [](Runner& runner, const CArray<const float, 2>& w, const FormatArg& stored,
                         const CArray<const float, 2>& factor, const CArray<uint8_t, 2>& codes,
                         const CArray<uint16_t, 2>& scales, const CArray<uint16_t, 2>& biases) {
    const RowFormat format = format_of(stored);
    check_rounding(w, w.shape(0), format, factor, codes, scales, biases);
    require(format.group == kGroup, "rows that meet the inputs have groups of 64");
    nb::gil_scoped_release release;
    return round_rows(runner, w.data(), w.shape(0), w.shape(1), format, factor.data(), codes.data(),
                      scales.data(), biases.data());
  });
}

}  // namespace

void bind_matrix(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix", nb::is_weak_referenceable())
      .def("__init__", [](Matrix* self, int64_t rows, int64_t cols,
                          const FormatArg& stored) { make(self, {{rows, stored}}, cols); })
      .def("__init__", &make, nb::arg("sections"), nb::arg("cols"))
      .def_prop_ro("rows", &Matrix::rows)
      .def("load_rows", &load_rows, nb::arg("runner"), nb::arg("row0"), nb::arg("codes"), nb::arg("scales"),
           nb::arg("biases"))
      .def("load_tiles", &load_tiles, nb::arg("section"), nb::arg("first"), nb::arg("tiles"))
      .def(
          "forward",
          [](const Matrix& matrix, Runner& runner, const Rows& x,
             const std::optional<CArray<const float, 1>>& bias, const CArray<float, 2>& out,
             const NormArg& norm, const Added& added) {
            const int64_t tokens = rows_of(x, matrix.cols());
            require(static_cast<int64_t>(out.shape(0)) == tokens &&
                        static_cast<int64_t>(out.shape(1)) == matrix.rows(),
                    "out is (T, rows)");
            require(!bias || static_cast<int64_t>(bias->shape(0)) == matrix.rows(), "bias is (rows,)");
            const Norm norms = norm_of(norm, matrix.cols());
            const float* base = added_to(out, added);
            const NativeCall call(runner);
            matrix.forward(runner, x.data(), x.stride(0), tokens, bias ? bias->data() : nullptr, out.data(),
                           norms, base);
          },
          nb::arg("runner"), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"),
          nb::arg("norm").none() = nb::none(), nb::arg("added").none() = nb::none())
      .def("forward_heads", [](const Matrix& matrix, Runner& runner, const CArray<const float, 3>& x,
                               const CArray<float, 2>& out) {
        const int64_t heads = x.shape(0), tokens = x.shape(1);
        require(heads > 0 && tokens > 0 && static_cast<int64_t>(x.shape(2)) == matrix.cols(),
                "x is (heads, T, cols)");
        require(matrix.sections() == 1, "heads are parts of one section");
        require(matrix.rows() % (heads * kTile) == 0, "a head has a multiple of 16 rows");
        require(static_cast<int64_t>(out.shape(0)) == tokens &&
                    static_cast<int64_t>(out.shape(1)) == matrix.rows(),
                "out is (T, rows)");
        const NativeCall call(runner);
        matrix.forward_heads(runner, x.data(), heads, tokens, out.data());
      });
  m.def("look_up", &look_up, nb::arg("runner"), nb::arg("matrices"), nb::arg("unit"), nb::arg("rows"),
        nb::arg("out"));
  m.def("forward_stacked", &forward_stacked, nb::arg("runner"), nb::arg("matrices"), nb::arg("x"),
        nb::arg("out"), nb::arg("column"), nb::arg("norm").none());
  bind_quantisation(m);
  bind_error_feedback(m);
}

}  // namespace ondevice
