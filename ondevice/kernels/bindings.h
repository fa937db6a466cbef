// Parts of the Python module `ondevice.kernels._native`. They check the arguments; kernels trust them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "runner.h"

namespace ondevice {

namespace nb = nanobind;

template <class T, size_t N>
using CArray = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Bits, or the fields of a RowFormat.
using FormatArg = std::variant<int, std::tuple<int, int, std::string>>;

inline ScaleKind scale_kind(const std::string& name) {
  constexpr const char* kNames[] = {"affine",    "symmetric",           "mxfp4",          "table",
                                    "two_level", "two_level_symmetric", "two_level_table"};
  int kind = 0;
  for (const char* known : kNames) {
    if (name == known) return static_cast<ScaleKind>(kind);
    ++kind;
  }
  throw std::invalid_argument("scales have no kind of that name");
}

// Any format of tiles.
inline RowFormat tile_format_of(const FormatArg& arg) {
  RowFormat format(0);
  if (std::holds_alternative<int>(arg)) {
    format.bits = std::get<int>(arg);
  } else {
    const auto& [bits, group, kind] = std::get<1>(arg);
    format = RowFormat(bits, group, scale_kind(kind));
  }
  if (format.kind > ScaleKind::kMxfp4) {
    for (const RowFormat& known :
         {RowFormat(4, 32, ScaleKind::kTable), RowFormat(2, 16, ScaleKind::kTwoLevel),
          RowFormat(4, 32, ScaleKind::kTwoLevel), RowFormat(5, 32, ScaleKind::kTwoLevel),
          RowFormat(3, 16, ScaleKind::kTwoLevelSymmetric), RowFormat(6, 16, ScaleKind::kTwoLevelSymmetric),
          RowFormat(4, 32, ScaleKind::kTwoLevelTable)})
      if (format == known) return format;
    throw std::invalid_argument("scales of two levels and tables go with other bits and groups");
  }
  require((format.bits >= 4 && format.bits <= 8 && format.bits != 7) || format.bits == 16,
          "bits must be 4, 5, 6, 8 or 16");
  require(format.group == kGroup || (format.group == kGroup / 2 && format.bits != 16),
          "groups have 64 columns, or 32 at 4 to 8 bits");
  require(!format.implied() || format.group != kGroup, "biases are implied in groups of 32 alone");
  require(!format.mxfp4() || format == RowFormat(4, 32, ScaleKind::kMxfp4),
          "MXFP4 has 4 bits, groups of 32 and no biases");
  return format;
}

// A format of rows, which lie one after the other, too.
inline RowFormat format_of(const FormatArg& arg) {
  const RowFormat format = tile_format_of(arg);
  require(format.kind <= ScaleKind::kMxfp4, "scales of two levels and tables are those of tiles alone");
  return format;
}

// Throws for columns that the format's scales don't divide.
inline void check_columns(const RowFormat& format, int64_t cols) {
  require(!format.two_levels() || cols % (kSuperGroup * kGroup) == 0,
          "with two levels of scales, columns are a multiple of 256");
}

// Runs C++ without Python's lock until the end of the scope, as a step of the runner's time.
class NativeCall {
 public:
  explicit NativeCall(Runner& runner, Step step = Step::kRest) : timed_(runner.times(), step) {}

 private:
  nb::gil_scoped_release release_;
  Timed timed_;
};

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;  // (T, cols), contiguous columns
using Weight = std::optional<CArray<const float, 1>>;
using Added = std::optional<CArray<const float, 2>>;  // has the shape of what it is added to

// The number of rows of x, whose width must be `cols`.
inline int64_t rows_of(const Rows& x, int64_t cols) {
  require(static_cast<int64_t>(x.shape(1)) == cols && (x.stride(1) == 1 || cols == 1),
          "x is (T, cols) floats");
  require(x.shape(0) > 0, "x has no rows");
  return static_cast<int64_t>(x.shape(0));
}

// A norm as backends/base.py has it: weight, epsilon, bias, and whether the mean is taken off first.
using NormArg = std::optional<std::tuple<CArray<const float, 1>, float, Weight, bool>>;

// A norm over rows of `cols` floats, or none.
inline Norm norm_of(const NormArg& arg, int64_t cols) {
  if (!arg) return {};
  const auto& [weight, eps, bias, centred] = *arg;
  require(static_cast<int64_t>(weight.shape(0)) == cols, "a norm's weight is as long as what it norms");
  require(!bias || static_cast<int64_t>(bias->shape(0)) == cols, "a norm's bias is as long as what it norms");
  return {weight.data(), eps, bias ? bias->data() : nullptr, centred};
}

using FormArg = std::tuple<int, float, bool, float, float>;  // the fields of GateForm

inline GateForm form_of(const FormArg& arg) {
  const auto& [act, threshold, relu_up, clamp, slope] = arg;
  require(act >= 0 && act <= static_cast<int>(Activation::kClampedSwish), "activation must be 0 to 6");
  require(threshold == 0.0f || (threshold > 0.0f && static_cast<Activation>(act) == Activation::kFatRelu),
          "only activation 5 has a threshold, above zero");
  require(clamp > 0.0f && slope > 0.0f, "clamp and slope must be positive");
  return {static_cast<Activation>(act), threshold, relu_up, clamp, slope};
}

inline const float* added_to(const CArray<float, 2>& out, const Added& added) {
  if (!added) return nullptr;
  require(added->shape(0) == out.shape(0) && added->shape(1) == out.shape(1), "added has the shape of out");
  return added->data();
}

using Blocks = CArray<const uint64_t, 1>;                                    // addresses of KV blocks
using Tree = std::pair<CArray<const int32_t, 1>, CArray<const int32_t, 1>>;  // parents and depths, (T,) both

// One layer's keys and values, `offset` bytes behind each block's start; checked to hold positions below
// `end`.
KvView kv_view(const Blocks& blocks, int64_t offset, int64_t kv_heads, int64_t head_dim, int bits,
               int64_t end, int64_t latent = 0, int64_t values = 0);
// Throws if a block with one of the positions first .. end isn't there: blocks that no window reaches have
// the address 0.
void require_blocks(const Blocks& blocks, int64_t first, int64_t end);
TreeView tree_view(const Tree& tree, int64_t tokens);

// The norms of queries and of keys, as backends/base.py has them, and whether all heads are one vector. Then
// the norm of each head's values, if these are normed.
using HeadNorms = std::tuple<NormArg, NormArg, bool, NormArg>;

// What happens to projected queries and, if the layer stores them, keys and values; without rotary tables.
HeadTransform head_transform(const std::optional<HeadNorms>& norms, int64_t heads, int64_t kv_heads,
                             int64_t dim, int64_t value_dim, bool stores);

// The address of a slice's bytes, of which there must be `size`.
inline const uint8_t* slice_address(const CArray<const uint8_t, 1>& bytes, int64_t size) {
  require(size > 0 && static_cast<int64_t>(bytes.shape(0)) >= size &&
              reinterpret_cast<uint64_t>(bytes.data()) % sizeof(float) == 0,
          "a slice has its record's bytes, and begins at a multiple of 4 bytes");
  return bytes.data();
}

void bind_attention(nb::module_& m);
void bind_delta(nb::module_& m);
void bind_expert(nb::module_& m);
void bind_feed_forward(nb::module_& m);
void bind_gguf(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_mamba2(nb::module_& m);
void bind_matrix(nb::module_& m);
void bind_testing(nb::module_& m);
void bind_tokenizer(nb::module_& m);
void bind_flash(nb::module_& m, nb::module_& testing);

}  // namespace ondevice
