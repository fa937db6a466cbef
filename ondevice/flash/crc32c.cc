#include "crc32c.h"

#include <string.h>

#include <algorithm>
#include <array>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_FUNCTION __attribute__((target("sse4.2")))
#define CRC_U64(crc, word) _mm_crc32_u64(crc, word)
#define CRC_U8(crc, byte) _mm_crc32_u8(static_cast<uint32_t>(crc), byte)
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__ARM_FEATURE_CRC32)
#define CRC_FUNCTION
#elif defined(__clang__)
#define CRC_FUNCTION __attribute__((target("crc")))
#else
#define CRC_FUNCTION __attribute__((target("+crc")))
#endif
#define CRC_U64(crc, word) __crc32cd(static_cast<uint32_t>(crc), word)
#define CRC_U8(crc, byte) __crc32cb(static_cast<uint32_t>(crc), byte)
#endif

namespace ondevice {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected
// Units shorter than this aren't split: two GF(2) multiplications, about 0.4 us, would cost more than it
// saves.
constexpr size_t kSplitBytes = 16384;
// Longer units are split block by block, so that a block and the next one, which is prefetched, fit a small
// L2 cache.
constexpr size_t kBlockBytes = 96 << 10;

uint64_t load_u64(const uint8_t* p) {
  uint64_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

// tables[k][b]: the CRC of byte b followed by k zero bytes. With eight tables a step takes eight bytes.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b) {
      uint32_t previous = tables[k - 1][b];
      tables[k][b] = (previous >> 8) ^ tables[0][previous & 255];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t extend_table(uint32_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word = load_u64(p) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 255];
  }
  for (; n > 0; ++p, --n) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 255];
  return crc;
}

#if defined(CRC_FUNCTION)

CRC_FUNCTION uint32_t extend_one(uint32_t crc, const uint8_t* p, size_t n) {
  uint64_t wide = crc;
  for (; n >= 8; p += 8, n -= 8) wide = CRC_U64(wide, load_u64(p));
  for (; n > 0; ++p, --n) wide = CRC_U8(wide, *p);
  return static_cast<uint32_t>(wide);
}

// Three streams of n bytes each, advanced together, while 3n bytes at `next` are brought into the L2 cache:
// units are too short for the hardware prefetcher, and 2.5 and 4.6 KB ones go from 10 to 17 GB/s from DRAM.
CRC_FUNCTION void extend_three(uint32_t crc[3], const uint8_t* const p[3], size_t n, const uint8_t* next) {
  uint64_t a = crc[0], b = crc[1], c = crc[2];
  const uint8_t *pa = p[0], *pb = p[1], *pc = p[2];
  size_t words = n / 8;
  for (size_t i = 0; i < words;) {
    __builtin_prefetch(next + 24 * i, 0, 2);
    __builtin_prefetch(next + 24 * i + 64, 0, 2);
    __builtin_prefetch(next + 24 * i + 128, 0, 2);
    for (size_t end = std::min(words, i + 8); i < end; ++i) {
      a = CRC_U64(a, load_u64(pa + 8 * i));
      b = CRC_U64(b, load_u64(pb + 8 * i));
      c = CRC_U64(c, load_u64(pc + 8 * i));
    }
  }
  crc[0] = extend_one(static_cast<uint32_t>(a), pa + 8 * words, n % 8);
  crc[1] = extend_one(static_cast<uint32_t>(b), pb + 8 * words, n % 8);
  crc[2] = extend_one(static_cast<uint32_t>(c), pc + 8 * words, n % 8);
}

// a * b modulo the polynomial, bit-reflected: bit 31 is the coefficient of x^0.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 * nbytes) modulo the polynomial: the factor that moves a CRC past nbytes zero bytes.
uint32_t shift_factor(size_t nbytes) {
  uint32_t factor = 1u << 31, square = 1u << 23;
  for (; nbytes; nbytes >>= 1) {
    if (nbytes & 1) factor = multiply(factor, square);
    square = multiply(square, square);
  }
  return factor;
}

// A long unit block by block, each as three thirds side by side, joined by crc(AB) = crc(A) * x^(8|B|) +
// crc(B).
uint32_t extend_split(uint32_t crc, const uint8_t* p, size_t n) {
  const size_t blocks = (n + kBlockBytes - 1) / kBlockBytes, third = n / blocks / 24 * 8;
  const uint32_t factor = shift_factor(third);
  for (; n >= 3 * third; p += 3 * third, n -= 3 * third) {
    uint32_t parts[3] = {crc, 0, 0};
    const uint8_t* starts[3] = {p, p + third, p + 2 * third};
    extend_three(parts, starts, third, p + 3 * third);
    crc = multiply(multiply(parts[0], factor) ^ parts[1], factor) ^ parts[2];
  }
  return extend_one(crc, p, n);
}

#endif  // CRC_FUNCTION

uint32_t crc_of(const uint8_t* p, size_t n, bool hardware) {
#if defined(CRC_FUNCTION)
  if (hardware) return ~(n >= kSplitBytes ? extend_split(~0u, p, n) : extend_one(~0u, p, n));
#endif
  (void)hardware;
  return ~extend_table(~0u, p, n);
}

bool detect_crc32c_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP) & (1 << 7)) != 0;  // HWCAP_CRC32
#elif defined(__aarch64__) && defined(__APPLE__)
  return true;
#else
  return false;
#endif
}

}  // namespace

bool has_crc32c_instruction() {
  static const bool found = detect_crc32c_instruction();
  return found;
}

size_t count_crc_units(size_t nbytes, const std::vector<uint64_t>& units, size_t phase) {
  size_t period = 0;
  for (uint64_t unit : units) period += unit;
  size_t count = nbytes / period * units.size();
  for (size_t rest = nbytes % period; rest > 0; ++count, ++phase)
    rest -= std::min<size_t>(rest, units[phase % units.size()]);
  return count;
}

void crc32c_units(const uint8_t* data, size_t nbytes, const std::vector<uint64_t>& units, size_t phase,
                  uint32_t* out, Crc32cTarget target) {
  bool hardware =
      target == Crc32cTarget::kHardware || (target == Crc32cTarget::kAuto && has_crc32c_instruction());
  size_t kinds = units.size();
#if defined(CRC_FUNCTION)
  size_t period = 0;
  for (uint64_t unit : units) period += unit;
  const bool side_by_side = hardware && *std::max_element(units.begin(), units.end()) <= kBlockBytes;
  while (side_by_side && nbytes >= 3 * period) {
    size_t offset = 0;
    for (size_t i = 0; i < kinds; ++i) {
      size_t length = units[(phase + i) % kinds];
      const uint8_t* starts[3] = {data + offset, data + period + offset, data + 2 * period + offset};
      uint32_t crcs[3] = {~0u, ~0u, ~0u};
      extend_three(crcs, starts, length, data + 3 * (period + offset));
      for (size_t k = 0; k < 3; ++k) out[k * kinds + i] = ~crcs[k];
      offset += length;
    }
    data += 3 * period;
    nbytes -= 3 * period;
    out += 3 * kinds;
  }
#endif
  for (; nbytes > 0; ++phase) {
    size_t length = std::min<size_t>(nbytes, units[phase % kinds]);
    *out++ = crc_of(data, length, hardware);
    data += length;
    nbytes -= length;
  }
}

}  // namespace ondevice
