// The feed-forward of neurons that fire, from their records where they lie; kernels in linear.cc and
// feed_forward.cc. What doesn't fire is zero and changes no bit of any sum, so the outputs are the dense
// ones.
#include <cstring>

#include "interleave.h"
#include "layers.h"

namespace ondevice {
namespace {

// Codes, scales and biases of up to 16 rows -> one interleaved tile. Rows that are missing are copies of the
// first: their lanes are computed and not used.
void gather_tile(int bits, int64_t groups, const uint8_t* const* parts, int64_t count, uint8_t* tile) {
  const int64_t row_bytes = kGroup * bits / 8, codes = groups * row_bytes, block = tile_group_bytes(bits);
  const uint8_t* rows[kTile];
  for (int64_t r = 0; r < kTile; ++r) rows[r] = parts[r < count ? r : 0];
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = 0; r < kTile; r += 4)
      for (int64_t at = 0; at < row_bytes; at += 16) {
        const int64_t from = g * row_bytes + at;
        transpose_words(rows[r] + from, rows[r + 1] + from, rows[r + 2] + from, rows[r + 3] + from,
                        tile + g * block + at * kTile + r * 4);
      }
  uint8_t* scales = tile + kTile * row_bytes;
  for (int64_t affine = 0; affine < 2; ++affine) {
    const int64_t from = codes + affine * 2 * groups;
    uint8_t* out = scales + affine * 2 * kTile;
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8)
      for (int64_t r = 0; r < kTile; r += 8)
        transpose_halves(rows + r, from + 2 * g, out + g * block + 2 * r, block);
    for (; g < groups; ++g)
      for (int64_t r = 0; r < kTile; ++r) std::memcpy(out + g * block + 2 * r, rows[r] + from + 2 * g, 2);
  }
}

int64_t padded_to_tile(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

}  // namespace

void FeedForward::add_gathered(Engine& engine, const Gathered& neurons, int64_t tokens,
                               Activation activation) const {
  if (neurons.count == 0) return;
  const int64_t width = padded_to_tile(neurons.count);
  engine.gathered_h_.grow(static_cast<size_t>(2 * tokens * width) * sizeof(float));
  float* up = engine.gathered_h_.as<float>();
  gathered_up(engine, neurons, tokens, up, width);
  // Gates side by side as the up products are.
  float* gates = up + tokens * width;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < width; ++k)
      gates[t * width + k] =
          k < neurons.count ? neurons.gates[t * neurons.gates_stride + neurons.ids[k]] : 0.0f;
  engine.kernels().activate(activation, gates, up, up, tokens * width);
  gathered_down(engine, neurons, tokens, up, width);
}

void FeedForward::gathered_up(Engine& engine, const Gathered& neurons, int64_t tokens, float* out,
                              int64_t out_stride) const {
  const KernelTable& kernels = engine.kernels();
  if (bits_ == 16) {
    engine.pool().parallel_for(neurons.count, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t k = begin; k < end; ++k)
        kernels.linear_half(reinterpret_cast<const uint16_t*>(neurons.parts[k]), groups_ * kGroup,
                            engine.x_padded_.as<float>(), tokens, nullptr, out + k, out_stride, 0, 1);
    });
    return;
  }
  const QuantizedRows x{engine.x_codes_.as<int8_t>(), engine.x_scales_.as<float>(),
                        engine.x_sums_.as<float>(), engine.x_int_sums_.as<int32_t>(), groups_};
  const int64_t tile_bytes = groups_ * tile_group_bytes(bits_);
  uint8_t* tiles = reinterpret_cast<uint8_t*>(engine.scratch(tile_bytes / 4));
  engine.pool().parallel_for(out_stride / kTile, 2, [&](int64_t begin, int64_t end, int thread) {
    uint8_t* tile = tiles + thread * tile_bytes;
    for (int64_t i = begin; i < end; ++i) {
      gather_tile(bits_, groups_, neurons.parts + i * kTile, neurons.count - i * kTile, tile);
      kernels.linear_quantized(bits_, tile, x, tokens, nullptr, out + i * kTile, out_stride, kTile, 0, 1);
    }
  });
}

void FeedForward::gathered_down(Engine& engine, const Gathered& neurons, int64_t tokens, const float* h,
                                int64_t h_stride) const {
  const KernelTable& kernels = engine.kernels();
  const int64_t width = groups_ * kGroup;
  float* y = engine.y_.as<float>();
  if (bits_ == 16) {
    engine.pool().parallel_for(width / kTile, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t k = 0; k < neurons.count; ++k)
        kernels.down_half(reinterpret_cast<const uint16_t*>(neurons.parts[k] + row_bytes_), width, 1, h + k,
                          h_stride, tokens, y, width, begin * kTile, end * kTile);
    });
    return;
  }
  std::vector<GatheredBlock>& blocks = engine.gathered_blocks_;
  std::vector<const uint8_t*>& rows = engine.gathered_rows_;
  std::vector<uint8_t>& index = engine.gathered_index_;
  blocks.clear();
  rows.resize(static_cast<size_t>(neurons.count));
  index.resize(static_cast<size_t>(neurons.count));
  for (int64_t k = 0; k < neurons.count; ++k) {
    rows[k] = neurons.parts[k] + row_bytes_;
    index[k] = static_cast<uint8_t>(neurons.ids[k] % kGroup);
    if (k == 0 || neurons.ids[k] / kGroup != neurons.ids[k - 1] / kGroup)
      blocks.push_back({rows.data() + k, index.data() + k, 0});
    ++blocks.back().count;
  }
  const int64_t count = static_cast<int64_t>(blocks.size()), spread = count * kGroup;
  engine.h_.grow(static_cast<size_t>(tokens * spread) * sizeof(float));
  float* values = engine.h_.as<float>();
  std::memset(values, 0, static_cast<size_t>(tokens * spread) * sizeof(float));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t b = 0, k = 0; b < count; ++b)
      for (int64_t i = 0; i < blocks[b].count; ++i, ++k)
        values[t * spread + b * kGroup + blocks[b].index[i]] = h[t * h_stride + k];
  // A thread reads long runs of a row: its groups are one piece of all of them, 16 side by side.
  const int64_t grain = padded_to_tile((groups_ + engine.pool().threads() - 1) / engine.pool().threads());
  engine.pool().parallel_for(groups_, grain, [&](int64_t begin, int64_t end, int) {
    kernels.down_gathered(bits_, blocks.data(), count, groups_, begin, end, values, spread, tokens, y, width,
                          engine.lanes_.as<float>(), groups_ * kTile);
  });
  engine.gathered_ = true;
}

}  // namespace ondevice
