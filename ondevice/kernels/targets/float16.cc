#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

void half_to_float(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    if (n - i >= 16) {
      store(out + i, load_half(in + i));
      continue;
    }
    uint16_t tail[16] = {0};
    memcpy(tail, in + i, static_cast<size_t>(n - i) * 2);
    store_partial(out + i, load_half(tail), n - i);
  }
}

// False if a value isn't finite as float16.
bool float_to_half(const float* in, uint16_t* out, int64_t n) {
  bool finite = true;
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i < 16 ? n - i : 16;
    uint16_t halves[16];
    store_half(halves, load_partial(in + i, left));
    for (int64_t k = 0; k < left; ++k) finite &= (halves[k] & 0x7c00u) != 0x7c00u;
    memcpy(out + i, halves, static_cast<size_t>(left) * 2);
  }
  return finite;
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
