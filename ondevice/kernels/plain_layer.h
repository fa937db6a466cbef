// A transformer layer that is in memory: attention within each sequence, then a feed-forward in slices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "expert.h"
#include "matrix.h"
#include "runner.h"

namespace ondevice {

// Rows of one sequence among those that run through layers: `tokens` from row `first` on, which follow
// `position` others in the sequence.
struct SequenceRows {
  int64_t first, tokens, position;
  TreeView tree;
};

// The rows that run through layers, sequence by sequence. Adapters are added to those from row `adapted` on.
struct LayerRows {
  int64_t tokens, adapted;
  std::vector<SequenceRows> sequences;
  // Scratch memory: rows as wide as a layer's projected queries, keys and values and as its output; rows as
  // wide as all heads' values.
  float *projected, *attended;
  float* narrow;  // rows as wide as the largest rank of an adapter; null without adapters
};

// A low-rank adapter of a product, which adds up * activation(down * x). Null where a layer has none.
struct LowRank {
  const Matrix *down, *up;
};

// x += norm(attention(norm(x))), then x += norm(feed_forward(norm(x))); any norm may be missing.
//
// It points to weights that others own, and is valid as long as they are in memory.
struct PlainLayer {
  int64_t hidden;
  Norm attention_norm, attention_output_norm, feed_forward_norm, feed_forward_output_norm;

  const Matrix *qkv, *out;
  const float *qkv_bias, *out_bias;  // or null
  int64_t heads, kv_heads, head_dim, window;
  float scale, soft_cap;
  HeadTransform transform;  // without rotary tables, which are those with number `rope`
  int64_t rope;
  const float* sinks;  // or null

  const Expert* slice;
  std::vector<RecordBytes> slices;
  GateForm form;
  const float *gate_bias, *output_bias;  // or null

  LowRank qkv_adapter, out_adapter, feed_forward_adapter;  // the last with ReLU as its activation

  int64_t projected_width() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t attended_width() const { return heads * head_dim; }
  // The largest rank of its adapters, of which it has all or none.
  int64_t most_rank() const {
    return std::max({qkv_adapter.up->cols(), out_adapter.up->cols(), feed_forward_adapter.up->cols()});
  }

  // x (tokens, hidden) -> the layer's output, in place. kv: the layer's keys and values of each sequence,
  // with room for its rows. cos, sin: (tokens, head_dim / 2).
  void forward(Runner& runner, const LayerRows& rows, const KvView* kv, const float* cos, const float* sin,
               float* x) const;

 private:
  void attend(Runner& runner, const LayerRows& rows, const KvView* kv, const float* cos,
              const float* sin) const;
};

}  // namespace ondevice
