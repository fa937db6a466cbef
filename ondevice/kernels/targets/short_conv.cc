#include "../short_conv.h"

#include "causal_rows.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

void short_conv(const ConvArgs& args, int64_t tokens, int64_t begin, int64_t end) {
  const int64_t C = args.channels;
  const CausalRows inputs{args.products, args.stride, args.tail, args.taps, C, args.parents};
  for (int64_t t = args.first; t < tokens; ++t) {
    const float* own = args.projected + (t - args.first) * 3 * C;
    float* product = args.products + t * args.stride;
    for (int64_t i = begin; i < end; i += 16)
      store_partial(product + i, mul(load_partial(own + i, end - i), load_partial(own + 2 * C + i, end - i)),
                    end - i);
  }
  for (int64_t t = args.first; t < tokens; ++t) {
    const float* gate = args.projected + (t - args.first) * 3 * C + C;
    float* out = args.out + (t - args.first) * C;
    for (int64_t i = begin; i < end; i += 16) {
      const int64_t left = end - i;
      F sum = zero();
      for (int64_t tap = 0; tap < args.taps; ++tap)
        sum = fma(load_partial(args.conv + tap * C + i, left),
                  load_partial(inputs.row(t, args.taps - 1 - tap) + i, left), sum);
      store_partial(out + i, mul(load_partial(gate + i, left), sum), left);
    }
  }
  if (args.next_tail == nullptr) return;
  for (int64_t row = 0; row < args.taps - 1; ++row)
    memcpy(args.next_tail + row * C + begin, inputs.row(tokens - 1, args.taps - 2 - row) + begin,
           static_cast<size_t>(end - begin) * sizeof(float));
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
