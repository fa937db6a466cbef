#include "plain_layer.h"

#include "slice_pass.h"

namespace ondevice {

void PlainLayer::forward(Runner& runner, const LayerRows& rows, const KvView* kv, const float* cos,
                         const float* sin, float* x) const {
  const int64_t tokens = rows.tokens;
  // A block's output is added to x as it is computed, unless it is normed first.
  float* y = rows.projected;

  runner.name_products(Step::kQkv);
  qkv->forward(runner, x, hidden, tokens, qkv_bias, rows.projected, attention_norm);
  HeadTransform rotated = transform;
  for (size_t i = 0; i < rows.sequences.size(); ++i) {
    const SequenceRows& sequence = rows.sequences[i];
    float* projected = rows.projected + sequence.first * projected_width();
    rotated.cos = cos + sequence.first * head_dim / 2;
    rotated.sin = sin + sequence.first * head_dim / 2;
    runner.attend(projected, rotated,
                  {projected, projected_width(), heads, kv[i], sequence.position, window, scale, soft_cap,
                   rows.attended + sequence.first * attended_width(), sequence.tree, sinks},
                  sequence.tokens);
  }
  runner.name_products(Step::kOutput);
  if (attention_output_norm.weight) {
    out->forward(runner, rows.attended, attended_width(), tokens, out_bias, y);
    runner.add_normed(x, y, tokens, hidden, attention_output_norm);
  } else {
    out->forward(runner, rows.attended, attended_width(), tokens, out_bias, x, {}, x);
  }

  runner.name_products(Step::kProducts);
  const bool normed = feed_forward_output_norm.weight != nullptr;
  float* sum = normed ? y : x;
  const InputRows inputs = runner.prepare(x, hidden, tokens, hidden, slice->gate().format, feed_forward_norm);
  SlicePass(runner, *slice, inputs, form, gate_bias, gate_bias ? static_cast<int64_t>(slices.size()) : 0)
      .add(slices, tokens, normed ? nullptr : x, sum);
  if (output_bias)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < hidden; ++i) sum[t * hidden + i] += output_bias[i];
  if (normed) runner.add_normed(x, y, tokens, hidden, feed_forward_output_norm);
}

}  // namespace ondevice
