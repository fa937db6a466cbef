// The two planes in which a slice's matrices lie on flash: the high bits of codes, with scales, and the low
// bits. `weights/README.md`, "Two planes", has their bytes.
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace ondevice {

// Low bits of a code, which lie apart from the others; 0 where codes aren't divided.
constexpr int low_plane_bits_of(int bits) {
  return bits == 4 || bits == 5 ? 2 : bits == 6 || bits == 8 ? 4 : 0;
}

// Bytes of a tile of `groups` times 64 columns: of its low plane, and of its high one.
inline int64_t low_tile_bytes(const RowFormat& format, int64_t groups) {
  return kTile * kGroup * groups * low_plane_bits_of(format.bits) / 8;
}
inline int64_t high_tile_bytes(const RowFormat& format, int64_t groups) {
  return kTile * format.row_bytes(groups) - low_tile_bytes(format, groups);
}

// A tile -> its planes. The format has two.
void split_tile(const RowFormat& format, int64_t groups, const uint8_t* tile, uint8_t* high, uint8_t* low);
// The inverse, by a target's kernel.
void join_tile(const KernelTable& kernels, const RowFormat& format, int64_t groups, const uint8_t* high,
               const uint8_t* low, uint8_t* tile);

}  // namespace ondevice
