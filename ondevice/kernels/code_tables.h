// The numbers that codes of 4 bits mean where a table has them.
#pragma once

#include <cstdint>

namespace ondevice {

// MXFP4: E2M1, one bit of sign, two of exponent and one of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Twice those, and 12 more: unsigned bytes, as dot products of codes need them.
constexpr uint8_t kE2m1Integers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// ScaleKind::kTable and kTwoLevelTable, GGUF's IQ4_NL and IQ4_XS: integers from -127 to 113, and 128 more.
constexpr uint8_t kTableBytes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

}  // namespace ondevice
