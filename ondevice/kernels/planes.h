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

// Codes of a block of 16 rows and 64 columns, as a tile has them -> the bytes of both planes.
void split_codes(int bits, const uint8_t* codes, uint8_t* high, uint8_t* low);

// Calls codes(tile, high, low) with the places, bytes behind their starts, of each block's codes, and
// scales(tile, high, bytes) with those of what else a tile has: the same in its high plane.
template <class Codes, class Scales>
void each_block(const RowFormat& format, int64_t groups, const Codes& codes, const Scales& scales) {
  const int64_t whole = kTile * format.codes_bytes(), low = low_tile_bytes(format, 1), high = whole - low;
  const int64_t blocks = format.two_levels() ? kSuperGroup : 1;
  const int64_t header = format.two_levels() ? kTile * format.header_bytes() : 0;
  const int64_t affine = format.two_levels() ? 0 : kTile * format.affine_bytes();
  int64_t in_tile = 0, in_high = 0, in_low = 0;
  const auto copy = [&](int64_t bytes) {
    if (!bytes) return;
    scales(in_tile, in_high, bytes);
    in_tile += bytes;
    in_high += bytes;
  };
  for (int64_t g = 0; g < groups; g += blocks) {
    copy(header);
    for (int64_t b = 0; b < blocks; ++b) {
      codes(in_tile, in_high, in_low);
      in_tile += whole;
      in_high += high;
      in_low += low;
    }
    copy(affine);
  }
}

// A tile -> its planes. The format has two.
void split_tile(const RowFormat& format, int64_t groups, const uint8_t* tile, uint8_t* high, uint8_t* low);
// The inverse, by a target's kernel. low: null for the middle of what the low bits may be.
void join_tile(const KernelTable& kernels, const RowFormat& format, int64_t groups, const uint8_t* high,
               const uint8_t* low, uint8_t* tile);

}  // namespace ondevice
