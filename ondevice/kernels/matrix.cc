#include "matrix.h"

#include <cstring>

#include "interleave.h"

namespace ondevice {
namespace {

// Tiles (16 rows) that a thread takes at a time, and rows of 16-bit weights.
constexpr int64_t kTileGrain = 8, kRowGrain = 32;

}  // namespace

void interleave_rows(ThreadPool& pool, const RowFormat& format, int64_t groups, int64_t row0, int64_t count,
                     const StoredRows& source, uint8_t* tiles, int64_t tile_stride) {
  const int64_t words = format.codes_bytes() / 4, block = tile_group_bytes(format);
  const int64_t parts = format.scales(), wide = format.scale_bytes();
  const int64_t first = row0 / kTile, last = (row0 + count - 1) / kTile;
  pool.parallel_for(last - first + 1, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = first + begin; tile < first + end; ++tile) {
      const int64_t low = tile * kTile < row0 ? row0 - tile * kTile : 0;
      const int64_t high = (tile + 1) * kTile > row0 + count ? row0 + count - tile * kTile : kTile;
      const int64_t base = tile * kTile - row0;
      for (int64_t g = 0; g < groups; ++g) {
        uint8_t* out = tiles + tile * tile_stride + g * block;
        uint8_t* scales = out + kTile * format.codes_bytes();
        uint8_t* biases = scales + wide * kTile * parts;
        const uint8_t* codes = source.codes + base * source.codes_stride + g * words * 4;
        const bool apart = in_planes(format.bits), whole = low == 0 && high == kTile && !apart;
        if (whole)
          for (int64_t r = 0; r < kTile; r += 4)
            for (int64_t w = 0; w < words; w += 4)
              transpose_words(codes + r * source.codes_stride + w * 4,
                              codes + (r + 1) * source.codes_stride + w * 4,
                              codes + (r + 2) * source.codes_stride + w * 4,
                              codes + (r + 3) * source.codes_stride + w * 4, out + w * 64 + r * 4);
        for (int64_t r = low; r < high; ++r) {
          if (apart) put_row(codes + r * source.codes_stride, format.bits, r, out);
          for (int64_t w = 0; w < words && !whole && !apart; ++w)
            std::memcpy(out + w * 64 + r * 4, codes + r * source.codes_stride + w * 4, 4);
          for (int64_t s = 0; s < parts; ++s) {
            const int64_t from = wide * (g * parts + s), to = wide * (s * kTile + r);
            std::memcpy(scales + to, source.scales + (base + r) * source.scales_stride + from,
                        static_cast<size_t>(wide));
            if (format.has_biases())
              std::memcpy(biases + to, source.biases + (base + r) * source.biases_stride + from, 2);
          }
        }
      }
    }
  });
}

void tile_two_level(ThreadPool& pool, const RowFormat& format, int64_t groups, int64_t rows,
                    const uint8_t* codes, const uint8_t* headers, uint8_t* tiles) {
  const int64_t width = format.codes_bytes(), header = format.header_bytes(), upper = format.upper_bytes();
  const int64_t supers = groups / kSuperGroup, bytes = kTile * format.row_bytes(kSuperGroup);
  pool.parallel_for((rows + kTile - 1) / kTile, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * supers; at < end * supers; ++at) {
      const int64_t row0 = at / supers * kTile, super = at % supers;
      uint8_t* out = tiles + at * bytes;
      for (int64_t r = 0; r < kTile && row0 + r < rows; ++r) {
        const uint8_t* from = headers + ((row0 + r) * supers + super) * header;
        for (int64_t k = 0; k < upper; k += 2) std::memcpy(out + k * kTile + 2 * r, from + k, 2);
        for (int64_t k = upper; k < header; ++k) out[k * kTile + r] = from[k];
        const uint8_t* row = codes + ((row0 + r) * groups + super * kSuperGroup) * width;
        uint8_t* block = out + header * kTile;
        for (int64_t b = 0; b < kSuperGroup; ++b, row += width, block += kTile * width)
          if (in_planes(format.bits))
            put_row(row, format.bits, r, block);
          else
            for (int64_t k = 0; k < width; k += 4) std::memcpy(block + k * kTile + 4 * r, row + k, 4);
      }
    }
  });
}

Matrix::Matrix(int64_t rows, int64_t cols, const RowFormat& format)
    : rows_(rows),
      cols_(cols),
      groups_(groups_of(cols)),
      format_(format),
      memory_(static_cast<size_t>(format.bits == 16
                                      ? rows * groups_ * kGroup * 2
                                      : (rows + kTile - 1) / kTile * groups_ * tile_group_bytes(format))) {}

void Matrix::load_rows(Runner& runner, int64_t row0, int64_t count, const StoredRows& source) {
  if (format_.bits != 16) {
    interleave_rows(runner.pool(), format_, groups_, row0, count, source, memory_.data(),
                    groups_ * tile_group_bytes(format_));
    return;
  }
  const int64_t bytes = groups_ * kGroup * 2;
  for (int64_t r = 0; r < count; ++r)
    std::memcpy(memory_.data() + (row0 + r) * bytes, source.codes + r * source.codes_stride,
                static_cast<size_t>(bytes));
}

void Matrix::forward(Runner& runner, const float* x, int64_t x_stride, int64_t tokens, const float* bias,
                     float* out, const Norm& norm, const float* added) const {
  multiply(runner, runner.prepare(x, x_stride, tokens, cols_, format_, norm), bias, out, added);
}

void Matrix::forward_heads(Runner& runner, const float* x, int64_t heads, int64_t tokens, float* out) const {
  const KernelTable& kernels = runner.kernels();
  const InputRows inputs = runner.prepare(x, cols_, heads * tokens, cols_, format_, {});
  const bool half = format_.bits == 16;
  const int64_t unit = half ? 1 : kTile, own = rows_ / heads / unit;
  runner.pool().parallel_for(
      rows_ / unit, half ? kRowGrain : kTileGrain, [&](int64_t begin, int64_t end, int) {
        for (int64_t at = begin; at < end;) {
          const int64_t head = at / own, stop = (head + 1) * own < end ? (head + 1) * own : end;
          if (half)
            kernels.linear_half(memory_.as<const uint16_t>(), groups_ * kGroup,
                                inputs.padded + head * tokens * groups_ * kGroup, tokens, nullptr, nullptr,
                                out, rows_, at, stop);
          else
            kernels.linear_quantized(format_, memory_.data(), inputs.quantized.from(head * tokens), tokens,
                                     nullptr, nullptr, out, rows_, rows_, at, stop);
          at = stop;
        }
      });
}

void Matrix::multiply(Runner& runner, const InputRows& x, const float* bias, float* out,
                      const float* added) const {
  const KernelTable& kernels = runner.kernels();
  if (format_.bits == 16) {
    runner.pool().parallel_for(rows_, kRowGrain, [&](int64_t begin, int64_t end, int) {
      kernels.linear_half(memory_.as<const uint16_t>(), groups_ * kGroup, x.padded, x.tokens, bias, added,
                          out, rows_, begin, end);
    });
    return;
  }
  runner.pool().parallel_for((rows_ + kTile - 1) / kTile, kTileGrain, [&](int64_t begin, int64_t end, int) {
    kernels.linear_quantized(format_, memory_.data(), x.quantized, x.tokens, bias, added, out, rows_, rows_,
                             begin, end);
  });
}

}  // namespace ondevice
