// The numbers that MXFP4 codes mean: E2M1, one bit of sign, two of exponent and one of mantissa (OCP
// Microscaling Formats 1.0, 5.3.3).
#pragma once

#include <cstdint>

namespace ondevice {

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Twice those, and 12 more: unsigned bytes, as dot products of codes need them.
constexpr uint8_t kE2m1Integers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace ondevice
