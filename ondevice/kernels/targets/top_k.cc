#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

// An insertion sort: what has been found so far is kept in order in `best` (count).
void largest(const float* x, int64_t n, int64_t count, int32_t* ids, float* best) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i];
    if (found == count && !(value > best[count - 1])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && value > best[at - 1]; --at) best[at] = best[at - 1], ids[at] = ids[at - 1];
    best[at] = value, ids[at] = static_cast<int32_t>(i);
  }
}

// The softmax denominator behind the probabilities of the largest.
float sum_of_exps(const float* x, int64_t n, float top) {
  F sum = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sum = add(sum, exp_lanes(sub(load(x + i), set1(top))));
  float lanes[16] = {0};
  store(lanes, exp_lanes(sub(load_partial(x + i, n - i), set1(top))));
  float tail = 0.0f;
  for (int64_t k = 0; k < n - i; ++k) tail += lanes[k];
  return reduce_add(sum) + tail;
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
