#include "bindings.h"
#include "gguf_codes.h"
#include "gguf_rows.h"

namespace ondevice {
namespace {

using Stored = CArray<const uint8_t, 2>;  // rows of whole blocks

const BlockType& type_of(const std::string& name, const Stored& data) {
  const BlockType* type = find_block_type(name);
  require(type != nullptr, "the type is one whose codes are copied");
  require(data.shape(0) > 0 && data.shape(1) > 0 && data.shape(1) % type->nbytes == 0,
          "data is (rows, bytes of whole blocks)");
  return *type;
}

int64_t columns_of(const BlockType& type, const Stored& data) {
  return static_cast<int64_t>(data.shape(1)) / type.nbytes * type.values;
}

template <class Scale>
void copy(const std::string& name, const Stored& data, const FormatArg& arg, const CArray<uint8_t, 2>& codes,
          const CArray<Scale, 2>& scales, const CArray<Scale, 2>& biases) {
  const BlockType& type = type_of(name, data);
  const RowFormat stored = format_of(arg);
  require(stored.group == 32 && stored.bits >= type.own.bits && (!stored.implied() || type.own.implied()) &&
              !stored.mxfp4() && !type.own.mxfp4(),
          "stored holds the type's codes");
  const int64_t rows = data.shape(0), cols = columns_of(type, data);
  require(static_cast<int64_t>(codes.shape(0)) == rows &&
              static_cast<int64_t>(codes.shape(1)) == cols * stored.bits / 8,
          "codes are (rows, cols * bits / 8)");
  for (const auto* values : {&scales, &biases})
    require(
        static_cast<int64_t>(values->shape(0)) == rows &&
            static_cast<int64_t>(values->shape(1)) == (values == &biases && stored.implied() ? 0 : cols / 32),
        "scales and biases are (rows, cols / 32), and implied biases (rows, 0)");
  const int64_t blocks = cols / type.values;
  if constexpr (sizeof(Scale) == 2) {
    require(type.values == 32 && stored.implied() == type.own.implied(),
            "scales and biases are float16 in the type");
    nb::gil_scoped_release release;
    copy_codes_and_halves(type, data.data(), rows, blocks, stored, codes.data(), scales.data(),
                          biases.data());
  } else {
    nb::gil_scoped_release release;
    copy_codes(type, data.data(), rows, blocks, stored, codes.data(), scales.data(), biases.data());
  }
}

void copy_mxfp4_blocks(const Stored& data, const CArray<uint8_t, 2>& codes,
                       const CArray<uint8_t, 2>& scales) {
  const BlockType& type = type_of("MXFP4", data);
  const int64_t rows = data.shape(0), cols = columns_of(type, data);
  require(static_cast<int64_t>(codes.shape(0)) == rows && static_cast<int64_t>(codes.shape(1)) == cols / 2,
          "codes are (rows, cols / 2)");
  require(static_cast<int64_t>(scales.shape(0)) == rows && static_cast<int64_t>(scales.shape(1)) == cols / 32,
          "scales are (rows, cols / 32)");
  nb::gil_scoped_release release;
  copy_mxfp4(data.data(), rows * cols / 32, codes.data(), scales.data());
}

void copy_tile_rows(const std::string& name, const Stored& data, const CArray<uint8_t, 2>& codes,
                    const CArray<uint8_t, 2>& scales) {
  const TileType* type = find_tile_type(name);
  require(type != nullptr, "the type is one whose scales only tiles hold");
  require(data.shape(0) > 0 && data.shape(1) > 0 && data.shape(1) % type->nbytes == 0,
          "data is (rows, bytes of whole blocks)");
  const int64_t rows = data.shape(0), blocks = static_cast<int64_t>(data.shape(1)) / type->nbytes;
  const int64_t wide = type->stored.two_levels() ? type->stored.header_bytes() : 2;
  require(static_cast<int64_t>(codes.shape(0)) == rows &&
              static_cast<int64_t>(codes.shape(1)) == blocks * type->values * type->stored.bits / 8,
          "codes are (rows, cols * bits / 8)");
  require(
      static_cast<int64_t>(scales.shape(0)) == rows && static_cast<int64_t>(scales.shape(1)) == blocks * wide,
      "scales are (rows, bytes of blocks' scales)");
  nb::gil_scoped_release release;
  copy_rows(*type, data.data(), rows * blocks, codes.data(), scales.data());
}

bool quantize(Runner& runner, const std::string& name, const Stored& data, int64_t first,
              const FormatArg& arg, const CArray<uint8_t, 2>& codes, const CArray<uint16_t, 2>& scales,
              const CArray<uint16_t, 2>& biases) {
  const BlockType& type = type_of(name, data);
  const RowFormat format = format_of(arg);
  const int64_t rows = data.shape(0), count = codes.shape(0), groups = groups_of(rows);
  require(format.has_biases(), "columns are rounded to 4 to 8 bits, with biases");
  require(first >= 0 && first % 16 == 0 && count > 0 && count <= columns_of(type, data) - first,
          "columns are those of the matrix, from a multiple of 16 on");
  require(static_cast<int64_t>(codes.shape(1)) == groups * format.codes_bytes(),
          "codes are (n, padded rows * bits / 8)");
  for (const auto* values : {&scales, &biases})
    require(static_cast<int64_t>(values->shape(0)) == count &&
                static_cast<int64_t>(values->shape(1)) == groups * format.scales(),
            "scales and biases are (n, G)");
  nb::gil_scoped_release release;
  return quantize_columns(runner, type, data.data(), rows, data.shape(1), first, count, format, codes.data(),
                          scales.data(), biases.data());
}

void column(const std::string& name, const Stored& data, int64_t at, const CArray<float, 1>& out) {
  const BlockType& type = type_of(name, data);
  require(at >= 0 && at < columns_of(type, data), "the column is one of the matrix");
  require(out.shape(0) == data.shape(0), "out is (rows,)");
  nb::gil_scoped_release release;
  decode_column(type, data.data(), data.shape(0), data.shape(1), at, out.data());
}

}  // namespace

void bind_gguf(nb::module_& m) {
  m.def("copy_gguf_codes", &copy<float>);
  m.def("copy_gguf_codes_and_halves", &copy<uint16_t>);
  m.def("copy_gguf_rows", &copy_tile_rows);
  m.def("copy_mxfp4_blocks", &copy_mxfp4_blocks);
  m.def("quantize_gguf_columns", &quantize);
  m.def("decode_gguf_column", &column);
}

}  // namespace ondevice
