// This target's kernels, for dispatch.cc: all of its own, or those of ONDEVICE_BASE but for products of
// integers.
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
#if defined(ONDEVICE_BASE)
namespace ONDEVICE_BASE {
extern const KernelTable kTable;
}
#endif
namespace ONDEVICE_NS {

extern const KernelTable kTable;
#if defined(ONDEVICE_BASE)
const KernelTable kTable = [] {
  KernelTable table = ONDEVICE_BASE::kTable;
  table.linear_quantized = linear_quantized;
  table.linear_high = linear_high;
  table.linear_gathered = linear_gathered;
  return table;
}();
#else
const KernelTable kTable = {
    quantize_activations,
    linear_quantized,
    linear_high,
    linear_gathered,
    linear_half,
    join_codes,
    activate,
    down_quantized,
    down_selected,
    unzip_outputs,
    down_half,
    add_bias_lanes,
    norm,
    soft_cap,
    rope,
    kv_write,
    kv_move,
    attention,
    gated_delta,
    sigmoid_gate,
    dequantize_row,
    quantize_block,
    quantize_lanes,
    half_to_float,
    float_to_half,
    largest,
    sum_of_exps,
    add_products,
    subtract_products,
    short_conv,
    mamba2,
    mixer_gate,
};
#endif

}  // namespace ONDEVICE_NS
}  // namespace ondevice
