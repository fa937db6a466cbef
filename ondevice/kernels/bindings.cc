#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "dispatch.h"

namespace ondevice {
namespace {

using FloatRows =
    nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;  // (T, heads, dim), heads contiguous

KvView kv_view(const CArray<const uint64_t, 1>& blocks, int64_t layer, int64_t kv_heads, int64_t head_dim,
               int bits, int64_t end) {
  require(bits == 8 || bits == 16, "kv bits must be 8 or 16");
  require(layer >= 0 && kv_heads > 0 && head_dim > 0, "layer, kv_heads and head_dim must be positive");
  require(end <= static_cast<int64_t>(blocks.shape(0)) * kKvBlock, "position is past the last KV block");
  const int64_t head_bytes = 2 * kKvBlock * (head_dim * bits / 8 + (bits == 8 ? 4 : 0));
  return {reinterpret_cast<uint8_t* const*>(blocks.data()),
          layer * kv_heads * head_bytes,
          head_bytes,
          kv_heads,
          head_dim,
          bits};
}

using Tree = std::pair<CArray<const int32_t, 1>, CArray<const int32_t, 1>>;  // parents and depths, (T,) both

TreeView tree_view(const Tree& tree, int64_t tokens) {
  const auto& [parents, depths] = tree;
  require(static_cast<int64_t>(parents.shape(0)) == tokens && static_cast<int64_t>(depths.shape(0)) == tokens,
          "parents and depths are (T,)");
  for (int32_t i = 0; i < tokens; ++i) {
    const int32_t parent = parents.data()[i];
    require(parent >= -1 && parent < i, "a parent comes before its children");
    require(depths.data()[i] == (parent < 0 ? 0 : depths.data()[parent] + 1), "depths don't follow parents");
    require(depths.data()[i] < kKvBlock, "a path is at most a block long");
  }
  return {parents.data(), depths.data()};
}

using HeadNorms = std::tuple<CArray<const float, 1>, CArray<const float, 1>, float>;  // of q, of k, epsilon

void attend(Engine& engine, const CArray<float, 2>& qkv, const CArray<const uint64_t, 1>& blocks,
            int64_t layer, int bits, int64_t heads, int64_t kv_heads, int64_t position, int64_t window,
            const CArray<const float, 2>& cos, const CArray<const float, 2>& sin,
            const std::optional<HeadNorms>& norms, const std::optional<Tree>& tree,
            const CArray<float, 2>& out) {
  const int64_t tokens = qkv.shape(0), width = qkv.shape(1), parts = heads + 2 * kv_heads;
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "query heads must be a multiple of kv heads");
  require(width % (2 * parts) == 0, "qkv is (T, (heads + 2 * kv_heads) * head_dim)");
  const int64_t dim = width / parts;
  require(static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == heads * dim,
          "out is (T, heads * head_dim)");
  for (const auto* table : {&cos, &sin})
    require(
        static_cast<int64_t>(table->shape(0)) == tokens && static_cast<int64_t>(table->shape(1)) * 2 == dim,
        "cos and sin are (T, head_dim / 2)");
  require(position >= 0 && window >= 0, "position and window must not be negative");
  Turn turn{{}, {}, cos.data(), sin.data()};
  if (norms) {
    const auto& [q, k, eps] = *norms;
    require(static_cast<int64_t>(q.shape(0)) == dim && static_cast<int64_t>(k.shape(0)) == dim,
            "norms of heads are (head_dim,)");
    turn.q_norm = {q.data(), eps};
    turn.k_norm = {k.data(), eps};
  }
  const AttentionArgs args{
      qkv.data(), width,  heads,      kv_view(blocks, layer, kv_heads, dim, bits, position + tokens),
      position,   window, out.data(), tree ? tree_view(*tree, tokens) : TreeView{nullptr, nullptr}};
  nb::gil_scoped_release release;
  engine.attend(qkv.data(), turn, args, tokens);
}

void check_heads(const FloatRows& x) {
  require(x.stride(2) == 1 && x.stride(1) == static_cast<int64_t>(x.shape(2)), "heads must be contiguous");
}

void bind_ops(nb::module_& m) {
  m.def("rms_norm", [](Engine& engine, const CArray<const float, 2>& x, const CArray<const float, 1>& weight,
                       float eps, const CArray<float, 2>& out) {
    const int64_t rows = x.shape(0), n = x.shape(1);
    require(weight.shape(0) == x.shape(1) && out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1),
            "x and out are (T, n), weight is (n,)");
    nb::gil_scoped_release release;
    engine.pool().parallel_for(rows, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        engine.kernels().rms_norm(x.data() + t * n, weight.data(), eps, n, out.data() + t * n);
    });
  });
  m.def("head_norm", [](Engine& engine, const nb::ndarray<float, nb::ndim<3>, nb::device::cpu>& x,
                        const CArray<const float, 1>& weight, float eps) {
    require(x.stride(2) == 1 && x.stride(1) == static_cast<int64_t>(x.shape(2)), "heads must be contiguous");
    require(weight.shape(0) == x.shape(2), "weight is (head_dim,)");
    const int64_t heads = x.shape(1), dim = x.shape(2);
    nb::gil_scoped_release release;
    engine.pool().parallel_for(x.shape(0), 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t h = 0; h < heads; ++h) {
          float* head = x.data() + t * x.stride(0) + h * dim;
          engine.kernels().rms_norm(head, weight.data(), eps, dim, head);
        }
    });
  });
  m.def("rope", [](Engine& engine, const nb::ndarray<float, nb::ndim<3>, nb::device::cpu>& x,
                   const CArray<const float, 2>& cos, const CArray<const float, 2>& sin) {
    const int64_t heads = x.shape(1), dim = x.shape(2);
    require(x.stride(2) == 1 && x.stride(1) == dim, "heads must be contiguous");
    require(cos.shape(0) == x.shape(0) && sin.shape(0) == x.shape(0) && cos.shape(1) * 2 == x.shape(2) &&
                sin.shape(1) * 2 == x.shape(2),
            "cos and sin are (T, head_dim / 2)");
    nb::gil_scoped_release release;
    engine.pool().parallel_for(x.shape(0), 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t h = 0; h < heads; ++h)
          engine.kernels().rope(x.data() + t * x.stride(0) + h * dim, cos.data() + t * dim / 2,
                                sin.data() + t * dim / 2, dim);
    });
  });
  m.def("kv_write", [](Engine& engine, const CArray<const uint64_t, 1>& blocks, int64_t layer, int bits,
                       int64_t position, const FloatRows& k, const FloatRows& v) {
    check_heads(k);
    check_heads(v);
    require(v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2),
            "k and v are both (T, kv_heads, head_dim)");
    require(position >= 0, "position must not be negative");
    const int64_t tokens = k.shape(0);
    const KvView kv = kv_view(blocks, layer, k.shape(1), k.shape(2), bits, position + tokens);
    nb::gil_scoped_release release;
    engine.pool().parallel_for(tokens, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        engine.kernels().kv_write(kv, position + t, k.data() + t * k.stride(0), v.data() + t * v.stride(0));
    });
  });
  m.def("kv_move", [](const Engine& engine, const CArray<const uint64_t, 1>& blocks, int64_t layers,
                      int64_t kv_heads, int64_t dim, int bits, int64_t from, int64_t to) {
    require(layers > 0 && from >= 0 && to >= 0, "layers must be positive, positions not negative");
    for (int64_t layer = 0; layer < layers; ++layer)
      engine.kernels().kv_move(kv_view(blocks, layer, kv_heads, dim, bits, std::max(from, to) + 1), from, to);
  });
  m.def("copy_out",
        [](const CArray<const uint64_t, 1>& addresses, size_t offset, const CArray<uint8_t, 2>& out) {
          require(addresses.shape(0) == out.shape(0), "addresses are (n,), out is (n, bytes)");
          nb::gil_scoped_release release;
          for (size_t i = 0; i < out.shape(0); ++i)
            std::memcpy(out.data() + i * out.shape(1),
                        reinterpret_cast<const uint8_t*>(addresses.data()[i]) + offset, out.shape(1));
        });
  m.def("attention", [](Engine& engine, const FloatRows& q, const CArray<const uint64_t, 1>& blocks,
                        int64_t layer, int bits, int64_t kv_heads, int64_t position, int64_t window,
                        const std::optional<Tree>& tree, const CArray<float, 2>& out) {
    check_heads(q);
    const int64_t tokens = q.shape(0), heads = q.shape(1), dim = q.shape(2);
    require(kv_heads > 0 && heads % kv_heads == 0, "query heads must be a multiple of kv heads");
    require(static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == heads * dim,
            "out is (T, heads * head_dim)");
    require(position >= 0 && window >= 0, "position and window must not be negative");
    const AttentionArgs args{
        q.data(), q.stride(0), heads,      kv_view(blocks, layer, kv_heads, dim, bits, position + tokens),
        position, window,      out.data(), tree ? tree_view(*tree, tokens) : TreeView{nullptr, nullptr}};
    nb::gil_scoped_release release;
    engine.attention(args, tokens);
  });
  m.def("attend", &attend, nb::arg("engine"), nb::arg("qkv"), nb::arg("blocks"), nb::arg("layer"),
        nb::arg("bits"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("position"), nb::arg("window"),
        nb::arg("cos"), nb::arg("sin"), nb::arg("norms").none(), nb::arg("tree").none(), nb::arg("out"));
  m.def(
      "largest",
      [](const CArray<const float, 1>& x, const CArray<int32_t, 1>& ids, const CArray<float, 1>& values) {
        const int64_t n = x.shape(0), count = ids.shape(0);
        require(count >= 1 && count <= n && static_cast<int64_t>(values.shape(0)) == count,
                "ids and values are (K,), 1 <= K <= n");
        static std::string name;
        static const KernelTable* kernels = find_target("auto", &name);
        nb::gil_scoped_release release;
        kernels->largest(x.data(), n, count, ids.data(), values.data());
        return kernels->sum_of_exps(x.data(), n, values.data()[0]);
      },
      nb::arg("x"), nb::arg("ids"), nb::arg("values"));
  m.def("activate", [](Engine& engine, int activation, const CArray<const float, 1>& gate,
                       const CArray<const float, 1>& up, const CArray<float, 1>& out) {
    require(activation >= 0 && activation <= 4, "activation must be 0 to 4");
    require(gate.shape(0) == up.shape(0) && gate.shape(0) == out.shape(0),
            "gate, up and out have one length");
    engine.kernels().activate(static_cast<Activation>(activation), gate.data(), up.data(), out.data(),
                              static_cast<int64_t>(gate.shape(0)));
  });
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
  m.def("quantize_rows", [](Engine& engine, const Source& x, int bits, const CArray<uint8_t, 2>& codes,
                            const CArray<uint16_t, 2>& scales, const CArray<uint16_t, 2>& biases) {
    require(bits == 4 || bits == 8 || bits == 16, "bits must be 4, 8 or 16");
    const SourceRows source = source_rows(x);
    const int64_t rows = x.shape(0), cols = x.shape(1), groups = (cols + kGroup - 1) / kGroup;
    require(cols > 0 && static_cast<int64_t>(codes.shape(0)) == rows &&
                static_cast<int64_t>(codes.shape(1)) == groups * kGroup * bits / 8,
            "codes are (R, padded_cols * bits / 8)");
    for (const auto* values : {&scales, &biases})
      require(bits == 16 || (static_cast<int64_t>(values->shape(0)) == rows &&
                             static_cast<int64_t>(values->shape(1)) == groups),
              "scales and biases are (R, G)");
    nb::gil_scoped_release release;
    return quantize_rows(engine, source, rows, cols, bits, codes.data(), scales.data(), biases.data());
  });
  m.def("dequantize_rows", [](Engine& engine, int bits, const CArray<const uint8_t, 2>& rows, int64_t cols,
                              const CArray<float, 2>& out) {
    require(bits == 4 || bits == 8 || bits == 16, "bits must be 4, 8 or 16");
    const int64_t groups = (cols + kGroup - 1) / kGroup, codes = groups * kGroup * bits / 8;
    require(cols > 0 && static_cast<int64_t>(rows.shape(1)) >= codes + (bits == 16 ? 0 : 4 * groups),
            "rows are [codes | scales | biases]");
    require(out.shape(0) == rows.shape(0) && static_cast<int64_t>(out.shape(1)) == groups * kGroup,
            "out is (R, padded_cols)");
    nb::gil_scoped_release release;
    for (size_t r = 0; r < rows.shape(0); ++r) {
      const uint8_t* row = rows.data() + r * rows.shape(1);
      float* to = out.data() + r * out.shape(1);
      if (bits == 16)
        engine.kernels().half_to_float(reinterpret_cast<const uint16_t*>(row), to, groups * kGroup);
      else
        engine.kernels().dequantize_row(bits, row, reinterpret_cast<const uint16_t*>(row + codes),
                                        reinterpret_cast<const uint16_t*>(row + codes + 2 * groups), groups,
                                        to);
    }
  });
}

}  // namespace
}  // namespace ondevice

NB_MODULE(_native, m) {
  using namespace ondevice;
  // A program that ends while one of its threads still holds a model is none of its users' business.
  nb::set_leak_warnings(false);
  m.def("available_targets", &available_targets);
  m.def(
      "allocate",
      [](size_t nbytes) {
        auto buffer = std::make_unique<Buffer>();
        {
          nb::gil_scoped_release release;
          *buffer = Buffer(nbytes);
        }
        nb::capsule owner(buffer.get(), [](void* held) noexcept { delete static_cast<Buffer*>(held); });
        uint8_t* data = buffer.release()->data();
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {nbytes}, owner);
      },
      nb::arg("nbytes"));
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<int, const std::string&>(), nb::arg("threads"), nb::arg("target") = "auto")
      .def_prop_ro("target", &Engine::target)
      .def("trim", &Engine::trim);
  bind_ops(m);
  bind_quantisation(m);
  bind_layers(m);
  bind_flash(m);
}
