// `ondevice.kernels._native.testing`: single steps of fused ops, which tests compare with the whole.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cmath>
#include <optional>

#include "bindings.h"
#include "planes.h"

namespace ondevice {
namespace {

// (T, heads, dim), each token's heads contiguous.
using Heads = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using MutableHeads = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;

template <class Array>
void check_heads(const Array& x) {
  require(x.stride(2) == 1 && x.stride(1) == static_cast<int64_t>(x.shape(2)), "heads must be contiguous");
}

// out (T, rows) = x times tiles, or planes of tiles, of tile_bytes each, by one of a target's kernels.
void multiply(Runner& runner, const RowFormat& format, int64_t tile_bytes,
              decltype(KernelTable::linear_quantized) kernel, const CArray<const uint8_t, 1>& tiles,
              const Rows& x, const Weight& bias, const CArray<float, 2>& out) {
  const int64_t cols = x.shape(1), tokens = rows_of(x, cols), rows = out.shape(1),
                count = (rows + kTile - 1) / kTile;
  require(format.bits < 16 && static_cast<int64_t>(out.shape(0)) == tokens && rows > 0,
          "weights have at most 8 bits, out is (T, rows)");
  check_columns(format, cols);
  require(static_cast<int64_t>(tiles.shape(0)) == count * tile_bytes, "tiles have 16 rows each");
  require(!bias || static_cast<int64_t>(bias->shape(0)) == rows, "bias is (rows,)");
  nb::gil_scoped_release release;
  const InputRows inputs = runner.prepare(x.data(), x.stride(0), tokens, cols, format);
  runner.pool().parallel_for(count, 1, [&](int64_t begin, int64_t end, int) {
    kernel(format, tiles.data(), inputs.quantized, tokens, bias ? bias->data() : nullptr, nullptr, out.data(),
           rows, rows, begin, end);
  });
}

}  // namespace

void bind_testing(nb::module_& m) {
  m.def("head_norm",
        [](Runner& runner, const MutableHeads& x, const CArray<const float, 1>& weight, float eps) {
          check_heads(x);
          require(weight.shape(0) == x.shape(2), "weight is (head_dim,)");
          const int64_t heads = x.shape(1), dim = x.shape(2);
          nb::gil_scoped_release release;
          runner.pool().parallel_for(x.shape(0), 8, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t)
              for (int64_t h = 0; h < heads; ++h) {
                float* head = x.data() + t * x.stride(0) + h * dim;
                runner.kernels().norm(head, {weight.data(), eps}, dim, head);
              }
          });
        });
  m.def("rope", [](Runner& runner, const MutableHeads& x, const CArray<const float, 2>& cos,
                   const CArray<const float, 2>& sin) {
    const int64_t heads = x.shape(1), dim = x.shape(2);
    check_heads(x);
    require(cos.shape(0) == x.shape(0) && sin.shape(0) == x.shape(0) && cos.shape(1) * 2 == x.shape(2) &&
                sin.shape(1) * 2 == x.shape(2),
            "cos and sin are (T, head_dim / 2)");
    nb::gil_scoped_release release;
    runner.pool().parallel_for(x.shape(0), 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t h = 0; h < heads; ++h)
          runner.kernels().rope(x.data() + t * x.stride(0) + h * dim, cos.data() + t * dim / 2,
                                sin.data() + t * dim / 2, dim);
    });
  });
  m.def("multiply_tiles", [](Runner& runner, const FormatArg& stored, const CArray<const uint8_t, 1>& tiles,
                             const Rows& x, const Weight& bias, const CArray<float, 2>& out) {
    const RowFormat format = tile_format_of(stored);
    multiply(runner, format, kTile * format.row_bytes(groups_of(x.shape(1))),
             runner.kernels().linear_quantized, tiles, x, bias, out);
  });
  m.def("multiply_high", [](Runner& runner, const FormatArg& stored, const CArray<const uint8_t, 1>& planes,
                            const Rows& x, const CArray<float, 2>& out) {
    const RowFormat format = tile_format_of(stored);
    require(low_plane_bits_of(format.bits) > 0, "codes of this format aren't divided");
    multiply(runner, format, high_tile_bytes(format, groups_of(x.shape(1))), runner.kernels().linear_high,
             planes, x, std::nullopt, out);
  });
  m.def("kv_write", [](Runner& runner, const Blocks& blocks, int64_t offset, int bits, int64_t position,
                       const Heads& k, const Heads& v) {
    check_heads(k);
    check_heads(v);
    require(v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2),
            "k and v are both (T, kv_heads, head_dim)");
    require(position >= 0, "position must not be negative");
    const int64_t tokens = k.shape(0);
    const KvView kv = kv_view(blocks, offset, k.shape(1), k.shape(2), bits, position + tokens);
    nb::gil_scoped_release release;
    runner.pool().parallel_for(tokens, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        runner.kernels().kv_write(kv, position + t, k.data() + t * k.stride(0), v.data() + t * v.stride(0));
    });
  });
  m.def("attention", [](Runner& runner, const Heads& q, const Blocks& blocks, int64_t offset, int bits,
                        int64_t kv_heads, int64_t position, int64_t window, const std::optional<Tree>& tree,
                        const CArray<float, 2>& out) {
    check_heads(q);
    const int64_t tokens = q.shape(0), heads = q.shape(1), dim = q.shape(2);
    require(kv_heads > 0 && heads % kv_heads == 0, "query heads must be a multiple of kv heads");
    require(static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == heads * dim,
            "out is (T, heads * head_dim)");
    require(position >= 0 && window >= 0, "position and window must not be negative");
    const AttentionArgs args{q.data(),
                             q.stride(0),
                             heads,
                             kv_view(blocks, offset, kv_heads, dim, bits, position + tokens),
                             position,
                             window,
                             1.0f / std::sqrt(static_cast<float>(dim)),
                             0.0f,
                             out.data(),
                             tree ? tree_view(*tree, tokens) : TreeView{nullptr, nullptr},
                             nullptr};
    nb::gil_scoped_release release;
    runner.attention(args, tokens);
  });
}

}  // namespace ondevice
