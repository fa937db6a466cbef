#include "runner.h"

#include <cstring>
#include <stdexcept>

#include "dispatch.h"

namespace ondevice {
namespace {

// Rows that a thread packs at a time: of fewer, the way between the cores' caches takes longer.
constexpr int64_t kPackedRows = 8;

const KernelTable* require_target(const std::string& name, std::string* resolved) {
  const KernelTable* table = find_target(name, resolved);
  if (!table) throw std::invalid_argument("kernel target '" + name + "' can't run on this machine");
  return table;
}

// Query rows that share one walk over the keys: enough to amortise the keys' conversion to float.
constexpr int64_t kQueryRows = 32;

// Products of queries with keys and of weights with values, as if the queries were a chain.
int64_t attention_macs(const AttentionArgs& args, int64_t tokens) {
  int64_t seen = 0;
  for (int64_t end = args.position + 1; end <= args.position + tokens; ++end)
    seen += args.window && args.window < end ? args.window : end;
  return seen * args.heads * (args.kv.head_dim + args.kv.value_dim());
}

// Bytes of the keys and values that any of the queries sees.
int64_t attention_bytes(const AttentionArgs& args, int64_t tokens) {
  const int64_t first = args.window && args.window <= args.position ? args.position - args.window + 1 : 0;
  return (args.position + tokens - first) * args.kv.heads * args.kv.head_bytes / kKvBlock;
}

}  // namespace

void InputMemory::trim() {
  for (MappedBuffer* buffer : {&codes, &scales, &sums, &int_sums, &padded}) *buffer = MappedBuffer();
}

void FeedForwardScratch::trim() {
  for (MappedBuffer* buffer : {&hidden, &gate_up, &joined, &outputs, &bias_lanes, &ordered_lanes, &low_rank,
                               &scores, &tile_columns, &tile_tokens, &expert_inputs, &expert_outputs})
    *buffer = MappedBuffer();
}

Runner::Runner(int threads, const std::string& target)
    : pool_(new ThreadPool(threads)), table_(require_target(target, &target_)) {}

InputRows Runner::prepare(const float* x, int64_t x_stride, int64_t tokens, int64_t cols,
                          const RowFormat& format, const Norm& norm, size_t place) {
  ++input_version_;
  return prepare_in(inputs_[place], x, x_stride, tokens, cols, format, norm);
}

InputRows Runner::prepare_hidden(const float* h, int64_t h_stride, int64_t tokens, int64_t cols,
                                 const RowFormat& format) {
  return prepare_in(hidden_inputs_, h, h_stride, tokens, cols, format, {});
}

InputRows Runner::prepare_in(InputMemory& memory, const float* x, int64_t x_stride, int64_t tokens,
                             int64_t cols, const RowFormat& format, const Norm& norm) {
  const Timed timed(times(), Step::kPacking);
  InputRows rows{tokens, {nullptr, nullptr, nullptr, nullptr, groups_of(cols), tokens}, nullptr};
  if (format.bits == 16)
    pad(memory, x, x_stride, cols, norm, &rows);
  else
    quantize(memory, x, x_stride, cols, format, norm, &rows);
  return rows;
}

void Runner::quantize(InputMemory& memory, const float* x, int64_t x_stride, int64_t cols,
                      const RowFormat& format, const Norm& norm, InputRows* rows) {
  const int64_t groups = rows->quantized.groups, n = rows->tokens * groups;
  const int64_t parts = format.scales(), scaled = format.input_scales();
  memory.codes.grow(static_cast<size_t>(n * kGroup));
  memory.scales.grow(static_cast<size_t>(n * scaled) * sizeof(float));
  memory.sums.grow(static_cast<size_t>(n * scaled) * sizeof(float));
  memory.int_sums.grow(static_cast<size_t>(n * parts) * sizeof(int32_t));
  const QuantizedRows quantized{memory.codes.as<int8_t>(),
                                memory.scales.as<float>(),
                                memory.sums.as<float>(),
                                memory.int_sums.as<int32_t>(),
                                groups,
                                rows->tokens,
                                parts,
                                scaled};
  rows->quantized = quantized;
  float* normed_rows = norm.weight ? scratch(cols) : nullptr;
  pool_->parallel_for(rows->tokens, kPackedRows, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t t = begin; t < end; ++t) {
      const float* row = x + t * x_stride;
      if (norm.weight) {
        float* normed = normed_rows + thread * cols;
        table_->norm(row, norm, cols, normed);
        row = normed;
      }
      table_->quantize_activations(row, cols, format.bits < 8, quantized, t);
    }
  });
}

void Runner::pad(InputMemory& memory, const float* x, int64_t x_stride, int64_t cols, const Norm& norm,
                 InputRows* rows) {
  const int64_t padded_cols = rows->quantized.groups * kGroup;
  memory.padded.grow(static_cast<size_t>(rows->tokens * padded_cols) * sizeof(float));
  float* out = memory.padded.as<float>();
  rows->padded = out;
  for (int64_t t = 0; t < rows->tokens; ++t, out += padded_cols) {
    if (norm.weight)
      table_->norm(x + t * x_stride, norm, cols, out);
    else
      std::memcpy(out, x + t * x_stride, static_cast<size_t>(cols) * sizeof(float));
    std::memset(out + cols, 0, static_cast<size_t>(padded_cols - cols) * sizeof(float));
  }
}

void Runner::attention(const AttentionArgs& whole, int64_t tokens) {
  AttentionArgs args = whole;
  if (args.kv.latent && tokens < pool_->threads()) {
    // All heads read one key: few tokens would keep few threads busy. So groups of heads read it by
    // themselves.
    int64_t groups = pool_->threads() < args.heads ? pool_->threads() : args.heads;
    while (args.heads % groups) ++groups;
    args.kv.heads = groups;
    args.kv.head_bytes = 0;
  }
  const int64_t shared = args.heads / args.kv.heads;
  const int64_t queries = shared >= kQueryRows ? 1 : kQueryRows / shared;
  const int64_t pieces = (tokens + queries - 1) / queries;
  const int64_t floats =
      attention_scratch_floats(args, args.position + tokens, (tokens < queries ? tokens : queries) * shared);
  float* memory = scratch(floats);
  pool_->parallel_for(pieces * args.kv.heads, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / args.kv.heads * queries;
      const int64_t last = first + queries < tokens ? first + queries : tokens;
      table_->attention(args, i % args.kv.heads, first, last, memory + thread * floats);
    }
  });
}

void Runner::attend(float* qkv, const HeadTransform& transform, const AttentionArgs& args, int64_t tokens) {
  const Timed timed(times(), Step::kAttention, times() ? attention_macs(args, tokens) : 0,
                    times() ? attention_bytes(args, tokens) : 0);
  const int64_t dim = args.kv.head_dim, keys_at = args.heads * dim;
  // A latent doesn't turn; the dimensions behind it do.
  const int64_t still = args.kv.latent, turning = dim - still;
  const bool stores = args.q_stride > keys_at;
  const int64_t values_at = stores ? keys_at + args.kv.heads * dim : keys_at;
  pool_->parallel_for(tokens, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = qkv + t * args.q_stride;
      if (transform.norms_projection) {
        table_->norm(row, transform.q_norm.norm, keys_at, row);
        if (stores) table_->norm(row + keys_at, transform.k_norm.norm, values_at - keys_at, row + keys_at);
      }
      for (int64_t at = 0; at < values_at; at += dim) {
        const HeadNorm& norm = at < keys_at ? transform.q_norm : transform.k_norm;
        const int64_t head = (at < keys_at ? at : at - keys_at) / dim;
        if (norm.norm.weight && !transform.norms_projection)
          table_->norm(row + at, norm.of(head), dim, row + at);
        table_->rope(row + at + still, transform.cos + t * turning / 2, transform.sin + t * turning / 2,
                     turning);
      }
      if (!stores) continue;
      if (transform.v_norm.weight)
        for (int64_t at = values_at; at < args.q_stride; at += args.kv.value_dim())
          table_->norm(row + at, transform.v_norm, args.kv.value_dim(), row + at);
      table_->kv_write(args.kv, args.position + t, row + keys_at, row + values_at);
    }
  });
  attention(args, tokens);
}

void Runner::add_normed(float* x, const float* y, int64_t tokens, int64_t n, const Norm& norm) {
  const Timed timed(times(), Step::kRest);
  float* memory = scratch(n);
  pool_->parallel_for(tokens, 4, [&](int64_t begin, int64_t end, int thread) {
    float* normed = memory + thread * n;
    for (int64_t t = begin; t < end; ++t) {
      table_->norm(y + t * n, norm, n, normed);
      for (int64_t i = 0; i < n; ++i) x[t * n + i] += normed[i];
    }
  });
}

float* Runner::scratch(int64_t floats) {
  scratch_.grow(static_cast<size_t>(floats * pool_->threads()) * sizeof(float));
  return scratch_.as<float>();
}

void Runner::trim() {
  ++input_version_;
  for (InputMemory& inputs : inputs_) inputs.trim();
  hidden_inputs_.trim();
  scratch_ = MappedBuffer();
  feed_forward_.trim();
}

}  // namespace ondevice
