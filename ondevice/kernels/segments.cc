// The feed-forward over packed segments of neurons; kernels in feed_forward.cc and linear.cc.
#include <algorithm>
#include <cstring>
#include <utility>

#include "interleave.h"
#include "layers.h"

namespace ondevice {
namespace {

constexpr int64_t kTilesPerBlock = kGroup / kTile;

int64_t down_block_bytes(int bits) { return kGroup * kGroup * bits / 8 + 4 * kGroup; }

// One (group, block) of the down projection: outputs 64 g .. 64 g + 63 of 64 neurons, see feed_forward.cc.
// `rows` are the neurons' down rows, zeros where the block has fewer than 64.
void pack_down(int bits, const uint8_t* const* rows, int64_t g, int64_t codes_bytes, int64_t groups,
               uint8_t* out) {
  const int64_t tile_bytes = kTile * kGroup * bits / 8;
  for (int64_t n = 0; n < kGroup; n += 32 / bits, out += 64)
    for (int64_t tile = 0; tile < kTilesPerBlock; ++tile) {
      const uint8_t* const* r = rows + n;
      const int64_t at = (g * kGroup + tile * kTile) * bits / 8;
      if (bits == 8)
        interleave_bytes(load_vector<Bytes16>(r[0] + at), load_vector<Bytes16>(r[1] + at),
                         load_vector<Bytes16>(r[2] + at), load_vector<Bytes16>(r[3] + at),
                         out + tile * tile_bytes);
      else
        interleave_bytes(join_nibbles(r[0] + at, r[1] + at), join_nibbles(r[2] + at, r[3] + at),
                         join_nibbles(r[4] + at, r[5] + at), join_nibbles(r[6] + at, r[7] + at),
                         out + tile * tile_bytes);
    }
  out += (kTilesPerBlock - 1) * tile_bytes;
  for (int64_t n = 0; n < kGroup; ++n) {
    std::memcpy(out + 2 * n, rows[n] + codes_bytes + 2 * g, 2);
    std::memcpy(out + 2 * (kGroup + n), rows[n] + codes_bytes + 2 * (groups + g), 2);
  }
}

}  // namespace

FeedForward::FeedForward(int64_t hidden, int bits, RecordShape record)
    : hidden_(hidden),
      groups_((hidden + kGroup - 1) / kGroup),
      bits_(bits),
      record_(record),
      row_bytes_(groups_ * kGroup * bits / 8 + (bits == 16 ? 0 : groups_ * 4)) {}

// A segment: for each 16 neurons their gate tile and their up tile, read as one stream; then the down rows.
void FeedForward::pack(Engine& engine, Segment& segment, int64_t block0, const uint8_t* records,
                       int64_t count) const {
  const int64_t blocks = (count + kGroup - 1) / kGroup, row0 = block0 * kGroup;
  const int64_t padding = blocks * kGroup - count, tile_bytes = kTile * row_bytes_;
  uint8_t* tiles = segment.memory_.data();
  uint8_t* down = tiles + 2 * segment.blocks_ * kGroup * row_bytes_;
  if (padding) {
    const int64_t first = (row0 + count) / kTile, end = (block0 + blocks) * kTilesPerBlock;
    std::memset(tiles + 2 * first * tile_bytes, 0, static_cast<size_t>(2 * (end - first) * tile_bytes));
  }
  if (bits_ == 16) {
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t* record = records + n * record_.stride;
      uint8_t* gate = tiles + (row0 + n) / kTile * 2 * tile_bytes + (row0 + n) % kTile * row_bytes_;
      std::memcpy(gate, record + record_.gate, static_cast<size_t>(row_bytes_));
      std::memcpy(gate + tile_bytes, record + record_.up, static_cast<size_t>(row_bytes_));
      std::memcpy(down + (row0 + n) * row_bytes_, record + record_.down, static_cast<size_t>(row_bytes_));
    }
    std::memset(down + (row0 + count) * row_bytes_, 0, static_cast<size_t>(padding * row_bytes_));
    return;
  }
  const int64_t codes = groups_ * kGroup * bits_ / 8;
  for (int64_t part = 0; part < 2; ++part) {
    const uint8_t* base = records + (part ? record_.up : record_.gate);
    interleave_rows(
        engine.pool(), bits_, groups_, row0, count,
        {base, base + codes, base + codes + 2 * groups_, record_.stride, record_.stride, record_.stride},
        tiles + part * tile_bytes, 2 * tile_bytes);
  }
  uint8_t* zeros = reinterpret_cast<uint8_t*>(engine.scratch(row_bytes_ / 4));
  std::memset(zeros, 0, static_cast<size_t>(row_bytes_));
  engine.pool().parallel_for(blocks * groups_, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / groups_, g = i % groups_;
      const uint8_t* rows_of_block[kGroup];
      for (int64_t n = 0; n < kGroup; ++n) {
        const int64_t neuron = block * kGroup + n;
        rows_of_block[n] = neuron < count ? records + neuron * record_.stride + record_.down : zeros;
      }
      pack_down(bits_, rows_of_block, g, codes, groups_,
                down + (g * segment.blocks_ + block0 + block) * down_block_bytes(bits_));
    }
  });
}

void FeedForward::begin(Engine& engine, const float* x, int64_t x_stride, int64_t tokens,
                        const Norm& norm) const {
  const int64_t width = groups_ * kGroup;
  if (bits_ == 16)
    engine.pad(x, x_stride, tokens, hidden_, width, norm);
  else
    engine.quantize(x, x_stride, tokens, hidden_, bits_ == 4, norm);
  clear(engine, tokens);
}

void FeedForward::clear(Engine& engine, int64_t tokens) const {
  const int64_t width = groups_ * kGroup;
  const size_t y_bytes = static_cast<size_t>(tokens * width) * sizeof(float);
  const size_t lane_bytes = static_cast<size_t>(tokens * groups_ * kTile) * sizeof(float);
  engine.y_.grow(y_bytes);
  engine.lanes_.grow(lane_bytes);
  engine.gathered_ = false;
  std::memset(engine.y_.data(), 0, y_bytes);
  std::memset(engine.lanes_.data(), 0, lane_bytes);
}

void FeedForward::add(Engine& engine, const std::vector<const Segment*>& segments, int64_t tokens,
                      Activation activation) const {
  size_t first = 0;
  while (first < segments.size()) {
    int64_t neurons = segments[first]->blocks_ * kGroup;
    size_t last = first + 1;
    while (last < segments.size() && (neurons + segments[last]->blocks_ * kGroup) * tokens <= kHiddenFloats)
      neurons += segments[last++]->blocks_ * kGroup;
    add_batch(engine, segments.data() + first, static_cast<int64_t>(last - first), tokens, activation);
    first = last;
  }
}

// 16 neurons of a segment: h[t * h_stride + r] = activation(gate) * up.
void FeedForward::gate_up(Engine& engine, const Segment& segment, int64_t tile, int64_t tokens,
                          Activation activation, float* h, int64_t h_stride, int thread) const {
  const KernelTable& kernels = engine.kernels();
  const uint8_t* gate = segment.memory_.data() + 2 * tile * kTile * row_bytes_;
  const uint8_t* up = gate + kTile * row_bytes_;
  const QuantizedRows x{engine.x_codes_.as<int8_t>(), engine.x_scales_.as<float>(),
                        engine.x_sums_.as<float>(), engine.x_int_sums_.as<int32_t>(), groups_};
  float* g = engine.tile_.as<float>() + thread * 2 * tokens * kTile;
  float* u = g + tokens * kTile;
  for (const auto& [weights, out] : {std::pair{gate, g}, std::pair{up, u}}) {
    if (bits_ == 16)
      kernels.linear_half(reinterpret_cast<const uint16_t*>(weights), groups_ * kGroup,
                          engine.x_padded_.as<float>(), tokens, nullptr, nullptr, out, kTile, 0, kTile);
    else
      kernels.linear_quantized(bits_, weights, x, tokens, nullptr, nullptr, out, kTile, kTile, 0, 1);
  }
  kernels.activate(activation, g, u, g, tokens * kTile);
  for (int64_t t = 0; t < tokens; ++t) std::memcpy(h + t * h_stride, g + t * kTile, kTile * sizeof(float));
}

void FeedForward::add_batch(Engine& engine, const Segment* const* segments, int64_t count, int64_t tokens,
                            Activation activation) const {
  const KernelTable& kernels = engine.kernels();
  int64_t neurons = 0;
  for (int64_t i = 0; i < count; ++i) neurons += segments[i]->blocks_ * kGroup;
  const int64_t width = groups_ * kGroup;
  engine.h_.grow(static_cast<size_t>(neurons * tokens) * sizeof(float));
  engine.tile_.grow(static_cast<size_t>(engine.pool().threads() * 2 * tokens * kTile) * sizeof(float));
  engine.pool().parallel_for(neurons / kTile, 4, [&](int64_t begin, int64_t end, int thread) {
    int64_t i = 0, first = 0;  // the tile's segment, and its first tile
    for (int64_t tile = begin; tile < end; ++tile) {
      while (first + segments[i]->blocks_ * kTilesPerBlock <= tile)
        first += segments[i++]->blocks_ * kTilesPerBlock;
      gate_up(engine, *segments[i], tile - first, tokens, activation, engine.h_.as<float>() + tile * kTile,
              neurons, thread);
    }
  });
  const float* h = engine.h_.as<float>();
  float* y = engine.y_.as<float>();
  if (bits_ == 16) {
    engine.pool().parallel_for(width / kTile, 2, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = 0, column = 0; i < count; ++i) {
        const int64_t rows = segments[i]->blocks_ * kGroup;
        const uint8_t* down = segments[i]->memory_.data() + 2 * rows * row_bytes_;
        kernels.down_half(reinterpret_cast<const uint16_t*>(down), width, rows, h + column, neurons, tokens,
                          y, width, begin * kTile, end * kTile);
        column += rows;
      }
    });
    return;
  }
  // Neighbouring groups are neighbours in a segment: a thread reads long runs, which at a 7B shape gives 36
  // instead of 32 GB/s where plain reads give 36.
  const int64_t grain = std::clamp<int64_t>(groups_ / (4 * engine.pool().threads()), 1, 8);
  engine.pool().parallel_for(groups_, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = 0, column = 0; i < count; ++i) {
      const int64_t blocks = segments[i]->blocks_;
      const uint8_t* down = segments[i]->memory_.data() + 2 * blocks * kGroup * row_bytes_;
      for (int64_t g = begin; g < end; ++g)
        kernels.down_quantized(bits_, down + g * blocks * down_block_bytes(bits_), blocks, h + column,
                               neurons, tokens, y + g * kGroup, width, engine.lanes_.as<float>() + g * kTile,
                               groups_ * kTile);
      column += blocks * kGroup;
    }
  });
}

void FeedForward::finish(Engine& engine, int64_t tokens, float* out, const float* added) const {
  const int64_t width = groups_ * kGroup;
  for (int64_t t = 0; t < tokens; ++t) {
    float* y = engine.y_.as<float>() + t * width;
    const float* lanes = engine.lanes_.as<float>() + t * groups_ * kTile;
    if (engine.gathered_) {
      if (bits_ == 4) engine.kernels().unzip_outputs(y, groups_);
      engine.ordered_lanes_.grow(static_cast<size_t>(groups_ * kTile) * sizeof(float));
      float* ordered = engine.ordered_lanes_.as<float>();
      lanes = engine.lanes_.as<float>() + t * padded_to_tile(groups_) * kTile;
      for (int64_t g = 0; g < groups_; ++g)
        for (int64_t lane = 0; lane < kTile; ++lane)
          ordered[g * kTile + lane] = lanes[(g / kTile * kTile + lane) * kTile + g % kTile];
      lanes = ordered;
    }
    engine.kernels().add_bias_lanes(y, lanes, added ? added + t * hidden_ : nullptr, out + t * hidden_,
                                    hidden_);
  }
  engine.gathered_ = false;
}

void FeedForward::forward(Engine& engine, const std::vector<const Segment*>& segments, const float* x,
                          int64_t x_stride, int64_t tokens, Activation activation, float* out,
                          const Norm& norm, const float* added) const {
  begin(engine, x, x_stride, tokens, norm);
  add(engine, segments, tokens, activation);
  finish(engine, tokens, out, added);
}

}  // namespace ondevice
