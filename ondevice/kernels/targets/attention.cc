#include <math.h>

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

constexpr int64_t kLanes = 16;

// A block holds, per (layer, kv head), 64 positions:
//   8 bits:  keys int8 (4, head_dim, 16), key scales f32 (64), values int8 (64, head_dim), value scales f32
//   16 bits: keys float16 (4, head_dim, 16), values float16 (64, head_dim)
// Keys of 16 positions lie dimension by dimension, so that the 16 are scored at once, each summed over the
// dimensions in ascending order: a score depends on nothing but its query, its key and that order.
struct Head {
  uint8_t* keys;
  float* key_scales;
  uint8_t* values;
  float* value_scales;
};

// Where dimension 0 of a position's key lies; the next dimension is kLanes further.
int64_t key_index(int64_t slot, int64_t head_dim) {
  return slot / kLanes * kLanes * head_dim + slot % kLanes;
}

Head head_in(const KvView& kv, uint8_t* base) {
  const int64_t codes = kKvBlock * kv.head_dim * kv.bits / 8;
  if (kv.bits == 16) return {base, nullptr, base + codes, nullptr};
  float* key_scales = reinterpret_cast<float*>(base + codes);
  uint8_t* values = base + codes + kKvBlock * 4;
  return {base, key_scales, values, reinterpret_cast<float*>(values + codes)};
}

Head head_at(const KvView& kv, int64_t block, int64_t head) {
  return head_in(kv, kv.blocks[block] + kv.layer_offset + head * kv.head_bytes);
}

// One position's key and value, as they are stored.
void copy_position(const KvView& kv, const Head& from, int64_t from_slot, const Head& to, int64_t to_slot) {
  const int64_t bytes = kv.bits / 8, row = kv.head_dim * bytes;
  const uint8_t* key = from.keys + key_index(from_slot, kv.head_dim) * bytes;
  uint8_t* copy = to.keys + key_index(to_slot, kv.head_dim) * bytes;
  for (int64_t d = 0; d < kv.head_dim; ++d)
    memcpy(copy + d * kLanes * bytes, key + d * kLanes * bytes, static_cast<size_t>(bytes));
  memcpy(to.values + to_slot * row, from.values + from_slot * row, static_cast<size_t>(row));
  if (!from.key_scales) return;
  to.key_scales[to_slot] = from.key_scales[from_slot];
  to.value_scales[to_slot] = from.value_scales[from_slot];
}

F load_codes(const uint8_t* base, int bits, int64_t index) {
  return bits == 16 ? load_half(reinterpret_cast<const uint16_t*>(base) + index)
                    : load_int8(reinterpret_cast<const int8_t*>(base) + index);
}

// int8 code per value, scale = max|x| / 127; a zero vector has scale 0, one that isn't finite scale NaN.
void quantize_head(const float* x, int64_t n, int8_t* codes, int64_t stride, float* scale) {
  F magnitude = zero();
  for (int64_t i = 0; i < n; i += 16) magnitude = max_magnitude(magnitude, load_partial(x + i, n - i));
  const float m = largest_magnitude(magnitude);
  const float inverse = int8_inverse(m);
  for (int64_t i = 0; i < n; i += 16) {
    int8_t lanes[16] = {0};
    if (m == m) store_int8(lanes, mul(load_partial(x + i, n - i), set1(inverse)));
    for (int64_t k = 0; k < 16 && i + k < n; ++k) codes[(i + k) * stride] = lanes[k];
  }
  *scale = m / 127.0f;
}

void half_head(const float* x, int64_t n, uint16_t* out, int64_t stride) {
  for (int64_t i = 0; i < n; i += 16) {
    uint16_t lanes[16];
    store_half(lanes, load_partial(x + i, n - i));
    for (int64_t k = 0; k < 16 && i + k < n; ++k) out[(i + k) * stride] = lanes[k];
  }
}

int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; }

// Scores of `rows` queries against the first 16 * `vectors` keys of a block -> scores[r * stride + position].
// Four queries share each key vector, or one query takes four vectors, to keep the multiplier busy.
void score_block(const Head& head, const KvView& kv, const float* q, int64_t rows, int64_t vectors,
                 float scale, float* scores, int64_t stride) {
  F factor[4];
  for (int i = 0; i < 4; ++i)
    factor[i] = head.key_scales ? mul(load(head.key_scales + 16 * i), set1(scale)) : set1(scale);
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    for (int64_t i = 0; i < vectors; ++i) {
      const float* q0 = q + r * kv.head_dim;
      F acc[4] = {zero(), zero(), zero(), zero()};
      for (int64_t d = 0; d < kv.head_dim; ++d) {
        const F k = load_codes(head.keys, kv.bits, (i * kv.head_dim + d) * kLanes);
        for (int j = 0; j < 4; ++j) acc[j] = fma(set1(q0[j * kv.head_dim + d]), k, acc[j]);
      }
      for (int j = 0; j < 4; ++j) store(scores + (r + j) * stride + 16 * i, mul(acc[j], factor[i]));
    }
  for (; r < rows; ++r) {
    F acc[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < vectors && vectors < 4; ++i)
      for (int64_t d = 0; d < kv.head_dim; ++d)
        acc[i] = fma(set1(q[r * kv.head_dim + d]),
                     load_codes(head.keys, kv.bits, (i * kv.head_dim + d) * kLanes), acc[i]);
    for (int64_t d = 0; d < kv.head_dim && vectors == 4; ++d) {
      const F value = set1(q[r * kv.head_dim + d]);
      for (int i = 0; i < 4; ++i)
        acc[i] = fma(value, load_codes(head.keys, kv.bits, (i * kv.head_dim + d) * kLanes), acc[i]);
    }
    for (int64_t i = 0; i < vectors; ++i) store(scores + r * stride + 16 * i, mul(acc[i], factor[i]));
  }
}

// exp(score - max) over positions [low, high] of a row that starts at position `base`; 0 outside.
// The sum is kept in 16 lanes by position % 16 and returned.
float softmax_row(float* scores, int64_t base, int64_t end, int64_t low, int64_t high) {
  float top = scores[low - base];
  for (int64_t p = low; p <= high; ++p) top = scores[p - base] > top ? scores[p - base] : top;
  F sum = zero();
  for (int64_t p = base; p < end; p += 16) {
    F e = zero();
    if (p + 15 >= low && p <= high) {
      e = exp_lanes(sub(load(scores + p - base), set1(top)));
      if (p < low || p + 15 > high) {
        float lanes[16];
        store(lanes, e);
        for (int64_t k = 0; k < 16; ++k)
          if (p + k < low || p + k > high) lanes[k] = 0.0f;
        e = load(lanes);
      }
    }
    sum = add(sum, e);
    store(scores + p - base, e);
  }
  return reduce_add(sum);
}

void multiply(float* x, const float* by, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, mul(load(x + i), load(by + i)));
  for (; i < n; ++i) x[i] *= by[i];
}

// acc[d] gains weight * value for positions [low, high] of one block, ascending. load_at(p, d) gives 16
// values.
template <class Load>
void weigh_values(const Load& load_at, int64_t width, const float* weights, int64_t low, int64_t high,
                  float* acc) {
  int64_t d = 0;
  for (; d + 64 <= width; d += 64) {
    F a = load(acc + d), b = load(acc + d + 16), c = load(acc + d + 32), e = load(acc + d + 48);
    for (int64_t p = low; p <= high; ++p) {
      const F w = set1(weights[p]);
      a = fma(w, load_at(p, d), a);
      b = fma(w, load_at(p, d + 16), b);
      c = fma(w, load_at(p, d + 32), c);
      e = fma(w, load_at(p, d + 48), e);
    }
    store(acc + d, a);
    store(acc + d + 16, b);
    store(acc + d + 32, c);
    store(acc + d + 48, e);
  }
  for (; d < width; d += 16) {
    F a = load(acc + d);
    for (int64_t p = low; p <= high; ++p) a = fma(set1(weights[p]), load_at(p, d), a);
    store(acc + d, a);
  }
}

// The value in a slot of a block as floats (width), zeros behind head_dim.
void load_value(const Head& head, const KvView& kv, int64_t slot, int64_t width, float* value) {
  const int64_t bytes = kv.bits / 8;
  for (int64_t d = 0; d < width; d += 16) {
    const int64_t index = slot * kv.head_dim + d;
    if (d + 16 <= kv.head_dim) {
      store(value + d, load_codes(head.values, kv.bits, index));
      continue;
    }
    uint8_t tail[32] = {0};
    memcpy(tail, head.values + index * bytes, static_cast<size_t>((kv.head_dim - d) * bytes));
    store(value + d, load_codes(tail, kv.bits, 0));
  }
}

int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The way through a token tree to one of its nodes, one node after another: which node lies at each depth,
// and its value. Nodes are stored side by side; on the path they lie where they would in plain decoding.
class Path {
 public:
  // values: (kKvBlock, width).
  Path(const AttentionArgs& args, int64_t head, int64_t width, float* values)
      : args_(args), head_(head), width_(width), values_(values) {
    for (int64_t i = 0; i < kKvBlock; ++i) nodes_[i] = valued_[i] = -1;
  }

  void show(int64_t node) {
    for (; node >= 0; node = args_.tree.parents[node]) nodes_[args_.tree.depths[node]] = node;
  }

  // Of `scores`, by place from the tree's first on, those of the path from `depth` on to their places on it.
  void gather(float* scores, int64_t depth, int64_t last) const {
    // A node's place is never before that on its path: what is overwritten has been read.
    for (; depth <= last; ++depth) scores[depth] = scores[nodes_[depth]];
  }

  // acc (width) gains weight * value from `depth` on; weights: by depth, scaled in place.
  void weigh(float* weights, int64_t depth, int64_t last, float* acc) {
    for (int64_t i = depth; i <= last; ++i) {
      if (valued_[i] == nodes_[i]) continue;
      valued_[i] = nodes_[i];
      const int64_t place = args_.position + nodes_[i];
      const Head at = head_at(args_.kv, place / kKvBlock, head_);
      load_value(at, args_.kv, place % kKvBlock, width_, values_ + i * width_);
      if (at.value_scales) scales_[i] = at.value_scales[place % kKvBlock];
    }
    if (args_.kv.bits == 8) multiply(weights + depth, scales_ + depth, last + 1 - depth);
    weigh_values([&](int64_t i, int64_t d) { return load(values_ + i * width_ + d); }, width_, weights, depth,
                 last, acc);
  }

 private:
  const AttentionArgs& args_;
  int64_t head_, width_;
  float* values_;
  int64_t nodes_[kKvBlock];
  int64_t valued_[kKvBlock];  // the node whose value is there
  float scales_[kKvBlock];
};

// Rows of queries: those of one token that read the same kv head lie side by side.
struct Queries {
  const AttentionArgs& args;
  int64_t begin, shared;

  int64_t of(int64_t row) const { return begin + row / shared; }
  int64_t depth(int64_t query) const { return args.tree.parents ? args.tree.depths[query] : query; }
  int64_t position(int64_t query) const { return args.position + depth(query); }
  int64_t lowest(int64_t query) const {
    return args.window ? max_of(0, position(query) - args.window + 1) : 0;
  }
};

// acc (rows, width) gains what each row sees of the first `seen` positions of a block that begins at `p`.
// weights: of its first position, a row `span` further for each row, scaled in place. block: (64, width).
void weigh_block(const Queries& queries, const Head& at, int64_t p, int64_t seen, int64_t rows,
                 float* weights, int64_t span, int64_t width, float* block, float* acc) {
  const KvView& kv = queries.args.kv;
  // Several rows share the conversion to float; one goes without.
  const bool convert = rows > 1 || width != kv.head_dim;
  for (int64_t i = 0; i < seen && convert; ++i) load_value(at, kv, i, width, block + i * width);
  for (int64_t r = 0; r < rows; ++r, weights += span, acc += width) {
    const int64_t query = queries.of(r);
    const int64_t low = max_of(queries.lowest(query) - p, 0),
                  high = min_of(queries.position(query) - p, seen - 1);
    if (at.value_scales) multiply(weights, at.value_scales, seen);
    if (convert)
      weigh_values([&](int64_t i, int64_t d) { return load(block + i * width + d); }, width, weights, low,
                   high, acc);
    else
      weigh_values([&](int64_t i, int64_t d) { return load_codes(at.values, kv.bits, i * width + d); }, width,
                   weights, low, high, acc);
  }
}

}  // namespace

void kv_write(const KvView& kv, int64_t position, const float* k, const float* v) {
  const int64_t slot = position % kKvBlock, key_at = key_index(slot, kv.head_dim);
  for (int64_t head = 0; head < kv.heads; ++head) {
    const Head at = head_at(kv, position / kKvBlock, head);
    const float *key = k + head * kv.head_dim, *value = v + head * kv.head_dim;
    if (kv.bits == 16) {
      half_head(key, kv.head_dim, reinterpret_cast<uint16_t*>(at.keys) + key_at, kLanes);
      half_head(value, kv.head_dim, reinterpret_cast<uint16_t*>(at.values) + slot * kv.head_dim, 1);
    } else {
      quantize_head(key, kv.head_dim, reinterpret_cast<int8_t*>(at.keys) + key_at, kLanes,
                    at.key_scales + slot);
      quantize_head(value, kv.head_dim, reinterpret_cast<int8_t*>(at.values) + slot * kv.head_dim, 1,
                    at.value_scales + slot);
    }
  }
}

void kv_move(const KvView& kv, int64_t from, int64_t to) {
  for (int64_t head = 0; head < kv.heads; ++head)
    copy_position(kv, head_at(kv, from / kKvBlock, head), from % kKvBlock, head_at(kv, to / kKvBlock, head),
                  to % kKvBlock);
}

void attention(const AttentionArgs& args, int64_t head, int64_t q_begin, int64_t q_end, float* scratch) {
  const KvView& kv = args.kv;
  const bool tree = args.tree.parents != nullptr;
  const int64_t shared = args.heads / kv.heads, dim = kv.head_dim, width = pad16(dim);
  const int64_t rows = (q_end - q_begin) * shared;
  const Queries queries{args, q_begin, shared};
  int64_t first = queries.lowest(q_begin);
  for (int64_t query = q_begin + 1; query < q_end; ++query) first = min_of(first, queries.lowest(query));
  // A tree's tokens lie side by side: all that it has stored up to its last query is scored, to be picked
  // from.
  const int64_t last = args.position + q_end - 1;
  const int64_t base = first / kKvBlock * kKvBlock, end = (last / kKvBlock + 1) * kKvBlock, span = end - base;
  // Queries see the same up to here.
  const int64_t fork = tree ? args.position : end;
  float* q = scratch;                 // (rows, dim)
  float* scores = q + rows * dim;     // (rows, span)
  float* acc = scores + rows * span;  // (rows, width)
  float* block = acc + rows * width;  // (64, width)
  float* sums = block + kKvBlock * width;
  Path path(args, head, width, sums + rows);  // (64, width), of a tree
  for (int64_t r = 0; r < rows; ++r)
    memcpy(q + r * dim, args.q + queries.of(r) * args.q_stride + (head * shared + r % shared) * dim,
           static_cast<size_t>(dim) * sizeof(float));
  const float scale = 1.0f / sqrtf(static_cast<float>(dim));
  for (int64_t p = base; p < end; p += kKvBlock)
    score_block(head_at(kv, p / kKvBlock, head), kv, q, rows, min_of((last - p) / kLanes + 1, 4), scale,
                scores + p - base, span);
  // of(its first depth within the window, its last, its scores from the fork on, row) of every row of a tree.
  const auto each_path = [&](const auto& of) {
    for (int64_t r = 0; r < rows && tree; ++r) {
      const int64_t query = queries.of(r);
      if (r % shared == 0) path.show(query);
      of(max_of(0, queries.lowest(query) - fork), queries.depth(query), scores + r * span + fork - base, r);
    }
  };
  each_path([&](int64_t depth, int64_t deepest, float* seen, int64_t) { path.gather(seen, depth, deepest); });
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = queries.of(r);
    sums[r] = softmax_row(scores + r * span, base, end, queries.lowest(query), queries.position(query));
  }
  for (int64_t i = 0; i < rows * width; i += 16) store(acc + i, zero());
  for (int64_t p = base; p < fork; p += kKvBlock)
    weigh_block(queries, head_at(kv, p / kKvBlock, head), p, min_of(kKvBlock, fork - p), rows,
                scores + p - base, span, width, block, acc);
  each_path([&](int64_t depth, int64_t deepest, float* weights, int64_t r) {
    path.weigh(weights, depth, deepest, acc + r * width);
  });
  for (int64_t r = 0; r < rows; ++r) {
    float* out = args.out + (queries.of(r) * args.heads + head * shared + r % shared) * dim;
    for (int64_t d = 0; d < dim; d += 16)
      store_partial(out + d, mul(load(acc + r * width + d), set1(1.0f / sums[r])), dim - d);
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
