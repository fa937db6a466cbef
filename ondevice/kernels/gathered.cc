// The feed-forward of selected neurons, from their records where they lie; kernels in linear.cc and
// down_gathered.cc. What isn't selected is zero and changes no bit of any sum, so where all that fire are
// selected the outputs are the dense ones.
#include <algorithm>
#include <cstring>

#include "interleave.h"
#include "layers.h"

namespace ondevice {
namespace {

// Tokens up to which rows are multiplied where they lie; for more it pays to interleave them first.
constexpr int64_t kFewTokens = 4;

// Scales and biases of 16 rows side by side, `stride` bytes from one group to the next.
void gather_affines(int bits, int64_t groups, const uint8_t* const* rows, uint8_t* out, int64_t stride) {
  for (int64_t affine = 0; affine < 2; ++affine, out += 2 * kTile) {
    const int64_t from = groups * kGroup * bits / 8 + affine * 2 * groups;
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8)
      for (int64_t r = 0; r < kTile; r += 8)
        transpose_halves(rows + r, from + 2 * g, out + g * stride + 2 * r, stride);
    for (; g < groups; ++g)
      for (int64_t r = 0; r < kTile; ++r) std::memcpy(out + g * stride + 2 * r, rows[r] + from + 2 * g, 2);
  }
}

// 16 rows -> one interleaved tile.
void gather_tile(int bits, int64_t groups, const uint8_t* const* rows, uint8_t* tile) {
  const int64_t row_bytes = kGroup * bits / 8, block = tile_group_bytes(bits);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = 0; r < kTile; r += 4)
      for (int64_t at = 0; at < row_bytes; at += 16) {
        const int64_t from = g * row_bytes + at;
        transpose_words(rows[r] + from, rows[r + 1] + from, rows[r + 2] + from, rows[r + 3] + from,
                        tile + g * block + at * kTile + r * 4);
      }
  gather_affines(bits, groups, rows, tile + kTile * row_bytes, block);
}

// Where the rows of tile `i` lie. Those that are missing are copies of the first: their lanes aren't used.
void rows_of_tile(const Gathered& neurons, int64_t offset, int64_t i, const uint8_t** rows) {
  for (int64_t r = 0; r < kTile; ++r) {
    const int64_t k = i * kTile + r;
    rows[r] = neurons.parts[k < neurons.count ? k : i * kTile] + offset;
  }
}

int64_t padded_to_tile(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

}  // namespace

int64_t select(const float* scores, int64_t tokens, int64_t neurons, int32_t* ids) {
  int64_t count = 0;
  for (int64_t first = 0; first < neurons; first += kGroup) {
    const int64_t width = std::min(neurons - first, kGroup);
    uint8_t any[kGroup] = {0};
    for (int64_t t = 0; t < tokens; ++t) {
      const float* row = scores + t * neurons + first;
      if (width == kGroup)
        for (int64_t i = 0; i < kGroup; ++i) any[i] |= !(row[i] <= 0.0f);
      else
        for (int64_t i = 0; i < width; ++i) any[i] |= !(row[i] <= 0.0f);
    }
    for (int64_t i = 0; i < width; ++i) {
      ids[count] = static_cast<int32_t>(first + i);
      count += any[i];
    }
  }
  return count;
}

void FeedForward::add_gathered(Engine& engine, const Gathered& neurons, int64_t tokens,
                               Activation activation) const {
  if (neurons.count == 0) return;
  const int64_t width = padded_to_tile(neurons.count);
  engine.gathered_h_.grow(static_cast<size_t>(2 * tokens * width) * sizeof(float));
  float* up = engine.gathered_h_.as<float>();
  float* gates = up + tokens * width;
  gathered_rows(engine, neurons, neurons.whole ? record_.up : 0, tokens, up, width);
  if (neurons.whole) gathered_rows(engine, neurons, record_.gate, tokens, gates, width);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < width; ++k) {
      const float score =
          k < neurons.count ? neurons.scores[t * neurons.scores_stride + neurons.ids[k]] : 0.0f;
      if (!neurons.whole)
        gates[t * width + k] = score;
      else if (score <= 0)
        // Others selected it: for this token it is zero, whatever its gate and up products are.
        gates[t * width + k] = up[t * width + k] = 0.0f;
    }
  engine.kernels().activate(activation, gates, up, up, tokens * width);
  gathered_down(engine, neurons, tokens, up, width);
}

int64_t FeedForward::forward_selected(Engine& engine, const Scorer& scorer, const Placed& placed,
                                      const float* x, int64_t x_stride, int64_t tokens, Activation activation,
                                      float* out, const Norm& norm, const float* added) const {
  const int64_t count = scorer.matrix.rows();
  engine.scores_.grow(static_cast<size_t>(tokens * count) * sizeof(float));
  float* scores = engine.scores_.as<float>();
  if (scorer.narrow) {
    const int64_t rank = scorer.narrow->rows();
    engine.narrow_.grow(static_cast<size_t>(tokens * rank) * sizeof(float));
    float* narrow = engine.narrow_.as<float>();
    scorer.narrow->forward(engine, x, x_stride, tokens, nullptr, narrow, norm);
    scorer.matrix.forward(engine, narrow, rank, tokens, scorer.bias, scores);
  } else {
    scorer.matrix.forward(engine, x, x_stride, tokens, scorer.bias, scores, norm);
  }
  // Gates have just multiplied with the very rows that their neurons do.
  if (!scorer.narrow && scorer.matrix.bits() == bits_)
    clear(engine, tokens);
  else
    begin(engine, x, x_stride, tokens, norm);
  std::vector<int32_t>& ids = engine.selected_;
  std::vector<const uint8_t*>& parts = engine.selected_parts_;
  ids.resize(static_cast<size_t>(count));
  parts.resize(static_cast<size_t>(count));
  const int64_t chosen = select(scores, tokens, count, ids.data());
  for (int64_t k = 0; k < chosen; ++k) parts[k] = placed.slot_parts[placed.slots[ids[k]]];
  add_gathered(engine, {ids.data(), parts.data(), chosen, placed.whole, scores, count}, tokens, activation);
  finish(engine, tokens, out, added);
  return chosen;
}

void FeedForward::gathered_rows(Engine& engine, const Gathered& neurons, int64_t offset, int64_t tokens,
                                float* out, int64_t out_stride) const {
  const KernelTable& kernels = engine.kernels();
  if (bits_ == 16) {
    engine.pool().parallel_for(neurons.count, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t k = begin; k < end; ++k)
        kernels.linear_half(reinterpret_cast<const uint16_t*>(neurons.parts[k] + offset), groups_ * kGroup,
                            engine.x_padded_.as<float>(), tokens, nullptr, nullptr, out + k, out_stride, 0,
                            1);
    });
    return;
  }
  const QuantizedRows x{engine.x_codes_.as<int8_t>(), engine.x_scales_.as<float>(),
                        engine.x_sums_.as<float>(), engine.x_int_sums_.as<int32_t>(), groups_};
  const int64_t tile_bytes = groups_ * tile_group_bytes(bits_), tiles = out_stride / kTile;
  uint8_t* scratch = reinterpret_cast<uint8_t*>(engine.scratch(tile_bytes / 4));
  engine.pool().parallel_for(tiles, 2, [&](int64_t begin, int64_t end, int thread) {
    uint8_t* tile = scratch + thread * tile_bytes;
    const uint8_t* rows[2][kTile];
    rows_of_tile(neurons, offset, begin, rows[begin % 2]);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t** next = i + 1 < end ? rows[(i + 1) % 2] : nullptr;
      if (next) rows_of_tile(neurons, offset, i + 1, next);
      if (tokens <= kFewTokens) {
        gather_affines(bits_, groups_, rows[i % 2], tile, 4 * kTile);
        kernels.linear_gathered(bits_, rows[i % 2], next, reinterpret_cast<const uint16_t*>(tile), x, tokens,
                                out + i * kTile, out_stride);
      } else {
        gather_tile(bits_, groups_, rows[i % 2], tile);
        kernels.linear_quantized(bits_, tile, x, tokens, nullptr, nullptr, out + i * kTile, out_stride, kTile,
                                 0, 1);
      }
    }
  });
}

void FeedForward::gathered_down(Engine& engine, const Gathered& neurons, int64_t tokens, const float* h,
                                int64_t h_stride) const {
  const KernelTable& kernels = engine.kernels();
  const int64_t width = groups_ * kGroup;
  const int64_t down = neurons.whole ? record_.down : row_bytes_;
  float* y = engine.y_.as<float>();
  if (bits_ == 16) {
    engine.pool().parallel_for(width / kTile, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t k = 0; k < neurons.count; ++k)
        kernels.down_half(reinterpret_cast<const uint16_t*>(neurons.parts[k] + down), width, 1, h + k,
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
  std::vector<int64_t>& places = engine.gathered_places_;
  places.clear();
  for (int64_t k = 0; k < neurons.count; ++k) {
    // Many that a predictor selects don't fire: their down rows would be multiplied by zero.
    bool zero = neurons.whole;
    for (int64_t t = 0; t < tokens && zero; ++t) zero = h[t * h_stride + k] == 0.0f;
    if (zero) continue;
    const size_t at = places.size();
    rows[at] = neurons.parts[k] + down;
    index[at] = static_cast<uint8_t>(neurons.ids[k] % kGroup);
    if (at == 0 || neurons.ids[k] / kGroup != neurons.ids[places.back()] / kGroup)
      blocks.push_back({rows.data() + at, index.data() + at, 0});
    ++blocks.back().count;
    places.push_back(k);
  }
  const int64_t count = static_cast<int64_t>(blocks.size()), spread = count * kGroup;
  engine.h_.grow(static_cast<size_t>(tokens * spread) * sizeof(float));
  float* values = engine.h_.as<float>();
  std::memset(values, 0, static_cast<size_t>(tokens * spread) * sizeof(float));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t b = 0, k = 0; b < count; ++b)
      for (int64_t i = 0; i < blocks[b].count; ++i, ++k)
        values[t * spread + b * kGroup + blocks[b].index[i]] = h[t * h_stride + places[k]];
  // A thread reads long runs of a row: its groups are one piece of all of them, 16 side by side.
  const int64_t grain = padded_to_tile((groups_ + engine.pool().threads() - 1) / engine.pool().threads());
  engine.pool().parallel_for(groups_, grain, [&](int64_t begin, int64_t end, int) {
    kernels.down_gathered(bits_, blocks.data(), count, groups_, begin, end, values, spread, tokens, y, width,
                          engine.lanes_.as<float>(), groups_ * kTile);
  });
  engine.gathered_ = true;
}

}  // namespace ondevice
