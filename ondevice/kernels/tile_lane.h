// One row of a tile, as an embedding is looked up.
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace ondevice {

// Row `lane` of a tile of 16 rows of `groups` times 64 columns -> its weights. The bits are the same whatever
// the target: products are exact, and a sum of two is rounded once.
void dequantize_lane(const KernelTable& kernels, const RowFormat& format, const uint8_t* tile, int64_t lane,
                     int64_t groups, float* out);

}  // namespace ondevice
