#include "feed_forward_pass.h"

#include <cstring>

namespace ondevice {
namespace {

constexpr int64_t kTilesPerBlock = kGroup / kTile;

}  // namespace

FeedForwardPass::FeedForwardPass(Runner& runner, const FeedForward& layer, const InputRows& x,
                                 const GateForm& form)
    : runner_(runner),
      layer_(layer),
      scratch_(runner.feed_forward_scratch()),
      x_(x),
      form_(form),
      input_version_(runner.input_version()) {
  const size_t output_bytes = static_cast<size_t>(x.tokens * width()) * sizeof(float);
  const size_t lane_bytes = static_cast<size_t>(x.tokens * layer.groups() * kTile) * sizeof(float);
  scratch_.outputs.grow(output_bytes);
  scratch_.bias_lanes.grow(lane_bytes);
  std::memset(scratch_.outputs.data(), 0, output_bytes);
  std::memset(scratch_.bias_lanes.data(), 0, lane_bytes);
}

void FeedForwardPass::add(const std::vector<const Segment*>& segments, int64_t tokens,
                          const GivenGates& gates) {
  size_t first = 0;
  while (first < segments.size()) {
    int64_t neurons = segments[first]->blocks() * kGroup;
    size_t last = first + 1;
    while (last < segments.size() && (neurons + segments[last]->blocks() * kGroup) * tokens <= kHiddenFloats)
      neurons += segments[last++]->blocks() * kGroup;
    add_batch(segments.data() + first, static_cast<int64_t>(last - first), tokens, gates);
    first = last;
  }
}

void FeedForwardPass::add_batch(const Segment* const* segments, int64_t count, int64_t tokens,
                                const GivenGates& gates) {
  int64_t neurons = 0;
  for (int64_t i = 0; i < count; ++i) neurons += segments[i]->blocks() * kGroup;
  const int64_t threads = runner_.pool().threads();
  scratch_.hidden.grow(static_cast<size_t>(neurons * tokens) * sizeof(float));
  scratch_.gate_up.grow(static_cast<size_t>(threads * 2 * tokens * kTile) * sizeof(float));
  const float* bias = layer_.bias() ? layer_.bias() + added_ : nullptr;
  const Timed timed_up = time(Step::kGateUp, neurons * (layer_.record().rows() - 1),
                              neurons * (layer_.record().rows() - 1) * tokens);
  runner_.pool().parallel_for(neurons / kTile, 4, [&](int64_t begin, int64_t end, int thread) {
    int64_t i = 0, first = 0;  // the tile's segment, and that segment's first tile
    for (int64_t tile = begin; tile < end; ++tile) {
      while (first + segments[i]->blocks() * kTilesPerBlock <= tile)
        first += segments[i++]->blocks() * kTilesPerBlock;
      gate_up(*segments[i], tile - first, tokens, bias ? bias + tile * kTile : nullptr,
              hidden() + tile * kTile, neurons, thread, gates, added_ + tile * kTile);
    }
  });
  added_ += neurons;
  down(segments, count, tokens, neurons);
}

// 16 neurons of a segment: h[t * h_stride + r] = activation(gate) * up, or activation(gate). bias: of their
// gates, or null; gates of a gated layer have none. first: the layer's number of the first of the 16.
void FeedForwardPass::gate_up(const Segment& segment, int64_t tile, int64_t tokens, const float* bias,
                              float* h, int64_t h_stride, int thread, const GivenGates& gates,
                              int64_t first) {
  const KernelTable& kernels = runner_.kernels();
  const int64_t parts = layer_.record().rows() - 1, width_of_parts = parts * kTile;
  const uint8_t* gate = segment.data() + parts * tile * kTile * layer_.row_bytes();
  float* products = scratch_.gate_up.as<float>() + thread * 2 * tokens * kTile;
  if (layer_.bits() == 16) {
    for (int64_t part = 0; part < parts; ++part)
      kernels.linear_half(reinterpret_cast<const uint16_t*>(gate + part * kTile * layer_.row_bytes()),
                          width(), x_.padded, tokens, bias, nullptr, products + part * kTile, width_of_parts,
                          0, kTile);
  } else {
    kernels.linear_quantized(layer_.format(), gate, x_.quantized, tokens, bias, nullptr, products,
                             width_of_parts, width_of_parts, 0, parts);
  }
  const int64_t given = gates.values ? std::clamp<int64_t>(gates.stride - first, 0, kTile) : 0;
  for (int64_t t = 0; t < tokens; ++t, products += width_of_parts) {
    if (given) std::copy_n(gates.values + t * gates.stride + first, given, products);
    kernels.activate(form_, products, parts == 2 ? products + kTile : nullptr, h + t * h_stride, kTile);
  }
}

// Adds hidden activations (tokens, neurons) times the segments' down rows to the first outputs.
void FeedForwardPass::down(const Segment* const* segments, int64_t count, int64_t tokens, int64_t neurons) {
  const Timed timed = time(Step::kDown, neurons, neurons * tokens);
  const KernelTable& kernels = runner_.kernels();
  const int64_t groups = layer_.groups(), row_bytes = layer_.row_bytes();
  const float* h = hidden();
  float* y = outputs();
  if (layer_.bits() == 16) {
    runner_.pool().parallel_for(width() / kTile, 2, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = 0, column = 0; i < count; ++i) {
        const int64_t rows = segments[i]->blocks() * kGroup;
        const uint8_t* down = segments[i]->data() + (layer_.record().rows() - 1) * rows * row_bytes;
        kernels.down_half(reinterpret_cast<const uint16_t*>(down), width(), rows, h + column, neurons, tokens,
                          y, width(), begin * kTile, end * kTile);
        column += rows;
      }
    });
    return;
  }
  // Neighbouring groups are neighbours in a segment, so a thread takes several and reads long runs. At a 7B
  // shape that gives 36 GB/s instead of 32; plain reads of memory give 36.
  const int64_t grain = std::clamp<int64_t>(groups / (4 * runner_.pool().threads()), 1, 8);
  const int64_t block_bytes = layer_.down_block_bytes();
  runner_.pool().parallel_for(groups, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = 0, column = 0; i < count; ++i) {
      const int64_t blocks = segments[i]->blocks();
      const uint8_t* down = segments[i]->data() + (layer_.record().rows() - 1) * blocks * kGroup * row_bytes;
      for (int64_t g = begin; g < end; ++g)
        kernels.down_quantized(layer_.bits(), down + g * blocks * block_bytes, blocks, h + column, neurons,
                               tokens, y + g * kGroup, width(), scratch_.bias_lanes.as<float>() + g * kTile,
                               groups * kTile);
      column += blocks * kGroup;
    }
  });
}

void FeedForwardPass::finish(float* out, const float* added) {
  const int64_t hidden = layer_.hidden(), groups = layer_.groups();
  for (int64_t t = 0; t < x_.tokens; ++t) {
    float* y = outputs() + t * width();
    const float* lanes = scratch_.bias_lanes.as<float>() + t * groups * kTile;
    if (selected_order_) {
      order_selected(y, scratch_.bias_lanes.as<float>() + t * padded_to_tile(groups) * kTile);
      lanes = scratch_.ordered_lanes.as<float>();
    }
    runner_.kernels().add_bias_lanes(y, lanes, added ? added + t * hidden : nullptr, out + t * hidden,
                                     hidden);
  }
  input_version_ = 0;
}

}  // namespace ondevice
