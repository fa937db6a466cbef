// Products with tiles, and with their high planes alone, by name.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/planes.h"
#include "made_up_inputs.h"

namespace {

using ondevice::ScaleKind;
using NamedFloats = std::vector<std::pair<std::string, Floats>>;

// Products with tiles of random bytes, whose float16 scales are small numbers, in one piece or tile by tile.
void tile_products(Runner& runner, const ondevice::RowFormat& format, int64_t rows, int64_t cols, bool split,
                   NamedFloats* out) {
  Random random(static_cast<uint64_t>(rows * 1000 + cols + format.bits));
  const int64_t groups = groups_of(cols), count = (rows + ondevice::kTile - 1) / ondevice::kTile;
  const int64_t span = format.two_levels() ? ondevice::kSuperGroup : 1;  // groups whose scales lie together
  const int64_t block = ondevice::kTile * format.row_bytes(span);
  const int64_t halves =
      ondevice::kTile * (format.two_levels() ? format.upper_bytes() : format.affine_bytes());
  const int64_t at = format.two_levels() ? 0 : ondevice::kTile * format.codes_bytes();
  Bytes tiles(static_cast<size_t>(count * groups / span * block));
  for (uint8_t& byte : tiles) byte = static_cast<uint8_t>(random.next() >> 56);
  for (int64_t begin = 0; begin < static_cast<int64_t>(tiles.size()); begin += block)
    for (int64_t k = 1; k < halves; k += 2) {
      uint8_t& high = tiles[static_cast<size_t>(begin + at + k)];
      high = static_cast<uint8_t>((high & 0x83) | 0x20);
    }
  const Floats bias = random.values(rows), x = random.values(83 * cols);
  const int64_t low_bytes = ondevice::low_tile_bytes(format, groups),
                high_bytes = ondevice::high_tile_bytes(format, groups);
  Bytes highs(static_cast<size_t>(count * high_bytes)), low(static_cast<size_t>(low_bytes));
  for (int64_t tile = 0; low_bytes && tile < count; ++tile)
    ondevice::split_tile(format, groups, tiles.data() + tile * (high_bytes + low_bytes),
                         highs.data() + tile * high_bytes, low.data());
  const std::string name = " kind=" + std::to_string(static_cast<int>(format.kind)) +
                           " bits=" + std::to_string(format.bits) + " " + std::to_string(rows) + "x" +
                           std::to_string(cols) + " tokens=";
  for (const int64_t tokens : {1, 2, 3, 5, 19, 83}) {
    Floats y(static_cast<size_t>(tokens * rows));
    const auto inputs = runner.prepare(x.data(), cols, tokens, cols, format);
    const int64_t step = split ? 1 : count;
    for (int64_t tile = 0; tile < count; tile += step)
      runner.kernels().linear_quantized(format, tiles.data(), inputs.quantized, tokens, bias.data(), nullptr,
                                        y.data(), rows, rows, tile, tile + step);
    out->emplace_back("tiles" + name + std::to_string(tokens), y);
    if (!low_bytes) continue;
    for (int64_t tile = 0; tile < count; tile += step)
      runner.kernels().linear_high(format, highs.data(), inputs.quantized, tokens, bias.data(), nullptr,
                                   y.data(), rows, rows, tile, tile + step);
    out->emplace_back("high planes" + name + std::to_string(tokens), y);
  }
}

NamedFloats all_tile_products(Runner& runner, bool split) {
  NamedFloats out;
  for (const ondevice::RowFormat& format :
       std::vector<ondevice::RowFormat>{{4},
                                        {4, 32, ScaleKind::kSymmetric},
                                        {5, 32},
                                        {6, 32},
                                        {8, 32, ScaleKind::kSymmetric},
                                        {8},
                                        {4, 32, ScaleKind::kTable},
                                        {2, 16, ScaleKind::kTwoLevel},
                                        {4, 32, ScaleKind::kTwoLevel},
                                        {5, 32, ScaleKind::kTwoLevel},
                                        {3, 16, ScaleKind::kTwoLevelSymmetric},
                                        {6, 16, ScaleKind::kTwoLevelSymmetric},
                                        {4, 32, ScaleKind::kTwoLevelTable}})
    for (const auto& [rows, cols] : std::vector<std::pair<int, int>>{{1, 256}, {37, 512}, {64, 1280}})
      tile_products(runner, format, rows, cols, split, &out);
  return out;
}

}  // namespace
