#include "gguf_codes.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "code_tables.h"
#include "interleave.h"

namespace ondevice {
namespace {

constexpr int64_t kPart = 32;   // codes that share a scale
constexpr int64_t kLanes = 16;  // columns that are quantised together

const BlockType kTypes[] = {
    {"Q4_0", 32, 18, {4, 32, ScaleKind::kSymmetric}},
    {"Q4_1", 32, 20, {4, 32}},
    {"Q5_0", 32, 22, {5, 32, ScaleKind::kSymmetric}},
    {"Q5_1", 32, 24, {5, 32}},
    {"Q8_0", 32, 34, {8, 32, ScaleKind::kSymmetric}},
    {"Q4_K", 256, 144, {4, 32}},
    {"Q5_K", 256, 176, {5, 32}},
    {"MXFP4", 32, 17, {4, 32, ScaleKind::kMxfp4}},
};
enum Kind { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kMxfp4 };

Kind kind_of(const BlockType& type) { return static_cast<Kind>(&type - kTypes); }

// The code of zero where a part has no bias. MXFP4's codes are taken as the integers that they stand for.
int zero_code(const BlockType& type) {
  return type.own.mxfp4() ? 12 : type.own.implied() ? 1 << (type.own.bits - 1) : 0;
}

// A part of a block: value = scale * code + bias, or scale * (code - zero) where it has no bias.
struct Part {
  uint8_t codes[kPart];
  float scale, bias;
};

// The float16 number at p. Multiplying by 2^112 gives small numbers their exponent too.
float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((half & 0x7c00) == 0x7c00) bits = magnitude | 0x7f800000;
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 2^(s - 128), the scale of integers that are twice the values.
float half_power(uint8_t s) {
  const uint32_t bits = s < 2 ? 1u << (21 + s) : static_cast<uint32_t>(s - 1) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 16 bytes: low nibbles are the first 16 codes, high ones the others.
inline void split_nibbles(const uint8_t* bytes, uint8_t* codes) {
  const Bytes16 both = load_vector<Bytes16>(bytes), low = both & 15, high = both >> 4;
  std::memcpy(codes, &low, 16);
  std::memcpy(codes + 16, &high, 16);
}

// 32 bytes with two codes each: the low nibbles, or the high ones.
inline void pick_nibbles(const uint8_t* bytes, bool high, uint8_t* codes) {
  for (int64_t i = 0; i < kPart; i += 16) {
    const Bytes16 both = load_vector<Bytes16>(bytes + i), picked = high ? both >> 4 : both & 15;
    std::memcpy(codes + i, &picked, 16);
  }
}

// Adds fifth bits, the code of element i having bit i.
inline void add_fifth(const uint8_t* fifth, uint8_t* codes) {
  for (int64_t i = 0; i < kPart; ++i)
    codes[i] = static_cast<uint8_t>(codes[i] + (fifth[i / 8] >> i % 8 & 1) * 16);
}

// d times the part's scale and -(m times its offset), which have 6 bits: of the last four parts the upper two
// are in the bytes of the first four.
inline void read_six_bits(const uint8_t* block, int64_t part, float* scale, float* bias) {
  const uint8_t* s = block + 4;
  const int64_t p = part % 4;
  const int scales = part < 4 ? s[p] & 63 : (s[8 + p] & 15) | s[p] >> 6 << 4;
  const int offsets = part < 4 ? s[4 + p] & 63 : s[8 + p] >> 4 | s[4 + p] >> 6 << 4;
  *scale = half_at(block) * static_cast<float>(scales);
  *bias = -(half_at(block + 2) * static_cast<float>(offsets));
}

template <Kind kKind>
inline Part read_part(const uint8_t* block, int64_t part) {
  Part found;
  found.bias = 0.0f;
  if constexpr (kKind == kQ4_K || kKind == kQ5_K) {
    read_six_bits(block, part, &found.scale, &found.bias);
    pick_nibbles(block + (kKind == kQ4_K ? 16 : 48) + part / 2 * kPart, part % 2, found.codes);
    if (kKind == kQ5_K)
      for (int64_t i = 0; i < kPart; ++i)
        found.codes[i] = static_cast<uint8_t>(found.codes[i] + (block[16 + i] >> part & 1) * 16);
    return found;
  }
  if constexpr (kKind == kMxfp4) {
    found.scale = half_power(block[0]);
    split_nibbles(block + 1, found.codes);
    for (uint8_t& code : found.codes) code = kE2m1Integers[code];
    return found;
  }
  found.scale = half_at(block);
  if constexpr (kKind == kQ4_0) split_nibbles(block + 2, found.codes);
  if constexpr (kKind == kQ4_1 || kKind == kQ5_1) found.bias = half_at(block + 2);
  if constexpr (kKind == kQ4_1) split_nibbles(block + 4, found.codes);
  if constexpr (kKind == kQ5_0 || kKind == kQ5_1) {
    constexpr int64_t at = kKind == kQ5_0 ? 2 : 4;
    split_nibbles(block + at + 4, found.codes);
    add_fifth(block + at, found.codes);
  }
  if constexpr (kKind == kQ8_0)
    for (int64_t i = 0; i < kPart; ++i) found.codes[i] = block[2 + i] ^ 128;
  return found;
}

// The 32 codes as 16 bytes, neighbours in one byte.
inline void pack_nibbles(const uint8_t* codes, uint8_t* out) {
  Halves8 first = load_vector<Halves8>(codes), second = load_vector<Halves8>(codes + 16);
  first = (first & 15) | (first >> 4 & 240);
  second = (second & 15) | (second >> 4 & 240);
  const Bytes16 packed = __builtin_shufflevector((Bytes16)first, (Bytes16)second, 0, 2, 4, 6, 8, 10, 12, 14,
                                                 16, 18, 20, 22, 24, 26, 28, 30);
  std::memcpy(out, &packed, 16);
}

inline float zero_of(const RowFormat& format) { return static_cast<float>(1 << (format.bits - 1)); }

// Codes of the type's own bits, neighbours in one byte at 4 bits; `shift` is added to each.
inline void store_part(uint8_t* part, uint8_t shift, int64_t bits, uint8_t* out) {
  if (shift)
    for (int64_t i = 0; i < kPart; ++i) part[i] = static_cast<uint8_t>(part[i] + shift);
  if (bits == 4)
    pack_nibbles(part, out);
  else
    pack_codes(part, kPart, bits, out);
}

template <Kind kKind>
void copy_parts(const uint8_t* data, int64_t blocks, const RowFormat& stored, uint8_t* codes, float* scales,
                float* biases) {
  const BlockType& type = kTypes[kKind];
  const int64_t parts = type.values / kPart, part_bytes = kPart * stored.bits / 8;
  const float zero = zero_of(type.own);
  const uint8_t shift = static_cast<uint8_t>(stored.implied() ? zero_of(stored) - zero : 0.0f);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t p = 0; p < parts; ++p) {
      Part part = read_part<kKind>(data + b * type.nbytes, p);
      const int64_t at = b * parts + p;
      scales[at] = part.scale;
      if (!stored.implied()) biases[at] = type.own.implied() ? -zero * part.scale : part.bias;
      store_part(part.codes, shift, stored.bits, codes + at * part_bytes);
    }
}

// As copy_parts, with scales and biases as the block has them.
template <Kind kKind>
void copy_halves(const uint8_t* data, int64_t blocks, const RowFormat& stored, uint8_t* codes,
                 uint16_t* scales, uint16_t* biases) {
  const BlockType& type = kTypes[kKind];
  const int64_t part_bytes = kPart * stored.bits / 8;
  const uint8_t shift = static_cast<uint8_t>(type.own.implied() ? zero_of(stored) - zero_of(type.own) : 0.0f);
  for (int64_t b = 0; b < blocks; ++b, data += type.nbytes) {
    std::memcpy(scales + b, data, 2);
    if (!type.own.implied()) std::memcpy(biases + b, data + 2, 2);
    Part part = read_part<kKind>(data, 0);
    store_part(part.codes, shift, stored.bits, codes + b * part_bytes);
  }
}

// Part `part` of the blocks of all rows, (rows, 32) values.
template <Kind kKind>
void decode_parts(const uint8_t* data, int64_t rows, int64_t row_bytes, int64_t part, float* out) {
  const BlockType& type = kTypes[kKind];
  const int64_t parts = type.values / kPart;
  const int zero = zero_code(type);
  data += part / parts * type.nbytes;
  for (int64_t r = 0; r < rows; ++r) {
    const Part found = read_part<kKind>(data + r * row_bytes, part % parts);
    float* to = out + r * kPart;
    for (int64_t i = 0; i < kPart; ++i) to[i] = found.scale * static_cast<float>(found.codes[i] - zero);
    if (type.own.has_biases())
      for (int64_t i = 0; i < kPart; ++i) to[i] += found.bias;
  }
}

// Value `at` of a block of 32; reading all of them for one would take as long as rounding them.
template <Kind kKind>
inline float read_value(const uint8_t* block, int64_t at) {
  const BlockType& type = kTypes[kKind];
  const int zero = zero_code(type);
  const float scale = kKind == kMxfp4 ? half_power(block[0]) : half_at(block);
  if constexpr (kKind == kQ8_0) return scale * static_cast<float>(static_cast<int8_t>(block[2 + at]));
  const uint8_t* codes = block + type.nbytes - 16;
  int code = at < 16 ? codes[at] & 15 : codes[at - 16] >> 4;
  if constexpr (kKind == kQ5_0 || kKind == kQ5_1) code += (codes[at / 8 - 4] >> at % 8 & 1) * 16;
  if constexpr (kKind == kMxfp4) code = kE2m1Integers[code];
  const float value = scale * static_cast<float>(code - zero);
  return type.own.has_biases() ? value + half_at(block + 2) : value;
}

template <Kind kKind>
void decode_values(const uint8_t* data, int64_t rows, int64_t row_bytes, int64_t column, float* out) {
  const BlockType& type = kTypes[kKind];
  data += column / type.values * type.nbytes;
  if constexpr (kKind == kQ4_K || kKind == kQ5_K) {
    for (int64_t r = 0; r < rows; ++r) {
      const Part part = read_part<kKind>(data + r * row_bytes, column % type.values / kPart);
      out[r] = part.scale * static_cast<float>(part.codes[column % kPart]);
      out[r] += part.bias;
    }
  } else {
    for (int64_t r = 0; r < rows; ++r) out[r] = read_value<kKind>(data + r * row_bytes, column % kPart);
  }
}

using CopyParts = void (*)(const uint8_t*, int64_t, const RowFormat&, uint8_t*, float*, float*);
using CopyHalves = void (*)(const uint8_t*, int64_t, const RowFormat&, uint8_t*, uint16_t*, uint16_t*);
using DecodeParts = void (*)(const uint8_t*, int64_t, int64_t, int64_t, float*);
constexpr CopyParts kCopy[] = {copy_parts<kQ4_0>, copy_parts<kQ4_1>, copy_parts<kQ5_0>, copy_parts<kQ5_1>,
                               copy_parts<kQ8_0>, copy_parts<kQ4_K>, copy_parts<kQ5_K>};
using DecodeValues = void (*)(const uint8_t*, int64_t, int64_t, int64_t, float*);
constexpr DecodeValues kDecodeValues[] = {decode_values<kQ4_0>, decode_values<kQ4_1>, decode_values<kQ5_0>,
                                          decode_values<kQ5_1>, decode_values<kQ8_0>, decode_values<kQ4_K>,
                                          decode_values<kQ5_K>, decode_values<kMxfp4>};
constexpr CopyHalves kCopyHalves[] = {copy_halves<kQ4_0>, copy_halves<kQ4_1>, copy_halves<kQ5_0>,
                                      copy_halves<kQ5_1>, copy_halves<kQ8_0>};
constexpr DecodeParts kDecode[] = {decode_parts<kQ4_0>, decode_parts<kQ4_1>, decode_parts<kQ5_0>,
                                   decode_parts<kQ5_1>, decode_parts<kQ8_0>, decode_parts<kQ4_K>,
                                   decode_parts<kQ5_K>, decode_parts<kMxfp4>};

}  // namespace

const BlockType* find_block_type(const std::string& name) {
  for (const BlockType& type : kTypes)
    if (name == type.name) return &type;
  return nullptr;
}

void copy_codes(const BlockType& type, const uint8_t* data, int64_t rows, int64_t blocks,
                const RowFormat& stored, uint8_t* codes, float* scales, float* biases) {
  kCopy[kind_of(type)](data, rows * blocks, stored, codes, scales, biases);
}

void copy_codes_and_halves(const BlockType& type, const uint8_t* data, int64_t rows, int64_t blocks,
                           const RowFormat& stored, uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  kCopyHalves[kind_of(type)](data, rows * blocks, stored, codes, scales, biases);
}

void copy_mxfp4(const uint8_t* data, int64_t blocks, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < blocks; ++b, data += kTypes[kMxfp4].nbytes) {
    uint8_t part[kPart];
    split_nibbles(data + 1, part);
    pack_nibbles(part, codes + b * kPart / 2);
    scales[b] = data[0];
  }
}

bool quantize_columns(Runner& runner, const BlockType& type, const uint8_t* data, int64_t rows,
                      int64_t row_bytes, int64_t first, int64_t count, const RowFormat& format,
                      uint8_t* codes, uint16_t* scales, uint16_t* biases) {
  const KernelTable& kernels = runner.kernels();
  const int64_t codes_bytes = groups_of(rows) * format.codes_bytes(),
                groups = groups_of(rows) * format.scales(), end = first + count;
  const int64_t floats = rows * (kPart + (format.bits < 8 ? 0 : kLanes));
  float* scratch = runner.scratch(floats);
  std::atomic<bool> finite{true};
  const int64_t first_part = first / kPart, parts = (end + kPart - 1) / kPart - first_part;
  runner.pool().parallel_for(parts, 1, [&](int64_t part_begin, int64_t part_end, int thread) {
    float *values = scratch + thread * floats, *transposed = values + rows * kPart;
    for (int64_t part = first_part + part_begin; part < first_part + part_end; ++part) {
      kDecode[kind_of(type)](data, rows, row_bytes, part, values);
      const int64_t stop = std::min(end, (part + 1) * kPart);
      for (int64_t at = std::max(first, part * kPart); at < stop; at += kLanes) {
        const int64_t n = std::min(kLanes, stop - at), to = at - first;
        const float* lanes = values + at % kPart;
        bool good;
        if (format.bits < 8) {
          good = kernels.quantize_lanes(format, lanes, kPart, n, rows, codes + to * codes_bytes,
                                        scales + to * groups, biases + to * groups);
        } else {
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < n; ++k) transposed[k * rows + r] = lanes[r * kPart + k];
          good = kernels.quantize_block(format, transposed, n, rows, codes + to * codes_bytes,
                                        scales + to * groups, biases + to * groups);
        }
        if (!good) finite.store(false);
      }
    }
  });
  return finite.load();
}

void decode_column(const BlockType& type, const uint8_t* data, int64_t rows, int64_t row_bytes,
                   int64_t column, float* out) {
  kDecodeValues[kind_of(type)](data, rows, row_bytes, column, out);
}

}  // namespace ondevice
