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

// 16 rows -> one interleaved tile. The 16 rows `next`, if not null, are fetched meanwhile.
void gather_tile(int bits, int64_t groups, const uint8_t* const* rows, const uint8_t* const* next,
                 uint8_t* tile) {
  const int64_t row_bytes = kGroup * bits / 8, block = tile_group_bytes(bits);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = 0; r < kTile; r += 4) {
      for (int64_t i = r; next && g * row_bytes % 64 == 0 && i < r + 4; ++i)
        __builtin_prefetch(next[i] + g * row_bytes);
      for (int64_t at = 0; at < row_bytes; at += 16) {
        const int64_t from = g * row_bytes + at;
        transpose_words(rows[r] + from, rows[r + 1] + from, rows[r + 2] + from, rows[r + 3] + from,
                        tile + g * block + at * kTile + r * 4);
      }
    }
  for (int64_t r = 0; next && r < kTile; ++r) __builtin_prefetch(next[r] + groups * row_bytes);
  gather_affines(bits, groups, rows, tile + kTile * row_bytes, block);
}

// Where the rows of 16 neurons from `first` on lie, `offset` bytes into what is read of each. Those that are
// missing are copies of the first: their lanes aren't used.
void rows_of_tile(const Gathered& neurons, int64_t first, int64_t offset, const uint8_t** rows) {
  for (int64_t r = 0; r < kTile; ++r)
    rows[r] = neurons.parts[first + r < neurons.count ? first + r : first] + offset;
}

// Gates of 16 neurons (T, 16): their scores, zeros behind the last.
void take_gates(const Gathered& neurons, int64_t first, int64_t tokens, float* gates) {
  const int64_t count = std::min(neurons.count - first, kTile);
  for (int64_t t = 0; t < tokens; ++t, gates += kTile) {
    const float* scores = neurons.scores + t * neurons.scores_stride;
    for (int64_t r = 0; r < count; ++r) gates[r] = scores[neurons.ids[first + r]];
    std::fill(gates + count, gates + kTile, 0.0f);
  }
}

// Where others selected a neuron: for this token it is zero, whatever its gate and up products (T, 16) are.
void clear_unselected(const Gathered& neurons, int64_t first, int64_t tokens, float* gates, float* ups) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < kTile; ++r) {
      const int64_t k = first + r;
      const bool counts =
          k < neurons.count && !(neurons.scores[t * neurons.scores_stride + neurons.ids[k]] <= 0);
      gates[t * kTile + r] = counts ? gates[t * kTile + r] : 0.0f;
      ups[t * kTile + r] = counts ? ups[t * kTile + r] : 0.0f;
    }
}

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
  // A block of 64 stored neurons is summed as one, so it is in one batch.
  const int64_t most = std::max(kHiddenFloats / tokens / kGroup * kGroup, kGroup);
  for (int64_t first = 0; first < neurons.count;) {
    int64_t end = std::min(first + most, neurons.count);
    if (end < neurons.count)
      while (neurons.ids[end] / kGroup == neurons.ids[end - 1] / kGroup) --end;
    Gathered batch = neurons;
    batch.ids += first;
    batch.parts += first;
    batch.count = end - first;
    gathered_batch(engine, batch, tokens, activation);
    first = end;
  }
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

void FeedForward::gathered_batch(Engine& engine, const Gathered& neurons, int64_t tokens,
                                 Activation activation) const {
  const int64_t width = padded_to_tile(neurons.count);
  engine.h_.grow(static_cast<size_t>(tokens * width + kGroup) * sizeof(float));
  gathered_hidden(engine, neurons, tokens, activation, width);
  gathered_down(engine, neurons, tokens, width);
}

// h[t * width + k] = activation(gate) * up, zero where a token doesn't select neuron k.
void FeedForward::gathered_hidden(Engine& engine, const Gathered& neurons, int64_t tokens,
                                  Activation activation, int64_t width) const {
  const int64_t values = tokens * kTile;
  const int64_t tile_bytes = bits_ == 16 ? 0 : groups_ * tile_group_bytes(bits_);
  uint8_t* scratch = reinterpret_cast<uint8_t*>(engine.scratch(tile_bytes / 4));
  engine.tile_.grow(static_cast<size_t>(engine.pool().threads() * 2 * values) * sizeof(float));
  const int64_t first_at = neurons.whole ? record_.gate : 0;
  engine.pool().parallel_for(width / kTile, 2, [&](int64_t begin, int64_t end, int thread) {
    uint8_t* tile = scratch + thread * tile_bytes;
    float* gates = engine.tile_.as<float>() + thread * 2 * values;
    float* ups = gates + values;
    const uint8_t *first[2][kTile], *second[kTile];
    rows_of_tile(neurons, begin * kTile, first_at, first[begin % 2]);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t** next = nullptr;
      if (i + 1 < end) rows_of_tile(neurons, (i + 1) * kTile, first_at, next = first[(i + 1) % 2]);
      if (neurons.whole) {
        rows_of_tile(neurons, i * kTile, record_.up, second);
        gathered_products(engine, first[i % 2], second, tile, tokens, gates);
        gathered_products(engine, second, next, tile, tokens, ups);
        clear_unselected(neurons, i * kTile, tokens, gates, ups);
      } else {
        gathered_products(engine, first[i % 2], next, tile, tokens, ups);
        take_gates(neurons, i * kTile, tokens, gates);
      }
      engine.kernels().activate(activation, gates, ups, ups, values);
      for (int64_t t = 0; t < tokens; ++t)
        std::memcpy(engine.h_.as<float>() + t * width + i * kTile, ups + t * kTile, kTile * sizeof(float));
    }
  });
}

// Products of 16 rows with every token -> (T, 16). The rows `next`, if not null, are wanted next.
void FeedForward::gathered_products(Engine& engine, const uint8_t* const* rows, const uint8_t* const* next,
                                    uint8_t* tile, int64_t tokens, float* out) const {
  const KernelTable& kernels = engine.kernels();
  if (bits_ == 16) {
    for (int64_t r = 0; r < kTile; ++r)
      kernels.linear_half(reinterpret_cast<const uint16_t*>(rows[r]), groups_ * kGroup,
                          engine.x_padded_.as<float>(), tokens, nullptr, nullptr, out + r, kTile, 0, 1);
    return;
  }
  const QuantizedRows x{engine.x_codes_.as<int8_t>(), engine.x_scales_.as<float>(),
                        engine.x_sums_.as<float>(), engine.x_int_sums_.as<int32_t>(), groups_};
  if (tokens <= kFewTokens) {
    gather_affines(bits_, groups_, rows, tile, 4 * kTile);
    kernels.linear_gathered(bits_, rows, next, reinterpret_cast<const uint16_t*>(tile), x, tokens, out,
                            kTile);
  } else {
    gather_tile(bits_, groups_, rows, next, tile);
    kernels.linear_quantized(bits_, tile, x, tokens, nullptr, nullptr, out, kTile, kTile, 0, 1);
  }
}

void FeedForward::gathered_down(Engine& engine, const Gathered& neurons, int64_t tokens,
                                int64_t h_stride) const {
  const KernelTable& kernels = engine.kernels();
  const int64_t width = groups_ * kGroup, down = neurons.whole ? record_.down : row_bytes_;
  const float* h = engine.h_.as<float>();
  float* y = engine.y_.as<float>();
  if (bits_ == 16) {
    engine.pool().parallel_for(width / kTile, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t k = 0; k < neurons.count; ++k)
        kernels.down_half(reinterpret_cast<const uint16_t*>(neurons.parts[k] + down), width, 1, h + k,
                          h_stride, tokens, y, width, begin * kTile, end * kTile);
    });
    return;
  }
  // A thread reads long runs of a row: its groups are one piece of all of them, 16 side by side. Where those
  // are fewer than threads, each takes some of the tokens.
  const int64_t threads = engine.pool().threads();
  const int64_t grain = padded_to_tile((groups_ + threads - 1) / threads);
  const int64_t pieces = (groups_ + grain - 1) / grain;
  const int64_t share =
      pieces < threads ? std::max<int64_t>((tokens * pieces + threads - 1) / threads, 2) : tokens;
  const int64_t shares = (tokens + share - 1) / share;
  const int64_t lanes_width = padded_to_tile(groups_) * kTile;
  if (!engine.gathered_) {
    const size_t bytes = static_cast<size_t>(tokens * lanes_width) * sizeof(float);
    engine.lanes_.grow(bytes);
    std::memset(engine.lanes_.data(), 0, bytes);
    engine.gathered_ = true;
  }
  float* lanes = engine.lanes_.as<float>();
  engine.pool().parallel_for(pieces * shares, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t g0 = i % pieces * grain, g1 = std::min(g0 + grain, groups_), t = i / pieces * share;
      kernels.down_gathered(bits_, {neurons.ids, neurons.parts, down, neurons.count}, groups_, g0, g1,
                            h + t * h_stride, h_stride, std::min(share, tokens - t), y + t * width, width,
                            lanes + t * lanes_width, lanes_width);
    }
  });
}

}  // namespace ondevice
