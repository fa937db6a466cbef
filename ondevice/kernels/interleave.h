// Small transpositions that turn stored rows into the kernels' interleaved form: data movement only, written
// once in the vector types of GCC and Clang. The functions are static because each target compiles its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace ondevice {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Halves8 __attribute__((vector_size(16)));
typedef uint32_t Words4 __attribute__((vector_size(16)));

template <class V>
ONDEVICE_INLINE V load_vector(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// 4 rows of 4 words -> 4 columns of 4 words, `stride` bytes apart.
ONDEVICE_INLINE void transpose_words(const uint8_t* row0, const uint8_t* row1, const uint8_t* row2,
                                     const uint8_t* row3, uint8_t* out, int64_t stride = 64) {
  const Words4 a = load_vector<Words4>(row0), b = load_vector<Words4>(row1);
  const Words4 c = load_vector<Words4>(row2), d = load_vector<Words4>(row3);
  const Words4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Words4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Words4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Words4 cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Words4 columns[4] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                             __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                             __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                             __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(out + stride * i, &columns[i], 16);
}

// 8 rows of 8 halves -> 8 columns of 8 halves, `stride` bytes apart.
ONDEVICE_INLINE void transpose_halves(const uint8_t* const* rows, int64_t offset, uint8_t* out,
                                      int64_t stride) {
  Halves8 r[8], pairs[8], quads[8];
  for (int i = 0; i < 8; ++i) r[i] = load_vector<Halves8>(rows[i] + offset);
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 2, 10, 3, 11);
    pairs[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      quads[i + 2 * k] = __builtin_shufflevector(pairs[i + k], pairs[i + k + 2], 0, 1, 8, 9, 2, 3, 10, 11);
      quads[i + 2 * k + 1] =
          __builtin_shufflevector(pairs[i + k], pairs[i + k + 2], 4, 5, 12, 13, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    const Halves8 even = __builtin_shufflevector(quads[i], quads[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const Halves8 odd = __builtin_shufflevector(quads[i], quads[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(out + 2 * i * stride, &even, 16);
    std::memcpy(out + (2 * i + 1) * stride, &odd, 16);
  }
}

// 4 rows of 16 bytes -> 16 quads of 4 bytes.
ONDEVICE_INLINE void interleave_bytes(Bytes16 a, Bytes16 b, Bytes16 c, Bytes16 d, Bytes16 quads[4]) {
#define ONDEVICE_ZIP_LOW(x, y) \
  __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ONDEVICE_ZIP_HIGH(x, y) \
  __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define ONDEVICE_ZIP_PAIRS_LOW(x, y) \
  __builtin_shufflevector(x, y, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23)
#define ONDEVICE_ZIP_PAIRS_HIGH(x, y) \
  __builtin_shufflevector(x, y, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31)
  const Bytes16 ab_low = ONDEVICE_ZIP_LOW(a, b), ab_high = ONDEVICE_ZIP_HIGH(a, b);
  const Bytes16 cd_low = ONDEVICE_ZIP_LOW(c, d), cd_high = ONDEVICE_ZIP_HIGH(c, d);
  quads[0] = ONDEVICE_ZIP_PAIRS_LOW(ab_low, cd_low);
  quads[1] = ONDEVICE_ZIP_PAIRS_HIGH(ab_low, cd_low);
  quads[2] = ONDEVICE_ZIP_PAIRS_LOW(ab_high, cd_high);
  quads[3] = ONDEVICE_ZIP_PAIRS_HIGH(ab_high, cd_high);
#undef ONDEVICE_ZIP_LOW
#undef ONDEVICE_ZIP_HIGH
#undef ONDEVICE_ZIP_PAIRS_LOW
#undef ONDEVICE_ZIP_PAIRS_HIGH
}

// The same into memory, by 16-byte stores: a load must wait if it spans several narrower stores.
ONDEVICE_INLINE void interleave_bytes(Bytes16 a, Bytes16 b, Bytes16 c, Bytes16 d, uint8_t* out) {
  Bytes16 quads[4];
  interleave_bytes(a, b, c, d, quads);
  for (int i = 0; i < 4; ++i) std::memcpy(out + 16 * i, &quads[i], 16);
}

// 16 rows of 16 bytes -> 16 columns of 16 bytes, one after the other.
ONDEVICE_INLINE void transpose_bytes(const uint8_t* const* rows, int64_t offset, uint8_t* out) {
  uint8_t quads[4][64];  // of four rows each
  for (int i = 0; i < 4; ++i)
    interleave_bytes(load_vector<Bytes16>(rows[4 * i] + offset),
                     load_vector<Bytes16>(rows[4 * i + 1] + offset),
                     load_vector<Bytes16>(rows[4 * i + 2] + offset),
                     load_vector<Bytes16>(rows[4 * i + 3] + offset), quads[i]);
  for (int k = 0; k < 64; k += 16)
    transpose_words(quads[0] + k, quads[1] + k, quads[2] + k, quads[3] + k, out + 4 * k, 16);
}

// 16 four-bit codes of two neurons -> 16 bytes, the first neuron's codes in the low nibbles.
ONDEVICE_INLINE Bytes16 join_nibbles(const uint8_t* first, const uint8_t* second) {
  constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
  uint64_t a, b;
  std::memcpy(&a, first, 8);
  std::memcpy(&b, second, 8);
  typedef uint64_t Halves __attribute__((vector_size(16)));
  const Halves even = {(a & kLow) | ((b & kLow) << 4), 0}, odd = {((a >> 4) & kLow) | (b & ~kLow), 0};
  return __builtin_shufflevector((Bytes16)even, (Bytes16)odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                 7, 23);
}

// Codes of 2 to 6 bits.
//
// Stored rows hold them without gaps, low bits first. In tiles they lie in planes: a half block, 16 rows of
// 32 columns, has first the low 2 bits of codes of 2 and 3 bits, or the low 4 bits of others, then the bits
// above them. A plane of H bits is H vectors of 64 bytes, a word of each row side by side. Byte j of word w
// has, at bit H * c, the bits of column 32 / H * w + 8 * (c / 2) + 2 * j + c % 2. At 4 bits that is the order
// of stored rows.

// Bits of a code in its low plane.
constexpr int low_plane_bits(int bits) { return bits < 4 ? 2 : 4; }

// True for the formats whose tiles don't hold words as stored rows do.
constexpr bool in_planes(int bits) { return bits != 4 && bits < 8; }

// Eight codes of `bits` bits, 2 to 8, in the low bits of each 64-bit lane -> eight bytes in their order.
template <class V>
ONDEVICE_INLINE V spread_codes(V x, int bits) {
  const uint64_t four = (uint64_t{1} << 4 * bits) - 1;
  const uint64_t two = ((uint64_t{1} << 2 * bits) - 1) * 0x0000000100000001;
  const uint64_t one = ((uint64_t{1} << bits) - 1) * 0x0001000100010001;
  x = (x & four) | ((x & four << 4 * bits) << (32 - 4 * bits));
  x = (x & two) | ((x & two << 2 * bits) << (16 - 2 * bits));
  return (x & one) | ((x & one << bits) << (8 - bits));
}

// The even bytes of each 64-bit lane -> its low 32 bits. The odd bytes are zero.
template <class V>
ONDEVICE_INLINE V even_bytes(V x) {
  x = (x | x >> 8) & uint64_t{0x0000ffff0000ffff};
  return (x | x >> 16) & uint64_t{0x00000000ffffffff};
}

// `count` codes, one a byte -> `bits` bits each without gaps, low bits first. count: a multiple of 8.
ONDEVICE_INLINE void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  constexpr uint64_t kBytes = 0x00ff00ff00ff00ff, kWords = 0x0000ffff0000ffff;
  for (int64_t k = 0; k < count; k += 8, out += bits) {
    uint64_t x;
    std::memcpy(&x, codes + k, 8);
    x = (x & kBytes) | (x >> 8 & kBytes) << bits;
    x = (x & kWords) | (x >> 16 & kWords) << (2 * bits);
    x = (x & 0xffffffff) | x >> 32 << (4 * bits);
    std::memcpy(out, &x, static_cast<size_t>(bits));
  }
}

// Bytes of a half block of a tile: 16 rows of 32 columns.
constexpr int64_t half_block_bytes(int bits) { return 64 * bits; }

// Puts eight numbers of `wide` bits, one a byte, into a plane: those of row r's columns 8 * v to 8 * v + 7.
// v counts from 0 to 3, as the first ones of a word overwrite it.
ONDEVICE_INLINE void put_plane(uint64_t numbers, int wide, int64_t r, int64_t v, uint8_t* plane) {
  constexpr uint64_t kEven = 0x00ff00ff00ff00ff;
  const int per_word = 4 / wide;  // times 8 columns
  const uint64_t pairs = (numbers & kEven) | (numbers >> 8 & kEven) << wide;
  uint8_t* at = plane + 64 * (v / per_word) + 4 * r;
  uint32_t word = 0;
  if (v % per_word) std::memcpy(&word, at, 4);
  word |= static_cast<uint32_t>(even_bytes(pairs)) << (2 * wide * (v % per_word));
  std::memcpy(at, &word, 4);
}

// Puts eight codes, one a byte, into a half block, for v from 0 to 3 as put_plane does.
ONDEVICE_INLINE void put_codes(uint64_t codes, int bits, int64_t r, int64_t v, uint8_t* half_block) {
  constexpr uint64_t kOnes = 0x0101010101010101;
  const int low = low_plane_bits(bits), high = bits - low;
  put_plane(codes & kOnes * ((1u << low) - 1), low, r, v, half_block);
  if (high) put_plane(codes >> low & kOnes * ((1u << high) - 1), high, r, v, half_block + 64 * low);
}

// 64 stored codes of a row -> its places in two half blocks.
ONDEVICE_INLINE void put_row(const uint8_t* codes, int bits, int64_t r, uint8_t* block) {
  for (int64_t k = 0; k < 8; ++k, codes += bits) {
    uint64_t raw = 0;
    std::memcpy(&raw, codes, bits < 4 ? 2 : 5);
    if (bits % 3 == 0) raw |= static_cast<uint64_t>(codes[bits - 1]) << (8 * (bits - 1));
    put_codes(spread_codes(raw, bits), bits, r, k % 4, block + k / 4 * half_block_bytes(bits));
  }
}

}  // namespace ondevice
