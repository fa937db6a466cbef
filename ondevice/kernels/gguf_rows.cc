#include "gguf_rows.h"

#include <cstring>

#include "interleave.h"

namespace ondevice {
namespace {

const TileType kTypes[] = {
    {"Q2_K", 256, 84, {2, 16, ScaleKind::kTwoLevel}},
    {"Q3_K", 256, 110, {3, 16, ScaleKind::kTwoLevelSymmetric}},
    {"Q4_K", 256, 144, {4, 32, ScaleKind::kTwoLevel}},
    {"Q5_K", 256, 176, {5, 32, ScaleKind::kTwoLevel}},
    {"Q6_K", 256, 210, {6, 16, ScaleKind::kTwoLevelSymmetric}},
    {"IQ4_NL", 32, 18, {4, 32, ScaleKind::kTable}},
    {"IQ4_XS", 256, 136, {4, 32, ScaleKind::kTwoLevelTable}},
};
enum Kind { kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kIq4Xs };

constexpr int64_t kMost = kSuperGroup * kGroup;

// Adds fields of WIDTH bits to numbers, LEFT places further left. In each stretch of bytes the lowest fields
// come first.
template <int WIDTH, int LEFT, int64_t STRETCH>
inline void add_fields(const uint8_t* __restrict from, int64_t bytes, uint8_t* __restrict numbers) {
  constexpr uint8_t kMask = (1 << WIDTH) - 1;
  for (int64_t at = 0; at < bytes; at += STRETCH)
    for (int field = 0; field < 8 / WIDTH; ++field, numbers += STRETCH)
      for (int64_t i = 0; i < STRETCH; ++i)
        numbers[i] = static_cast<uint8_t>(numbers[i] | (from[at + i] >> (WIDTH * field) & kMask) << LEFT);
}

// Four numbers of six bits -> three bytes, whose high two bits hold the fourth one's.
inline void pack_six_bits(uint8_t a, uint8_t b, uint8_t c, uint8_t fourth, uint8_t* out) {
  out[0] = static_cast<uint8_t>(a | (fourth & 3) << 6);
  out[1] = static_cast<uint8_t>(b | (fourth >> 2 & 3) << 6);
  out[2] = static_cast<uint8_t>(c | fourth >> 4 << 6);
}

// Of Q4_K and Q5_K: the last four scales and minimums have their upper two bits in the bytes of the first.
inline void copy_six_bits(const uint8_t* s, uint8_t* out) {
  uint8_t scales[8], minimums[8];
  for (int p = 0; p < 4; ++p) {
    scales[p] = s[p] & 63, minimums[p] = s[4 + p] & 63;
    scales[4 + p] = static_cast<uint8_t>((s[8 + p] & 15) | s[p] >> 6 << 4);
    minimums[4 + p] = static_cast<uint8_t>(s[8 + p] >> 4 | s[4 + p] >> 6 << 4);
  }
  for (int p = 0; p < 8; p += 2, out += 3)
    pack_six_bits(scales[p], minimums[p], scales[p + 1], minimums[p + 1], out);
}

// A block's codes, one a byte and zero before, and its scales.
template <Kind KIND>
inline void read_block(const uint8_t* block, uint8_t* codes, uint8_t* scales) {
  if constexpr (KIND == kQ2_K) {
    add_fields<2, 0, 32>(block + 16, 64, codes);
    std::memcpy(scales, block + 80, 4);
    std::memcpy(scales + 4, block, 16);
  } else if constexpr (KIND == kQ3_K) {
    add_fields<2, 0, 32>(block + 32, 64, codes);
    add_fields<1, 2, 32>(block, 32, codes);
    uint8_t integers[16] = {0};
    add_fields<4, 0, 8>(block + 96, 8, integers);
    add_fields<2, 4, 4>(block + 104, 4, integers);
    std::memcpy(scales, block + 108, 2);
    for (int p = 0; p < 16; p += 4)
      pack_six_bits(integers[p], integers[p + 1], integers[p + 2], integers[p + 3], scales + 2 + p / 4 * 3);
  } else if constexpr (KIND == kQ4_K || KIND == kQ5_K) {
    add_fields<4, 0, 32>(block + (KIND == kQ4_K ? 16 : 48), 128, codes);
    if (KIND == kQ5_K) add_fields<1, 4, 32>(block + 16, 32, codes);
    std::memcpy(scales, block, 4);
    copy_six_bits(block + 4, scales + 4);
  } else if constexpr (KIND == kQ6_K) {
    add_fields<4, 0, 64>(block, 128, codes);
    add_fields<2, 4, 32>(block + 128, 64, codes);
    std::memcpy(scales, block + 208, 2);
    std::memcpy(scales + 2, block + 192, 16);
  } else if constexpr (KIND == kIq4Nl) {
    add_fields<4, 0, 16>(block + 2, 16, codes);
    std::memcpy(scales, block, 2);
  } else {
    add_fields<4, 0, 16>(block + 8, 128, codes);
    std::memcpy(scales, block, 2);
    std::memset(scales + 2, 0, 8);
    add_fields<4, 0, 1>(block + 4, 4, scales + 2);
    add_fields<2, 4, 1>(block + 2, 2, scales + 2);
  }
}

template <Kind KIND>
void copy_blocks(const uint8_t* data, int64_t blocks, uint8_t* out, uint8_t* scales) {
  const TileType& type = kTypes[KIND];
  const int64_t codes_bytes = type.values * type.stored.bits / 8,
                scales_bytes = type.stored.two_levels() ? type.stored.header_bytes() : 2;
  for (int64_t b = 0; b < blocks; ++b, data += type.nbytes, out += codes_bytes, scales += scales_bytes) {
    uint8_t codes[kMost] = {0};
    read_block<KIND>(data, codes, scales);
    pack_codes(codes, type.values, type.stored.bits, out);
  }
}

using Copy = void (*)(const uint8_t*, int64_t, uint8_t*, uint8_t*);
constexpr Copy kCopies[] = {copy_blocks<kQ2_K>, copy_blocks<kQ3_K>,  copy_blocks<kQ4_K>, copy_blocks<kQ5_K>,
                            copy_blocks<kQ6_K>, copy_blocks<kIq4Nl>, copy_blocks<kIq4Xs>};

}  // namespace

const TileType* find_tile_type(const std::string& name) {
  for (const TileType& type : kTypes)
    if (name == type.name) return &type;
  return nullptr;
}

void copy_rows(const TileType& type, const uint8_t* data, int64_t blocks, uint8_t* codes, uint8_t* scales) {
  kCopies[&type - kTypes](data, blocks, codes, scales);
}

}  // namespace ondevice
