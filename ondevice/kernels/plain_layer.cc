#include "plain_layer.h"

#include <algorithm>

#include "slice_pass.h"

namespace ondevice {
namespace {

// narrow = down * norm(x), for the adapted rows of x (tokens, width).
void narrow_rows(Runner& runner, const LowRank& adapter, const LayerRows& rows, const float* x, int64_t width,
                 const Norm& norm) {
  if (adapter.down && rows.adapted < rows.tokens)
    adapter.down->forward(runner, x + rows.adapted * width, width, rows.tokens - rows.adapted, nullptr,
                          rows.narrow, norm);
}

// y += up * narrow, for the adapted rows of y.
void add_narrow_rows(Runner& runner, const LowRank& adapter, const LayerRows& rows, float* y) {
  if (!adapter.up || rows.adapted >= rows.tokens) return;
  float* out = y + rows.adapted * adapter.up->rows();
  adapter.up->forward(runner, rows.narrow, adapter.up->cols(), rows.tokens - rows.adapted, nullptr, out, {},
                      out);
}

}  // namespace

void PlainLayer::attend(Runner& runner, const LayerRows& rows, const KvView* kv, const float* cos,
                        const float* sin) const {
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
}

void PlainLayer::forward(Runner& runner, const LayerRows& rows, const KvView* kv, const float* cos,
                         const float* sin, float* x) const {
  const int64_t tokens = rows.tokens;
  // A block's output is added to x as it is computed, unless it is normed first.
  float* y = rows.projected;

  runner.name_products(Step::kQkv);
  qkv->forward(runner, x, hidden, tokens, qkv_bias, rows.projected, attention_norm);
  narrow_rows(runner, qkv_adapter, rows, x, hidden, attention_norm);
  add_narrow_rows(runner, qkv_adapter, rows, rows.projected);
  attend(runner, rows, kv, cos, sin);

  runner.name_products(Step::kOutput);
  const bool out_normed = attention_output_norm.weight != nullptr;
  float* attention = out_normed ? y : x;
  out->forward(runner, rows.attended, attended_width(), tokens, out_bias, attention, {},
               out_normed ? nullptr : x);
  narrow_rows(runner, out_adapter, rows, rows.attended, attended_width(), {});
  add_narrow_rows(runner, out_adapter, rows, attention);
  if (out_normed) runner.add_normed(x, y, tokens, hidden, attention_output_norm);

  runner.name_products(Step::kProducts);
  const bool normed = feed_forward_output_norm.weight != nullptr;
  float* sum = normed ? y : x;
  narrow_rows(runner, feed_forward_adapter, rows, x, hidden, feed_forward_norm);
  const InputRows inputs = runner.prepare(x, hidden, tokens, hidden, slice->gate().format, feed_forward_norm);
  SlicePass(runner, *slice, inputs, form, gate_bias, gate_bias ? static_cast<int64_t>(slices.size()) : 0)
      .add(slices, tokens, normed ? nullptr : x, sum);
  if (output_bias)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < hidden; ++i) sum[t * hidden + i] += output_bias[i];
  if (feed_forward_adapter.up)
    for (int64_t i = 0; i < (tokens - rows.adapted) * feed_forward_adapter.up->cols(); ++i)
      rows.narrow[i] = std::max(rows.narrow[i], 0.0f);
  add_narrow_rows(runner, feed_forward_adapter, rows, sum);
  if (normed) runner.add_normed(x, y, tokens, hidden, feed_forward_output_norm);
}

}  // namespace ondevice
