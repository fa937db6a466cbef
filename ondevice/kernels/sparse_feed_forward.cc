// The feed-forward of selected neurons, from their records: no other neuron is multiplied. A neuron that
// isn't selected counts as zero and changes no bit of any sum, so where every neuron that fires is selected,
// the outputs are those of the dense feed-forward.
#include <algorithm>
#include <cstring>

#include "feed_forward_pass.h"
#include "interleave.h"

namespace ondevice {
namespace {

// While the tokens' own neurons are at most this many times those of all together, each token multiplies its
// own in place; beyond, rows are interleaved once for all tokens. Measured at 8 and 50 % firing, 1 to 64
// tokens.
constexpr double kMostOwn = 1.7;

// The scales of MXFP4 that gather_affines puts side by side: a byte each, two of 64 columns.
void gather_powers(int64_t groups, const uint8_t* const* rows, uint8_t* out, int64_t stride) {
  const int64_t from = groups * kGroup / 2;
  int64_t g = 0;
  for (; g + 8 <= groups; g += 8) {
    uint8_t columns[16 * kTile];
    transpose_bytes(rows, from + 2 * g, columns);
    for (int64_t i = 0; i < 8; ++i) std::memcpy(out + (g + i) * stride, columns + i * 2 * kTile, 2 * kTile);
  }
  for (; g < groups; ++g)
    for (int64_t r = 0; r < kTile; ++r)
      for (int64_t s = 0; s < 2; ++s) out[g * stride + s * kTile + r] = rows[r][from + 2 * g + s];
}

// Puts the scales and biases of 16 rows side by side; 64 columns' are `stride` bytes apart in `out`.
void gather_affines(const RowFormat& format, int64_t groups, const uint8_t* const* rows, uint8_t* out,
                    int64_t stride) {
  if (format.mxfp4()) return gather_powers(groups, rows, out, stride);
  const int64_t scales = format.scales(), count = groups * scales;
  for (int64_t affine = 0; affine < (format.has_biases() ? 2 : 1); ++affine, out += 2 * kTile * scales) {
    const int64_t from = groups * format.codes_bytes() + affine * 2 * count;
    int64_t s = 0;
    for (; s + 8 <= count; s += 8)
      for (int64_t r = 0; r < kTile; r += 8) {
        if (scales == 1) {
          transpose_halves(rows + r, from + 2 * s, out + s * stride + 2 * r, stride);
          continue;
        }
        uint8_t columns[8 * 16];
        transpose_halves(rows + r, from + 2 * s, columns, 16);
        for (int64_t i = 0; i < 8; ++i)
          std::memcpy(out + (s + i) / scales * stride + (s + i) % scales * 2 * kTile + 2 * r,
                      columns + 16 * i, 16);
      }
    for (; s < count; ++s)
      for (int64_t r = 0; r < kTile; ++r)
        std::memcpy(out + s / scales * stride + s % scales * 2 * kTile + 2 * r, rows[r] + from + 2 * s, 2);
  }
}

// 16 rows -> one interleaved tile. `next`, if not null: 16 rows to prefetch into the cache.
void gather_tile(const RowFormat& format, int64_t groups, const uint8_t* const* rows,
                 const uint8_t* const* next, uint8_t* tile) {
  const int64_t row_bytes = format.codes_bytes(), block = tile_group_bytes(format);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = 0; r < kTile; r += 4) {
      for (int64_t i = r; next && g * row_bytes % 64 < row_bytes && i < r + 4; ++i)
        __builtin_prefetch(next[i] + g * row_bytes);
      if (in_planes(format.bits)) {
        for (int64_t i = r; i < r + 4; ++i)
          put_row(rows[i] + g * row_bytes, format.bits, i, tile + g * block);
        continue;
      }
      for (int64_t at = 0; at < row_bytes; at += 16) {
        const int64_t from = g * row_bytes + at;
        transpose_words(rows[r] + from, rows[r + 1] + from, rows[r + 2] + from, rows[r + 3] + from,
                        tile + g * block + at * kTile + r * 4);
      }
    }
  for (int64_t r = 0; next && r < kTile; ++r) __builtin_prefetch(next[r] + groups * row_bytes);
  gather_affines(format, groups, rows, tile + kTile * row_bytes, block);
}

// Addresses of the rows of the 16 neurons in `columns`, `offset` bytes into their parts. -1 fills up the 16:
// those lanes have the first row and aren't used.
void rows_of_tile(const SelectedNeurons& neurons, const int32_t* columns, int64_t offset,
                  const uint8_t** rows) {
  for (int64_t r = 0; r < kTile; ++r) rows[r] = neurons.parts[columns[columns[r] < 0 ? 0 : r]] + offset;
}

// Whether a neuron counts for the token that gives it this score. Gates that don't count are zero, or the
// activation makes them so; other scores that don't are zero or less.
class Counts {
 public:
  Counts(const SelectedNeurons& neurons, const GateForm& form)
      : limited_(neurons.whole || form.makes_zeros()), limit_(neurons.whole ? 0.0f : form.threshold) {}
  bool operator()(float score) const { return limited_ ? !(score <= limit_) : score != 0; }

 private:
  bool limited_;
  float limit_;
};

}  // namespace

int64_t select(const float* scores, int64_t tokens, int64_t neurons, float limit, int32_t* ids) {
  int64_t count = 0;
  for (int64_t first = 0; first < neurons; first += kGroup) {
    const int64_t width = std::min(neurons - first, kGroup);
    uint8_t any[kGroup] = {0};
    for (int64_t t = 0; t < tokens; ++t) {
      const float* row = scores + t * neurons + first;
      if (width == kGroup)
        for (int64_t i = 0; i < kGroup; ++i) any[i] |= !(row[i] <= limit);
      else
        for (int64_t i = 0; i < width; ++i) any[i] |= !(row[i] <= limit);
    }
    for (int64_t i = 0; i < width; ++i) {
      ids[count] = static_cast<int32_t>(first + i);
      count += any[i];
    }
  }
  return count;
}

void FeedForwardPass::add_selected(const SelectedNeurons& neurons) {
  // The sum over a block of 64 stored neurons is one operation, so a block isn't split between batches.
  const int64_t most = std::max(kHiddenFloats / x_.tokens / kGroup * kGroup, kGroup);
  for (int64_t first = 0; first < neurons.count;) {
    int64_t end = std::min(first + most, neurons.count);
    if (end < neurons.count)
      while (neurons.ids[end] / kGroup == neurons.ids[end - 1] / kGroup) --end;
    SelectedNeurons batch = neurons;
    batch.ids += first;
    batch.parts += first;
    batch.count = end - first;
    add_selected_batch(batch);
    first = end;
  }
}

void FeedForwardPass::add_selected_batch(const SelectedNeurons& neurons) {
  const int64_t h_stride = padded_to_tile(neurons.count);
  scratch_.hidden.grow(static_cast<size_t>(x_.tokens * h_stride + kGroup) * sizeof(float));
  selected_hidden(neurons, h_stride);
  selected_down(neurons, h_stride);
}

// Lists columns of h in tiles of 16, filled up with -1, and of each tile its token. A token's tiles have the
// neurons that it selects; -1 as the token stands for all, and the tiles for all neurons. Returns the number
// of tiles.
int64_t FeedForwardPass::list_tiles(const SelectedNeurons& neurons, int64_t h_stride) {
  const int64_t most = std::max(h_stride, static_cast<int64_t>(kMostOwn * neurons.count)) + kTile * x_.tokens;
  scratch_.tile_columns.grow(static_cast<size_t>(most + kTile) * sizeof(int32_t));
  scratch_.tile_tokens.grow(static_cast<size_t>(most / kTile + 1) * sizeof(int32_t));
  int32_t* columns = scratch_.tile_columns.as<int32_t>();
  int32_t* tokens = scratch_.tile_tokens.as<int32_t>();
  const Counts counts(neurons, form_);
  int64_t end = 0, own = 0;
  for (int64_t t = 0; t < x_.tokens && own <= kMostOwn * neurons.count; ++t) {
    const float* scores = neurons.scores + t * neurons.scores_stride;
    const int64_t first = end;
    for (int64_t k = 0; k < neurons.count && own + end - first <= kMostOwn * neurons.count; ++k) {
      columns[end] = static_cast<int32_t>(k);
      end += counts(scores[neurons.ids[k]]);
    }
    own += end - first;
    for (; end % kTile; ++end) columns[end] = -1;
    std::fill(tokens + first / kTile, tokens + end / kTile, static_cast<int32_t>(t));
  }
  if (own <= kMostOwn * neurons.count) return end / kTile;
  for (int64_t k = 0; k < h_stride; ++k) columns[k] = k < neurons.count ? static_cast<int32_t>(k) : -1;
  std::fill(tokens, tokens + h_stride / kTile, -1);
  return h_stride / kTile;
}

// h[t * h_stride + k] = activation(gate) * up, or activation(gate), zero where a token doesn't select neuron
// k.
void FeedForwardPass::selected_hidden(const SelectedNeurons& neurons, int64_t h_stride) {
  const int64_t values = x_.tokens * kTile, threads = runner_.pool().threads();
  const int64_t tile_bytes = layer_.bits() == 16 ? 0 : layer_.groups() * tile_group_bytes(layer_.format());
  uint8_t* scratch = reinterpret_cast<uint8_t*>(runner_.scratch(tile_bytes / 4));
  scratch_.gate_up.grow(static_cast<size_t>(threads * 2 * values) * sizeof(float));
  std::memset(hidden(), 0, static_cast<size_t>(x_.tokens * h_stride) * sizeof(float));
  const int64_t tiles = list_tiles(neurons, h_stride);
  const int32_t* tile_tokens = scratch_.tile_tokens.as<int32_t>();
  const Counts counts(neurons, form_);
  const bool gated = layer_.record().gated();
  const float* bias = layer_.bias();
  const int64_t first_at = neurons.whole ? layer_.record().gate : 0;
  const int64_t rows = layer_.record().rows() - (neurons.whole ? 1 : 2);
  const int64_t lanes = tiles * kTile * (tiles && tile_tokens[0] < 0 ? x_.tokens : 1);
  const Timed timed = time(Step::kGateUp, rows * neurons.count, rows * lanes);
  runner_.pool().parallel_for(tiles, 2, [&](int64_t begin, int64_t end, int thread) {
    uint8_t* tile = scratch + thread * tile_bytes;
    float* gates = scratch_.gate_up.as<float>() + thread * 2 * values;
    float* ups = gates + values;
    const uint8_t *first[2][kTile], *second[kTile];
    const int32_t* columns = scratch_.tile_columns.as<int32_t>() + begin * kTile;
    rows_of_tile(neurons, columns, first_at, first[begin % 2]);
    for (int64_t i = begin; i < end; ++i, columns += kTile) {
      const int64_t t0 = std::max(tile_tokens[i], 0), tokens = tile_tokens[i] < 0 ? x_.tokens : 1;
      const float* scores = neurons.scores + t0 * neurons.scores_stride;
      const uint8_t** next = nullptr;
      if (i + 1 < end) rows_of_tile(neurons, columns + kTile, first_at, next = first[(i + 1) % 2]);
      if (neurons.whole) {
        if (gated) rows_of_tile(neurons, columns, layer_.record().up, second);
        gathered_products(first[i % 2], gated ? second : next, t0, tokens, tile, gates);
        if (gated) gathered_products(second, next, t0, tokens, tile, ups);
        for (int64_t k = 0; bias && k < tokens * kTile; ++k)
          if (columns[k % kTile] >= 0) gates[k] += bias[neurons.ids[columns[k % kTile]]];
      } else {
        if (gated) gathered_products(first[i % 2], next, t0, tokens, tile, ups);
        for (int64_t t = 0; t < tokens; ++t)
          for (int64_t r = 0; r < kTile; ++r)
            gates[t * kTile + r] =
                columns[r] < 0 ? 0.0f : scores[t * neurons.scores_stride + neurons.ids[columns[r]]];
      }
      runner_.kernels().activate(form_, gates, gated ? ups : nullptr, ups, tokens * kTile);
      for (int64_t t = 0; t < tokens; ++t) {
        float* h = hidden() + (t0 + t) * h_stride;
        // Of all tokens' tiles, where gates are scores, the activation has cleared what doesn't count.
        if (tile_tokens[i] < 0 && !neurons.whole)
          std::memcpy(h + columns[0], ups + t * kTile, kTile * sizeof(float));
        else
          for (int64_t r = 0; r < kTile && columns[r] >= 0; ++r)
            if (counts(scores[t * neurons.scores_stride + neurons.ids[columns[r]]]))
              h[columns[r]] = ups[t * kTile + r];
      }
    }
  });
}

void FeedForwardPass::gates_of(const uint8_t* const* records, int64_t count, float* gates) {
  const Timed timed = time(Step::kGateUp, count, count * x_.tokens);
  const int64_t values = x_.tokens * kTile, threads = runner_.pool().threads();
  const int64_t tile_bytes = layer_.bits() == 16 ? 0 : layer_.groups() * tile_group_bytes(layer_.format());
  uint8_t* scratch = reinterpret_cast<uint8_t*>(runner_.scratch(tile_bytes / 4));
  scratch_.gate_up.grow(static_cast<size_t>(threads * values) * sizeof(float));
  const auto rows_of = [&](int64_t tile, const uint8_t** rows) {
    // The last tile's free lanes repeat a row.
    for (int64_t r = 0; r < kTile; ++r)
      rows[r] = records[std::min(tile * kTile + r, count - 1)] + layer_.record().gate;
  };
  runner_.pool().parallel_for(padded_to_tile(count) / kTile, 2, [&](int64_t begin, int64_t end, int thread) {
    float* found = scratch_.gate_up.as<float>() + thread * values;
    const uint8_t* rows[2][kTile];
    rows_of(begin, rows[begin % 2]);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t** next = nullptr;
      if (i + 1 < end) rows_of(i + 1, next = rows[(i + 1) % 2]);
      gathered_products(rows[i % 2], next, 0, x_.tokens, scratch + thread * tile_bytes, found);
      const int64_t lanes = std::min(kTile, count - i * kTile);
      for (int64_t t = 0; t < x_.tokens; ++t)
        std::copy_n(found + t * kTile, lanes, gates + t * count + i * kTile);
    }
  });
}

// Products of 16 rows with tokens from t0 on -> (tokens, 16). `next`, if not null: 16 rows to prefetch into
// the cache.
void FeedForwardPass::gathered_products(const uint8_t* const* rows, const uint8_t* const* next, int64_t t0,
                                        int64_t tokens, uint8_t* tile, float* out) {
  const KernelTable& kernels = runner_.kernels();
  const int64_t groups = layer_.groups();
  const RowFormat& format = layer_.format();
  if (format.bits == 16) {
    for (int64_t r = 0; r < kTile; ++r)
      kernels.linear_half(reinterpret_cast<const uint16_t*>(rows[r]), width(), x_.padded + t0 * width(),
                          tokens, nullptr, nullptr, out + r, kTile, 0, 1);
    return;
  }
  const QuantizedRows x = x_.quantized.from(t0);
  if (tokens == 1) {
    gather_affines(format, groups, rows, tile, kTile * format.affine_bytes());
    kernels.linear_gathered(format, rows, next, tile, x, out);
  } else {
    gather_tile(format, groups, rows, next, tile);
    kernels.linear_quantized(format, tile, x, tokens, nullptr, nullptr, out, kTile, kTile, 0, 1);
  }
}

void FeedForwardPass::selected_down(const SelectedNeurons& neurons, int64_t h_stride) {
  const KernelTable& kernels = runner_.kernels();
  const int64_t tokens = x_.tokens, groups = layer_.groups();
  const Timed timed = time(Step::kDown, neurons.count, neurons.count * tokens);
  const int64_t down = layer_.record().down - (neurons.whole ? 0 : layer_.record().up);
  const float* h = hidden();
  float* y = outputs();
  if (layer_.bits() == 16) {
    runner_.pool().parallel_for(width() / kTile, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t k = 0; k < neurons.count; ++k)
        kernels.down_half(reinterpret_cast<const uint16_t*>(neurons.parts[k] + down), width(), 1, h + k,
                          h_stride, tokens, y, width(), begin * kTile, end * kTile);
    });
    return;
  }
  // A thread takes one piece of every row, whole runs of 16 groups, so that it reads long runs. Where there
  // are fewer pieces than threads, the tokens are divided as well.
  const int64_t threads = runner_.pool().threads();
  const int64_t grain = padded_to_tile((groups + threads - 1) / threads);
  const int64_t pieces = (groups + grain - 1) / grain;
  const int64_t share = pieces < threads ? (tokens * pieces + threads - 1) / threads : tokens;
  const int64_t shares = (tokens + share - 1) / share;
  const int64_t lanes_width = padded_to_tile(groups) * kTile;
  if (!selected_order_) {
    const size_t bytes = static_cast<size_t>(tokens * lanes_width) * sizeof(float);
    scratch_.bias_lanes.grow(bytes);
    std::memset(scratch_.bias_lanes.data(), 0, bytes);
    selected_order_ = true;
  }
  float* lanes = scratch_.bias_lanes.as<float>();
  runner_.pool().parallel_for(pieces * shares, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t g0 = i % pieces * grain, g1 = std::min(g0 + grain, groups), t = i / pieces * share;
      kernels.down_selected(layer_.bits(), {neurons.ids, neurons.parts, down, neurons.count}, groups, g0, g1,
                            h + t * h_stride, h_stride, std::min(share, tokens - t), y + t * width(), width(),
                            lanes + t * lanes_width, lanes_width);
    }
  });
}

// One token's outputs and bias lanes, which down_selected left in an order of its own, -> the order of
// groups: outputs in place, lanes into ordered_lanes.
void FeedForwardPass::order_selected(float* y, const float* lanes) {
  const int64_t groups = layer_.groups();
  if (layer_.bits() == 4) runner_.kernels().unzip_outputs(y, groups);
  scratch_.ordered_lanes.grow(static_cast<size_t>(groups * kTile) * sizeof(float));
  float* ordered = scratch_.ordered_lanes.as<float>();
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t lane = 0; lane < kTile; ++lane)
      ordered[g * kTile + lane] = lanes[(g / kTile * kTile + lane) * kTile + g % kTile];
}

}  // namespace ondevice
