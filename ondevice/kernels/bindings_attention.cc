#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "bindings.h"

namespace ondevice {

KvView kv_view(const Blocks& blocks, int64_t offset, int64_t kv_heads, int64_t head_dim, int bits,
               int64_t end, int64_t latent, int64_t values) {
  require(bits == 8 || bits == 16, "kv bits must be 8 or 16");
  require(offset >= 0 && kv_heads > 0 && head_dim > 0, "offset, kv_heads and head_dim must be positive");
  require(end <= static_cast<int64_t>(blocks.shape(0)) * kKvBlock, "position is past the last KV block");
  require(latent >= 0 && latent % 16 == 0 && latent < head_dim, "latent is a multiple of 16 below head_dim");
  require(values >= 0 && values <= head_dim && !(latent && values), "values are at most as wide as keys");
  const int64_t stored = latent ? head_dim : head_dim + (values ? values : head_dim);
  const int64_t head_bytes = kKvBlock * (stored * bits / 8 + (bits == 8 ? 8 : 0));
  return {reinterpret_cast<uint8_t* const*>(blocks.data()),
          offset,
          head_bytes,
          kv_heads,
          head_dim,
          bits,
          latent,
          values};
}

void require_blocks(const Blocks& blocks, int64_t first, int64_t end) {
  for (int64_t at = first / kKvBlock; at * kKvBlock < end; ++at)
    require(blocks.data()[at] != 0, "a block that the tokens see isn't there");
}

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

namespace {

// The norm of a projection of `heads` heads: for all as one vector, for each, or of each head's own.
HeadNorm head_norm_of(const NormArg& arg, int64_t heads, int64_t dim, bool together) {
  require(arg.has_value(), "queries and keys are normed both");
  const bool own = together || static_cast<int64_t>(std::get<0>(*arg).shape(0)) == heads * dim;
  return {norm_of(arg, own ? heads * dim : dim), own ? dim : 0};
}

}  // namespace

HeadTransform head_transform(const std::optional<HeadNorms>& norms, int64_t heads, int64_t kv_heads,
                             int64_t dim, int64_t value_dim, bool stores) {
  HeadTransform transform{{}, {}, false, nullptr, nullptr};
  if (!norms) return transform;
  const auto& [q, k, together, v] = *norms;
  transform.norms_projection = together;
  transform.q_norm = head_norm_of(q, heads, dim, together);
  if (stores) transform.k_norm = head_norm_of(k, kv_heads, dim, together);
  transform.v_norm = norm_of(v, value_dim);
  return transform;
}

namespace {

void attend(Runner& runner, const CArray<float, 2>& qkv, const Blocks& blocks, int64_t offset, int bits,
            int64_t heads, int64_t kv_heads, int64_t position, int64_t window, float scale, float soft_cap,
            const CArray<const float, 2>& cos, const CArray<const float, 2>& sin,
            const std::optional<HeadNorms>& norms, const std::optional<Tree>& tree,
            const CArray<float, 2>& out, bool stores, const Weight& sinks, int64_t latent,
            int64_t value_dim) {
  const int64_t tokens = qkv.shape(0), width = qkv.shape(1);
  // Values of another width than keys come last, and are no parts of it.
  const int64_t beside = stores ? kv_heads * value_dim : 0;
  const int64_t parts = stores ? heads + (latent || value_dim ? 1 : 2) * kv_heads : heads;
  require(!latent || (stores && kv_heads == 1 && !norms), "latents have one head, no norms, and are stored");
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "query heads must be a multiple of kv heads");
  require(value_dim >= 0 && width > beside && (width - beside) % (2 * parts) == 0,
          "qkv is (T, (heads + 2 * kv_heads) * head_dim), or queries alone; values may have another width");
  const int64_t dim = (width - beside) / parts;
  require(static_cast<int64_t>(out.shape(0)) == tokens &&
              static_cast<int64_t>(out.shape(1)) == heads * (latent      ? latent
                                                             : value_dim ? value_dim
                                                                         : dim),
          "out is (T, heads * head_dim), or * latent, or * value_dim");
  for (const auto* table : {&cos, &sin})
    require(static_cast<int64_t>(table->shape(0)) == tokens &&
                static_cast<int64_t>(table->shape(1)) * 2 == dim - latent,
            "cos and sin are half as wide as what turns of a head");
  require(position >= 0 && window >= 0, "position and window must not be negative");
  require(!sinks || static_cast<int64_t>(sinks->shape(0)) == heads, "sinks are (heads,)");
  require(scale > 0.0f && soft_cap >= 0.0f, "scale must be positive, soft_cap not negative");
  HeadTransform transform = head_transform(norms, heads, kv_heads, dim, value_dim ? value_dim : dim, stores);
  transform.cos = cos.data();
  transform.sin = sin.data();
  const KvView kv = kv_view(blocks, offset, kv_heads, dim, bits, position + tokens, latent, value_dim);
  require_blocks(blocks, window ? std::max<int64_t>(0, position + 1 - window) : 0, position + tokens);
  const AttentionArgs args{qkv.data(),
                           width,
                           heads,
                           kv,
                           position,
                           window,
                           scale,
                           soft_cap,
                           out.data(),
                           tree ? tree_view(*tree, tokens) : TreeView{nullptr, nullptr},
                           sinks ? sinks->data() : nullptr};
  const NativeCall call(runner);
  runner.attend(qkv.data(), transform, args, tokens);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attend", &attend, nb::arg("runner"), nb::arg("qkv"), nb::arg("blocks"), nb::arg("offset"),
        nb::arg("bits"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("position"), nb::arg("window"),
        nb::arg("scale"), nb::arg("soft_cap"), nb::arg("cos"), nb::arg("sin"), nb::arg("norms").none(),
        nb::arg("tree").none(), nb::arg("out"), nb::arg("stores") = true,
        nb::arg("sinks").none() = nb::none(), nb::arg("latent") = 0, nb::arg("value_dim") = 0);
  m.def("kv_move", [](const Runner& runner, const Blocks& blocks, int64_t offset, int64_t kv_heads,
                      int64_t dim, int bits, int64_t from, int64_t to, int64_t latent, int64_t value_dim) {
    require(from >= 0 && to >= 0, "positions must not be negative");
    const int64_t end = std::max(from, to) + 1;
    require_blocks(blocks, std::min(from, to), end);
    runner.kernels().kv_move(kv_view(blocks, offset, kv_heads, dim, bits, end, latent, value_dim), from, to);
  });
}

}  // namespace ondevice
