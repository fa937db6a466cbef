#include "layers.h"

#include <cstring>
#include <stdexcept>

#include "dispatch.h"
#include "interleave.h"

namespace ondevice {
namespace {

int64_t groups_of(int64_t cols) { return (cols + kGroup - 1) / kGroup; }

const KernelTable* require_target(const std::string& name, std::string* resolved) {
  const KernelTable* table = find_target(name, resolved);
  if (!table) throw std::invalid_argument("kernel target '" + name + "' can't run on this machine");
  return table;
}

// Query rows that share one walk over the keys: enough to amortise their conversion to float.
constexpr int64_t kQueryRows = 32;
// Tiles (16 rows) that a thread takes at a time.
constexpr int64_t kTileGrain = 8;

}  // namespace

Engine::Engine(int threads, const std::string& target)
    : pool_(new ThreadPool(threads)), table_(require_target(target, &target_)) {}

QuantizedRows Engine::quantize(const float* x, int64_t x_stride, int64_t tokens, int64_t cols,
                               bool nibble_order, const Norm& norm) {
  const int64_t groups = groups_of(cols), n = tokens * groups;
  x_codes_.grow(static_cast<size_t>(n * kGroup));
  x_scales_.grow(static_cast<size_t>(n) * sizeof(float));
  x_sums_.grow(static_cast<size_t>(n) * sizeof(float));
  x_int_sums_.grow(static_cast<size_t>(n) * sizeof(int32_t));
  const QuantizedRows rows{x_codes_.as<int8_t>(), x_scales_.as<float>(), x_sums_.as<float>(),
                           x_int_sums_.as<int32_t>(), groups};
  float* memory = norm.weight ? scratch(cols) : nullptr;
  pool_->parallel_for(tokens, 4, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t t = begin; t < end; ++t) {
      const float* row = x + t * x_stride;
      if (norm.weight) {
        float* normed = memory + thread * cols;
        table_->rms_norm(row, norm.weight, norm.eps, cols, normed);
        row = normed;
      }
      table_->quantize_activations(row, cols, nibble_order, rows, t);
    }
  });
  return rows;
}

const float* Engine::pad(const float* x, int64_t x_stride, int64_t tokens, int64_t cols, int64_t padded_cols,
                         const Norm& norm) {
  x_padded_.grow(static_cast<size_t>(tokens * padded_cols) * sizeof(float));
  float* out = x_padded_.as<float>();
  for (int64_t t = 0; t < tokens; ++t) {
    if (norm.weight)
      table_->rms_norm(x + t * x_stride, norm.weight, norm.eps, cols, out + t * padded_cols);
    else
      std::memcpy(out + t * padded_cols, x + t * x_stride, static_cast<size_t>(cols) * sizeof(float));
    std::memset(out + t * padded_cols + cols, 0, static_cast<size_t>(padded_cols - cols) * sizeof(float));
  }
  return out;
}

void Engine::attention(const AttentionArgs& args, int64_t tokens) {
  const int64_t shared = args.heads / args.kv.heads;
  const int64_t queries = shared >= kQueryRows ? 1 : kQueryRows / shared;
  const int64_t pieces = (tokens + queries - 1) / queries;
  const int64_t floats =
      attention_scratch_floats(args, args.position + tokens, (tokens < queries ? tokens : queries) * shared);
  float* memory = scratch(floats);
  pool_->parallel_for(pieces * args.kv.heads, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / args.kv.heads * queries;
      const int64_t last = first + queries < tokens ? first + queries : tokens;
      table_->attention(args, i % args.kv.heads, first, last, memory + thread * floats);
    }
  });
}

void Engine::attend(float* qkv, const Turn& turn, const AttentionArgs& args, int64_t tokens) {
  const int64_t dim = args.kv.head_dim, keys_at = args.heads * dim, values_at = keys_at + args.kv.heads * dim;
  pool_->parallel_for(tokens, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = qkv + t * args.q_stride;
      for (int64_t at = 0; at < values_at; at += dim) {
        const Norm& norm = at < keys_at ? turn.q_norm : turn.k_norm;
        if (norm.weight) table_->rms_norm(row + at, norm.weight, norm.eps, dim, row + at);
        table_->rope(row + at, turn.cos + t * dim / 2, turn.sin + t * dim / 2, dim);
      }
      table_->kv_write(args.kv, args.position + t, row + keys_at, row + values_at);
    }
  });
  attention(args, tokens);
}

float* Engine::scratch(int64_t floats) {
  scratch_.grow(static_cast<size_t>(floats * pool_->threads()) * sizeof(float));
  return scratch_.as<float>();
}

void Engine::trim() {
  for (Buffer* buffer : {&x_codes_, &x_scales_, &x_sums_, &x_int_sums_, &x_padded_, &scratch_, &h_, &y_,
                         &lanes_, &tile_, &ordered_lanes_, &narrow_, &scores_})
    *buffer = Buffer();
}

void interleave_rows(ThreadPool& pool, int bits, int64_t groups, int64_t row0, int64_t count,
                     const StoredRows& source, uint8_t* tiles, int64_t tile_stride) {
  const int64_t words = kGroup * bits / 32, block = tile_group_bytes(bits);
  const int64_t first = row0 / kTile, last = (row0 + count - 1) / kTile;
  pool.parallel_for(last - first + 1, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = first + begin; tile < first + end; ++tile) {
      const int64_t low = tile * kTile < row0 ? row0 - tile * kTile : 0;
      const int64_t high = (tile + 1) * kTile > row0 + count ? row0 + count - tile * kTile : kTile;
      const int64_t base = tile * kTile - row0;
      for (int64_t g = 0; g < groups; ++g) {
        uint8_t* out = tiles + tile * tile_stride + g * block;
        uint8_t* scales = out + kTile * kGroup * bits / 8;
        const uint8_t* codes = source.codes + base * source.codes_stride + g * words * 4;
        const bool whole = low == 0 && high == kTile;
        if (whole)
          for (int64_t r = 0; r < kTile; r += 4)
            for (int64_t w = 0; w < words; w += 4)
              transpose_words(codes + r * source.codes_stride + w * 4,
                              codes + (r + 1) * source.codes_stride + w * 4,
                              codes + (r + 2) * source.codes_stride + w * 4,
                              codes + (r + 3) * source.codes_stride + w * 4, out + w * 64 + r * 4);
        for (int64_t r = low; r < high; ++r) {
          for (int64_t w = 0; w < words && !whole; ++w)
            std::memcpy(out + w * 64 + r * 4, codes + r * source.codes_stride + w * 4, 4);
          std::memcpy(scales + r * 2, source.scales + (base + r) * source.scales_stride + g * 2, 2);
          std::memcpy(scales + 2 * kTile + r * 2, source.biases + (base + r) * source.biases_stride + g * 2,
                      2);
        }
      }
    }
  });
}

Matrix::Matrix(int64_t rows, int64_t cols, int bits)
    : rows_(rows),
      cols_(cols),
      groups_(groups_of(cols)),
      bits_(bits),
      memory_(static_cast<size_t>(bits == 16
                                      ? rows * groups_ * kGroup * 2
                                      : (rows + kTile - 1) / kTile * groups_ * tile_group_bytes(bits))) {}

void Matrix::load_rows(Engine& engine, int64_t row0, int64_t count, const StoredRows& source) {
  if (bits_ != 16) {
    interleave_rows(engine.pool(), bits_, groups_, row0, count, source, memory_.data(),
                    groups_ * tile_group_bytes(bits_));
    return;
  }
  const int64_t bytes = groups_ * kGroup * 2;
  for (int64_t r = 0; r < count; ++r)
    std::memcpy(memory_.data() + (row0 + r) * bytes, source.codes + r * source.codes_stride,
                static_cast<size_t>(bytes));
}

void Matrix::forward(Engine& engine, const float* x, int64_t x_stride, int64_t tokens, const float* bias,
                     float* out, const Norm& norm, const float* added) const {
  const KernelTable& kernels = engine.kernels();
  if (bits_ == 16) {
    const int64_t padded = groups_ * kGroup;
    const float* rows = engine.pad(x, x_stride, tokens, cols_, padded, norm);
    engine.pool().parallel_for(rows_, 32, [&](int64_t begin, int64_t end, int) {
      kernels.linear_half(memory_.as<const uint16_t>(), padded, rows, tokens, bias, added, out, rows_, begin,
                          end);
    });
    return;
  }
  const QuantizedRows rows = engine.quantize(x, x_stride, tokens, cols_, bits_ == 4, norm);
  engine.pool().parallel_for((rows_ + kTile - 1) / kTile, kTileGrain, [&](int64_t begin, int64_t end, int) {
    kernels.linear_quantized(bits_, memory_.data(), rows, tokens, bias, added, out, rows_, rows_, begin, end);
  });
}

}  // namespace ondevice
