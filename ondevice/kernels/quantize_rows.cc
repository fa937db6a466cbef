#include "quantize_rows.h"

#include <atomic>
#include <cstring>

namespace ondevice {
namespace {

constexpr int64_t kRows = 16;

void widen(const KernelTable& kernels, SourceType type, const uint8_t* data, int64_t n, float* out) {
  if (type == SourceType::kFloat) {
    std::memcpy(out, data, static_cast<size_t>(n) * sizeof(float));
  } else if (type == SourceType::kHalf) {
    kernels.half_to_float(reinterpret_cast<const uint16_t*>(data), out, n);
  } else {
    const uint16_t* in = reinterpret_cast<const uint16_t*>(data);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
      std::memcpy(out + i, &bits, sizeof(bits));
    }
  }
}

// Up to 16 rows as floats. In a transposed source the rows' values are neighbours, and are read together.
void gather(const KernelTable& kernels, const SourceRows& source, int64_t row, int64_t count, int64_t cols,
            float* out) {
  const int64_t bytes = source.type == SourceType::kFloat ? 4 : 2;
  if (source.col_stride == 1) {
    for (int64_t r = 0; r < count; ++r)
      widen(kernels, source.type, source.data + (row + r) * source.row_stride * bytes, cols, out + r * cols);
    return;
  }
  const int64_t step = source.row_stride == 1 ? count : 1;
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = 0; r < count; r += step) {
      float values[kRows];
      widen(kernels, source.type,
            source.data + ((row + r) * source.row_stride + c * source.col_stride) * bytes, step, values);
      for (int64_t k = 0; k < step; ++k) out[(r + k) * cols + c] = values[k];
    }
}

}  // namespace

bool quantize_rows(Runner& runner, const SourceRows& source, int64_t rows, int64_t cols,
                   const RowFormat& format, uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  const int64_t codes_bytes = groups_of(cols) * format.codes_bytes(),
                groups = groups_of(cols) * format.scales();
  std::atomic<bool> finite{true};
  const KernelTable& kernels = runner.kernels();
  float* scratch = runner.scratch(kRows * cols);
  runner.pool().parallel_for((rows + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end, int thread) {
    float* values = scratch + thread * kRows * cols;
    bool good = true;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i * kRows, count = rows - row < kRows ? rows - row : kRows;
      if (format.bits < 8 && source.row_stride == 1 && source.type == SourceType::kFloat && count == kRows) {
        const float* lanes = reinterpret_cast<const float*>(source.data) + row;
        good &=
            kernels.quantize_lanes(format, lanes, source.col_stride, kRows, cols, codes + row * codes_bytes,
                                   scales + row * groups, biases + row * groups);
        continue;
      }
      gather(kernels, source, row, count, cols, values);
      if (format.bits != 16) {
        good &= kernels.quantize_block(format, values, count, cols, codes + row * codes_bytes,
                                       scales + row * groups, biases + row * groups);
        continue;
      }
      for (int64_t r = 0; r < count; ++r) {
        uint8_t* out = codes + (row + r) * codes_bytes;
        good &= kernels.float_to_half(values + r * cols, reinterpret_cast<uint16_t*>(out), cols);
        std::memset(out + 2 * cols, 0, static_cast<size_t>(codes_bytes - 2 * cols));
      }
    }
    if (!good) finite.store(false);
  });
  return finite.load();
}

}  // namespace ondevice
