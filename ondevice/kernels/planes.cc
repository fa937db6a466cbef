#include "planes.h"

#include <algorithm>

namespace ondevice {
namespace {

// The low two bits of each nibble of `bytes` bytes, those of both halves side by side, and the high two.
void split_nibbles(const uint8_t* from, int64_t bytes, uint8_t* high, uint8_t* low) {
  const int64_t half = bytes / 2;
  for (int64_t i = 0; i < half; ++i) {
    const unsigned first = from[i], second = from[i + half];
    high[i] = static_cast<uint8_t>((first >> 2 & 0x33) | (second & 0xcc));
    low[i] = static_cast<uint8_t>((first & 0x33) | (second & 0x33) << 2);
  }
}

// Codes of a block of 16 rows and 64 columns, as a tile has them -> the bytes of both planes.
void split_codes(int bits, const uint8_t* codes, uint8_t* high, uint8_t* low) {
  constexpr int64_t kCodes = kTile * kGroup;
  if (bits == 4) return split_nibbles(codes, kCodes / 2, high, low);
  if (bits == 8) {
    for (int64_t i = 0; i < kCodes / 2; ++i) {
      const unsigned first = codes[i], second = codes[i + kCodes / 2];
      high[i] = static_cast<uint8_t>(first >> 4 | (second & 0xf0));
      low[i] = static_cast<uint8_t>((first & 15) | (second & 15) << 4);
    }
    return;
  }
  // Half a block has its codes' low four bits and then the others.
  constexpr int64_t kFour = kCodes / 4;
  const int64_t above = kCodes / 2 * (bits - 4) / 8;
  for (int half = 0; half < 2; ++half, codes += kFour + above) {
    if (bits == 5) {
      split_nibbles(codes, kFour, high, low);
      high = std::copy_n(codes + kFour, above, high + kFour / 2);
      low += kFour / 2;
    } else {
      low = std::copy_n(codes, kFour, low);
      high = std::copy_n(codes + kFour, above, high);
    }
  }
}

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

}  // namespace

void split_tile(const RowFormat& format, int64_t groups, const uint8_t* tile, uint8_t* high, uint8_t* low) {
  each_block(
      format, groups,
      [&](int64_t from, int64_t to_high, int64_t to_low) {
        split_codes(format.bits, tile + from, high + to_high, low + to_low);
      },
      [&](int64_t from, int64_t to, int64_t bytes) { std::copy_n(tile + from, bytes, high + to); });
}

void join_tile(const KernelTable& kernels, const RowFormat& format, int64_t groups, const uint8_t* high,
               const uint8_t* low, uint8_t* tile) {
  each_block(
      format, groups,
      [&](int64_t to, int64_t from_high, int64_t from_low) {
        kernels.join_codes(format.bits, high + from_high, low + from_low, tile + to);
      },
      [&](int64_t to, int64_t from, int64_t bytes) { std::copy_n(high + from, bytes, tile + to); });
}

}  // namespace ondevice
