#include "error_feedback.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "interleave.h"

namespace ondevice {
namespace {

constexpr int64_t kBlock = 64;  // inputs between two updates of what comes after them
constexpr int64_t kRows = 16;   // rows that quantize_block takes

// Makes the upper triangle of the block (count, count) at h the factor V of V V^T. False if there is none.
bool factor_block(double* h, int64_t stride, int64_t count) {
  for (int64_t k = count - 1; k >= 0; --k) {
    const double pivot = h[k * stride + k];
    if (!(pivot > 0.0) || !std::isfinite(pivot)) return false;
    h[k * stride + k] = std::sqrt(pivot);
    for (int64_t i = 0; i < k; ++i) h[i * stride + k] /= h[k * stride + k];
    for (int64_t i = 0; i < k; ++i)
      for (int64_t j = i; j < k; ++j) h[i * stride + j] -= h[i * stride + k] * h[j * stride + k];
  }
  return true;
}

struct Groups {
  uint8_t codes[kRows * kGroup];                  // up to 8 bits each
  uint16_t scales[kRows * 2], biases[kRows * 2];  // of up to two groups, of which one is used
};

float widened(const KernelTable& kernels, uint16_t half) {
  float value;
  kernels.half_to_float(&half, &value, 1);
  return value;
}

// The code of t = w - bias, from 0 to top.
float code_of(float t, float scale, float top) {
  if (scale == 0.0f) return 0.0f;
  const float whole = 8388608.0f, x = t * (1.0f / scale);
  // Adding 2^23 rounds to an integer, half to even. NaN has the code 0.
  return (std::min(x > 0.0f ? x : 0.0f, top) + whole) - whole;
}

// One tile of up to 16 rows. `now` (rows, cols) begins as w, `errors` (rows, group) is scratch.
bool round_tile(const KernelTable& kernels, const float* w, int64_t rows, int64_t cols,
                const RowFormat& format, const float* factor, float* now, float* errors, uint8_t* codes,
                uint16_t* scales, uint16_t* biases) {
  const int64_t size = format.group, codes_bytes = groups_of(cols) * format.codes_bytes(),
                groups = groups_of(cols) * format.scales();
  const float top = static_cast<float>((1 << format.bits) - 1);
  std::memcpy(now, w, static_cast<size_t>(rows * cols) * sizeof(float));
  std::memset(codes, 0, static_cast<size_t>(rows * codes_bytes));
  std::fill(scales, scales + rows * groups, uint16_t{0});
  std::fill(biases, biases + rows * groups, uint16_t{0});
  float block[kRows * kGroup];
  for (int64_t first = 0; first < cols; first += size) {
    const int64_t n = std::min(size, cols - first), behind = first + n;
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(block + r * n, now + r * cols + first, static_cast<size_t>(n) * sizeof(float));
    Groups fitted;
    if (!kernels.quantize_block(format, block, rows, n, fitted.codes, fitted.scales, fitted.biases))
      return false;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * format.scales(), group = r * groups + first / size;
      const float scale = widened(kernels, fitted.scales[at]), bias = widened(kernels, fitted.biases[at]);
      float *mine = now + r * cols + first, *error = errors + r * size;
      uint8_t found[kGroup] = {0};
      for (int64_t c = 0; c < n; ++c) {
        const float code = code_of(mine[c] - bias, scale, top);
        found[c] = static_cast<uint8_t>(code);
        error[c] = w[r * cols + first + c] - (scale * code + bias);
        kernels.add_products(error + c, 1, factor + (first + c) * cols + first + c + 1, cols, mine + c + 1,
                             n - c - 1);
      }
      pack_codes(found, size, format.bits, codes + r * codes_bytes + first * format.bits / 8);
      scales[group] = fitted.scales[at];
      biases[group] = fitted.biases[at];
      if (behind < cols)
        kernels.add_products(error, n, factor + first * cols + behind, cols, now + r * cols + behind,
                             cols - behind);
    }
  }
  return true;
}

// The groups [g_begin, g_end) of every row. `now` (rows, width) and `errors` (64, width) are scratch, width
// being 16 groups.
bool round_strip(const KernelTable& kernels, const float* w, int64_t rows, int64_t cols,
                 const RowFormat& format, const float* factor, int64_t g_begin, int64_t g_end, float* now,
                 float* errors, uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  const int64_t groups = groups_of(cols), first = g_begin * kGroup, width = kRows * kGroup;
  const int64_t n = std::min(g_end * kGroup, cols) - first, whole = n / kGroup;
  for (int64_t j = 0; j < rows; ++j)
    std::memcpy(now + j * width, w + j * cols + first, static_cast<size_t>(n) * sizeof(float));
  const int64_t group_bytes = format.codes_bytes();
  float rounded[kGroup], column[kBlock];
  for (int64_t start = 0; start < rows; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, rows);
    for (int64_t i = start; i < stop; ++i) {
      float *mine = now + i * width, *error = errors + (i - start) * width;
      uint8_t* packed = codes + (i * groups + g_begin) * group_bytes;
      uint16_t *scale = scales + i * groups + g_begin, *bias = biases + i * groups + g_begin;
      if (whole && !kernels.quantize_block(format, mine, whole, kGroup, packed, scale, bias)) return false;
      if (n % kGroup && !kernels.quantize_block(format, mine + whole * kGroup, 1, n % kGroup,
                                                packed + whole * group_bytes, scale + whole, bias + whole))
        return false;
      for (int64_t g = 0; g * kGroup < n; ++g) {
        kernels.dequantize_row(format, packed + g * group_bytes, scale + g, bias + g, 1, rounded);
        for (int64_t c = g * kGroup; c < std::min(n, (g + 1) * kGroup); ++c)
          error[c] = w[i * cols + first + c] - rounded[c - g * kGroup];
      }
      for (int64_t j = i + 1; j < stop; ++j)
        kernels.add_products(factor + i * rows + j, 1, error, width, now + j * width, n);
    }
    for (int64_t j = stop; j < rows; ++j) {
      for (int64_t i = start; i < stop; ++i) column[i - start] = factor[i * rows + j];
      kernels.add_products(column, stop - start, errors, width, now + j * width, n);
    }
  }
  return true;
}

}  // namespace

bool feedback_factor(Runner& runner, double* h, int64_t n, float* factor) {
  const KernelTable& kernels = runner.kernels();
  std::vector<double> panel(static_cast<size_t>(kBlock * n));
  // Blocks of columns from the last to the first: h becomes V of h = V V^T above its diagonal.
  for (int64_t first = (n - 1) / kBlock * kBlock; first >= 0; first -= kBlock) {
    const int64_t count = std::min(kBlock, n - first);
    double* corner = h + first * n + first;
    if (!factor_block(corner, n, count)) return false;
    runner.pool().parallel_for(first, kRows, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        double* row = h + i * n + first;
        for (int64_t k = count - 1; k >= 0; --k) {
          for (int64_t m = count - 1; m > k; --m) row[k] -= row[m] * corner[k * n + m];
          row[k] /= corner[k * n + k];
          panel[static_cast<size_t>(k * n + i)] = row[k];
        }
      }
    });
    runner.pool().parallel_for(first, kRows, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        kernels.subtract_products(h + i * n + first, count, panel.data() + i, n, h + i * n + i, first - i);
    });
  }
  runner.pool().parallel_for(n, kRows, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      std::fill(factor + i * n, factor + i * n + i + 1, 0.0f);
      for (int64_t k = i + 1; k < n; ++k) factor[i * n + k] = static_cast<float>(h[i * n + k] / h[k * n + k]);
    }
  });
  return true;
}

bool round_columns(Runner& runner, const float* w, int64_t rows, int64_t cols, const RowFormat& format,
                   const float* factor, uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  const int64_t codes_bytes = groups_of(cols) * format.codes_bytes(),
                groups = groups_of(cols) * format.scales(), floats = kRows * (cols + kGroup);
  std::atomic<bool> finite{true};
  const KernelTable& kernels = runner.kernels();
  float* scratch = runner.scratch(floats);
  runner.pool().parallel_for((rows + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end, int thread) {
    float *now = scratch + thread * floats, *errors = now + kRows * cols;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i * kRows, count = std::min(kRows, rows - row);
      if (!round_tile(kernels, w + row * cols, count, cols, format, factor, now, errors,
                      codes + row * codes_bytes, scales + row * groups, biases + row * groups))
        finite.store(false);
    }
  });
  return finite.load();
}

bool round_rows(Runner& runner, const float* w, int64_t rows, int64_t cols, const RowFormat& format,
                const float* factor, uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  const int64_t groups = groups_of(cols), floats = (rows + kBlock) * kRows * kGroup;
  std::atomic<bool> finite{true};
  const KernelTable& kernels = runner.kernels();
  float* scratch = runner.scratch(floats);
  runner.pool().parallel_for((groups + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end, int thread) {
    float *now = scratch + thread * floats, *errors = now + rows * kRows * kGroup;
    for (int64_t i = begin; i < end; ++i)
      if (!round_strip(kernels, w, rows, cols, format, factor, i * kRows, std::min(groups, (i + 1) * kRows),
                       now, errors, codes, scales, biases))
        finite.store(false);
  });
  return finite.load();
}

}  // namespace ondevice
