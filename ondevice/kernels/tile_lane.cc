#include "tile_lane.h"

#include <cmath>
#include <cstring>

#include "code_tables.h"
#include "interleave.h"

namespace ondevice {
namespace {

// A float16 that 16 rows have side by side.
float half_at(const KernelTable& kernels, const uint8_t* halves, int64_t lane) {
  uint16_t half;
  float value;
  std::memcpy(&half, halves + 2 * lane, sizeof(half));
  kernels.half_to_float(&half, &value, 1);
  return value;
}

// A row's 64 codes of a block, one a byte.
void lane_codes(const uint8_t* block, int bits, int64_t lane, uint8_t* codes) {
  std::memset(codes, 0, static_cast<size_t>(kGroup));
  const auto word_at = [&](const uint8_t* words, int64_t word) {
    uint32_t value;
    std::memcpy(&value, words + 4 * (kTile * word + lane), sizeof(value));
    return value;
  };
  if (!in_planes(bits)) {
    const int64_t each = 32 / bits;
    for (int64_t k = 0; k < kGroup; ++k)
      codes[k] = static_cast<uint8_t>(word_at(block, k / each) >> (bits * (k % each)) & ((1u << bits) - 1));
    return;
  }
  for (int64_t half = 0; half < 2; ++half, codes += kGroup / 2) {
    int below = 0;
    for (int wide = low_plane_bits(bits); wide; wide = below < bits ? bits - below : 0) {
      for (int64_t w = 0; w < wide; ++w) {
        const uint32_t word = word_at(block, w);
        for (int64_t j = 0; j < 4; ++j)
          for (int64_t c = 0; c < 8 / wide; ++c) {
            const uint32_t code = word >> (8 * j + wide * c) & ((1u << wide) - 1);
            codes[32 / wide * w + 8 * (c / 2) + 2 * j + c % 2] |= static_cast<uint8_t>(code << below);
          }
      }
      block += 4 * kTile * wide;
      below += wide;
    }
  }
}

float table_value(uint8_t code) { return static_cast<float>(kTableBytes[code] - 128); }

// A block of one level of scales.
void one_level(const KernelTable& kernels, const RowFormat& format, const uint8_t* block, int64_t lane,
               float* out) {
  uint8_t codes[kGroup];
  lane_codes(block, format.bits, lane, codes);
  const uint8_t* scales = block + kTile * format.codes_bytes();
  const uint8_t* biases = scales + kTile * format.scales() * format.scale_bytes();
  for (int64_t first = 0; first < kGroup; first += format.group) {
    const int64_t at = kTile * (first / format.group) * format.scale_bytes();
    const auto each = [&](auto value) {
      for (int64_t k = first; k < first + format.group; ++k) out[k] = value(codes[k]);
    };
    if (format.mxfp4()) {
      each([&](uint8_t code) { return std::ldexp(kE2m1[code], scales[at + lane] - 127); });
      continue;
    }
    const float scale = half_at(kernels, scales + at, lane);
    if (format.kind == ScaleKind::kTable) {
      each([&](uint8_t code) { return table_value(code) * scale; });
      continue;
    }
    const float zero = static_cast<float>(1 << (format.bits - 1));
    const float bias = format.implied() ? -zero * scale : half_at(kernels, biases + at, lane);
    each([&](uint8_t code) { return static_cast<float>(code) * scale + bias; });
  }
}

// The integers of a block's groups, of which there are at most four. from: of 16 rows.
void lane_integers(const RowFormat& format, const uint8_t* from, int64_t lane, int* scales, int* minimums) {
  const auto byte = [&](int64_t k) { return static_cast<int>(from[kTile * k + lane]); };
  if (format.bits == 3 || (format.kind == ScaleKind::kTwoLevel && format.bits > 2)) {
    // Six bits of four numbers; the fourth one's are the high bits of the others' bytes.
    int six[4] = {byte(0) & 63, byte(1) & 63, byte(2) & 63,
                  byte(0) >> 6 | byte(1) >> 6 << 2 | byte(2) >> 6 << 4};
    for (int i = 0; i < 4; ++i) {
      if (format.bits == 3)
        scales[i] = six[i] - 32;
      else
        (i % 2 ? minimums : scales)[i / 2] = six[i];
    }
    return;
  }
  for (int64_t group = 0; group < format.scales(); ++group) {
    const int value = byte(group);
    if (format.kind == ScaleKind::kTwoLevel) {
      scales[group] = value & 15;
      minimums[group] = value >> 4;
    } else {
      scales[group] = format.bits == 6 ? static_cast<int8_t>(value) : (value & 63) - 32;
    }
  }
}

// 256 columns of two levels of scales.
void two_levels(const KernelTable& kernels, const RowFormat& format, const uint8_t* header, int64_t lane,
                float* out) {
  const float d = half_at(kernels, header, lane);
  const float dmin = format.kind == ScaleKind::kTwoLevel ? half_at(kernels, header + 2 * kTile, lane) : 0.0f;
  const int zero = format.kind == ScaleKind::kTwoLevelSymmetric ? 1 << (format.bits - 1) : 0;
  const int64_t bytes = (format.header_bytes() - format.upper_bytes()) / kSuperGroup;
  for (int64_t b = 0; b < kSuperGroup; ++b, out += kGroup) {
    int scales[4], minimums[4] = {0, 0, 0, 0};
    lane_integers(format, header + kTile * (format.upper_bytes() + b * bytes), lane, scales, minimums);
    uint8_t codes[kGroup];
    lane_codes(header + kTile * (format.header_bytes() + b * format.codes_bytes()), format.bits, lane, codes);
    for (int64_t k = 0; k < kGroup; ++k) {
      const int64_t group = k / format.group;
      const float scale = d * static_cast<float>(scales[group]);
      const float value = format.kind == ScaleKind::kTwoLevelTable ? table_value(codes[k])
                                                                   : static_cast<float>(codes[k] - zero);
      out[k] = value * scale;
      if (format.kind == ScaleKind::kTwoLevel) out[k] -= dmin * static_cast<float>(minimums[group]);
    }
  }
}

}  // namespace

void dequantize_lane(const KernelTable& kernels, const RowFormat& format, const uint8_t* tile, int64_t lane,
                     int64_t groups, float* out) {
  if (format.bits == 16) {
    const int64_t cols = groups * kGroup;
    kernels.half_to_float(reinterpret_cast<const uint16_t*>(tile) + lane * cols, out, cols);
    return;
  }
  const int64_t together = format.two_levels() ? kSuperGroup : 1, bytes = kTile * format.row_bytes(together);
  for (int64_t g = 0; g < groups; g += together, tile += bytes, out += together * kGroup)
    (format.two_levels() ? two_levels : one_level)(kernels, format, tile, lane, out);
}

}  // namespace ondevice
