// Codes of a block from the two planes in which they lie on flash.
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

constexpr int64_t kCodes = kTile * kGroup;

// HALF bytes of each plane, with two bits of four nibbles in each -> 2 * HALF bytes of nibbles.
template <int64_t HALF>
void join_nibbles(const uint8_t* high, const uint8_t* low, uint8_t* out) {
  for (int64_t i = 0; i < HALF; ++i) {
    const uint8_t h = high[i], l = low[i];
    out[i] = static_cast<uint8_t>((h & 0x33) << 2 | (l & 0x33));
    out[i + HALF] = static_cast<uint8_t>((h & 0xcc) | (l >> 2 & 0x33));
  }
}

void join_bytes(const uint8_t* high, const uint8_t* low, uint8_t* out) {
  for (int64_t i = 0; i < kCodes / 2; ++i) {
    const uint8_t h = high[i], l = low[i];
    out[i] = static_cast<uint8_t>(h << 4 | (l & 15));
    out[i + kCodes / 2] = static_cast<uint8_t>((h & 0xf0) | l >> 4);
  }
}

}  // namespace

void join_codes(int bits, const uint8_t* high, const uint8_t* low, uint8_t* codes) {
  constexpr int64_t kFour = kCodes / 4;  // bytes of the low four bits of half a block's codes
  if (bits == 4) return join_nibbles<kCodes / 4>(high, low, codes);
  if (bits == 8) return join_bytes(high, low, codes);
  for (int half = 0; half < 2; ++half) {
    if (bits == 5) {
      join_nibbles<kFour / 2>(high, low, codes);
      memcpy(codes + kFour, high + kFour / 2, kCodes / 16);
      high += kFour / 2 + kCodes / 16;
      low += kFour / 2;
      codes += kFour + kCodes / 16;
    } else {
      memcpy(codes, low, kFour);
      memcpy(codes + kFour, high, kCodes / 8);
      high += kCodes / 8;
      low += kFour;
      codes += kFour + kCodes / 8;
    }
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
