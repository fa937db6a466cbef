#include "kv_block.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

F load_codes(const uint8_t* base, int bits, int64_t index) {
  return bits == 16 ? load_half(reinterpret_cast<const uint16_t*>(base) + index)
                    : load_int8(reinterpret_cast<const int8_t*>(base) + index);
}

int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; }

// Dimensions [first, last) of keys and queries, whose products have the same scale for a key.
struct Dimensions {
  int64_t first, last;
  const float* scales;  // of the 64 keys, or null: 1
  bool joins;           // whether products are added to those of the dimensions before
};

// Scores of `rows` queries against the first 16 * `vectors` keys of a block, of some dimensions
// -> scores[r * stride + position]. Four queries share each key vector, or one query takes four vectors, to
// keep the multiplier busy.
void score_dimensions(const uint8_t* keys, const KvView& kv, const Dimensions& own, const float* q,
                      int64_t rows, int64_t vectors, float scale, float* scores, int64_t stride) {
  F factor[4];
  for (int i = 0; i < 4; ++i)
    factor[i] = own.scales ? mul(load(own.scales + 16 * i), set1(scale)) : set1(scale);
  const auto put = [&](F product, int64_t i, float* to) {
    const F scaled = mul(product, factor[i]);
    store(to, own.joins ? add(load(to), scaled) : scaled);
  };
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    for (int64_t i = 0; i < vectors; ++i) {
      const float* q0 = q + r * kv.head_dim;
      F acc[4] = {zero(), zero(), zero(), zero()};
      for (int64_t d = own.first; d < own.last; ++d) {
        const F k = load_codes(keys, kv.bits, (i * kv.head_dim + d) * kLanes);
        for (int j = 0; j < 4; ++j) acc[j] = fma(set1(q0[j * kv.head_dim + d]), k, acc[j]);
      }
      for (int j = 0; j < 4; ++j) put(acc[j], i, scores + (r + j) * stride + 16 * i);
    }
  for (; r < rows; ++r) {
    F acc[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < vectors && vectors < 4; ++i)
      for (int64_t d = own.first; d < own.last; ++d)
        acc[i] = fma(set1(q[r * kv.head_dim + d]), load_codes(keys, kv.bits, (i * kv.head_dim + d) * kLanes),
                     acc[i]);
    for (int64_t d = own.first; d < own.last && vectors == 4; ++d) {
      const F value = set1(q[r * kv.head_dim + d]);
      for (int i = 0; i < 4; ++i)
        acc[i] = fma(value, load_codes(keys, kv.bits, (i * kv.head_dim + d) * kLanes), acc[i]);
    }
    for (int64_t i = 0; i < vectors; ++i) put(acc[i], i, scores + r * stride + 16 * i);
  }
}

// Scores over all dimensions: in two steps where those of values have scales of their own.
void score_block(const Head& head, const KvView& kv, const float* q, int64_t rows, int64_t vectors,
                 float scale, float* scores, int64_t stride) {
  const int64_t split = kv.latent && kv.bits == 8 ? kv.latent : 0;
  if (split)
    score_dimensions(head.keys, kv, {0, split, head.value_scales, false}, q, rows, vectors, scale, scores,
                     stride);
  score_dimensions(head.keys, kv, {split, kv.head_dim, head.key_scales, split > 0}, q, rows, vectors, scale,
                   scores, stride);
}

// exp(score - max) over positions [low, high] of a row that starts at position `base`; 0 outside.
// The sum is kept in 16 lanes by position % 16 and returned. sink: a score beside those of the row, or null.
float softmax_row(float* scores, int64_t base, int64_t end, int64_t low, int64_t high, const float* sink) {
  float top = scores[low - base];
  if (sink && *sink > top) top = *sink;
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
  if (!sink) return reduce_add(sum);
  float lanes[16];
  store(lanes, exp_lanes(sub(set1(*sink), set1(top))));
  return reduce_add(sum) + lanes[0];
}

void multiply(float* x, const float* by, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, mul(load(x + i), load(by + i)));
  for (; i < n; ++i) x[i] *= by[i];
}

// acc[d] gains weight * value for positions [low, high] of one block, ascending. load_at(p, d) gives
// values d .. d + 15 of position p.
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

// The value at position `slot` of a block as floats (width), zeros behind value_dim.
void load_value(const Head& head, const KvView& kv, int64_t slot, int64_t width, float* value) {
  const int64_t bytes = kv.bits / 8, value_dim = kv.value_dim();
  if (kv.latent) {
    const uint8_t* key = head.keys + key_index(slot, kv.head_dim) * bytes;
    for (int64_t d = 0; d < width; d += 16) {
      uint8_t lanes[32];
      for (int64_t k = 0; k < 16; ++k)
        memcpy(lanes + k * bytes, key + (d + k) * kLanes * bytes, static_cast<size_t>(bytes));
      store(value + d, load_codes(lanes, kv.bits, 0));
    }
    return;
  }
  for (int64_t d = 0; d < width; d += 16) {
    const int64_t index = slot * value_dim + d;
    if (d + 16 <= value_dim) {
      store(value + d, load_codes(head.values, kv.bits, index));
      continue;
    }
    uint8_t tail[32] = {0};
    memcpy(tail, head.values + index * bytes, static_cast<size_t>((value_dim - d) * bytes));
    store(value + d, load_codes(tail, kv.bits, 0));
  }
}

// The values at the first `seen` positions of a block as floats, (seen, width).
void load_values(const Head& head, const KvView& kv, int64_t seen, int64_t width, float* values) {
  if (!kv.latent) {
    for (int64_t i = 0; i < seen; ++i) load_value(head, kv, i, width, values + i * width);
    return;
  }
  // Sixteen dimensions of 16 positions at a time, which lie the other way round.
  for (int64_t p = 0; p < seen; p += kLanes)
    for (int64_t d = 0; d < width; d += 16) {
      float lanes[16][16];
      for (int64_t k = 0; k < 16; ++k)
        store(lanes[k], load_codes(head.keys, kv.bits, p * kv.head_dim + (d + k) * kLanes));
      for (int64_t i = 0; i < kLanes && p + i < seen; ++i)
        for (int64_t k = 0; k < 16; ++k) values[(p + i) * width + d + k] = lanes[k][i];
    }
}

int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The path from a draft tree's root to one of its nodes: the node at each depth, and its value. The cache
// holds nodes in the order of the tree; attention visits those of a path in the order of plain decoding.
class Path {
 public:
  // values: memory for (kKvBlock, width) floats.
  Path(const AttentionArgs& args, int64_t head, int64_t width, float* values)
      : args_(args), head_(head), width_(width), values_(values) {
    for (int64_t i = 0; i < kKvBlock; ++i) nodes_[i] = valued_[i] = -1;
  }

  void lead_to(int64_t node) {
    for (; node >= 0; node = args_.tree.parents[node]) nodes_[args_.tree.depths[node]] = node;
  }

  // Moves scores of the path's nodes from `depth` on from the node's index in `scores` to its depth.
  void gather(float* scores, int64_t depth, int64_t last) const {
    // A node's index is never below its depth: whatever is overwritten has been read.
    for (; depth <= last; ++depth) scores[depth] = scores[nodes_[depth]];
  }

  // acc (width) gains weight * value of the nodes from `depth` on. weights: by depth; scaled in place.
  void weigh(float* weights, int64_t depth, int64_t last, float* acc) {
    for (int64_t i = depth; i <= last; ++i) {
      if (valued_[i] == nodes_[i]) continue;
      valued_[i] = nodes_[i];
      const int64_t position = args_.position + nodes_[i];
      const Head at = head_at(args_.kv, position / kKvBlock, head_);
      load_value(at, args_.kv, position % kKvBlock, width_, values_ + i * width_);
      if (at.value_scales) scales_[i] = at.value_scales[position % kKvBlock];
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
  int64_t valued_[kKvBlock];  // the node whose value is in values_
  float scales_[kKvBlock];
};

// Rows of queries: for each token, one after another, the query heads that read the same kv head.
struct Queries {
  const AttentionArgs& args;
  int64_t begin, shared;

  int64_t query_of(int64_t row) const { return begin + row / shared; }
  int64_t depth(int64_t query) const { return args.tree.parents ? args.tree.depths[query] : query; }
  int64_t position(int64_t query) const { return args.position + depth(query); }
  int64_t lowest(int64_t query) const {
    return args.window ? max_of(0, position(query) - args.window + 1) : 0;
  }
};

// acc (rows, width) gains weight * value of each row's visible positions among the first `seen` of the block
// that begins at position `p`. weights: row r's are `span` floats behind row r - 1's, the first for position
// p; scaled in place. block: scratch memory, (64, width).
void weigh_block(const Queries& queries, const Head& at, int64_t p, int64_t seen, int64_t rows,
                 float* weights, int64_t span, int64_t width, float* block, float* acc) {
  const KvView& kv = queries.args.kv;
  // Values are converted to floats once for several rows; for a single row, as they are read.
  const bool convert = rows > 1 || kv.latent || width != kv.value_dim();
  if (convert) load_values(at, kv, seen, width, block);
  for (int64_t r = 0; r < rows; ++r, weights += span, acc += width) {
    const int64_t query = queries.query_of(r);
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

void attention(const AttentionArgs& args, int64_t head, int64_t q_begin, int64_t q_end, float* scratch) {
  const KvView& kv = args.kv;
  const bool tree = args.tree.parents != nullptr;
  const int64_t shared = args.heads / kv.heads, dim = kv.head_dim, value_dim = kv.value_dim();
  const int64_t width = pad16(value_dim);
  const int64_t rows = (q_end - q_begin) * shared;
  const Queries queries{args, q_begin, shared};
  int64_t first = queries.lowest(q_begin);
  for (int64_t query = q_begin + 1; query < q_end; ++query) first = min_of(first, queries.lowest(query));
  // A tree's tokens are stored one after another: every one up to the last query is scored, and each row then
  // picks those of its path.
  const int64_t last = args.position + q_end - 1;
  const int64_t base = first / kKvBlock * kKvBlock, end = (last / kKvBlock + 1) * kKvBlock, span = end - base;
  // All queries see the same positions up to here.
  const int64_t fork = tree ? args.position : end;
  float* q = scratch;                 // (rows, dim)
  float* scores = q + rows * dim;     // (rows, span)
  float* acc = scores + rows * span;  // (rows, width)
  float* block = acc + rows * width;  // (64, width)
  float* sums = block + kKvBlock * width;
  Path path(args, head, width, sums + rows);  // (64, width), of a tree
  for (int64_t r = 0; r < rows; ++r)
    memcpy(q + r * dim, args.q + queries.query_of(r) * args.q_stride + (head * shared + r % shared) * dim,
           static_cast<size_t>(dim) * sizeof(float));
  for (int64_t p = base; p < end; p += kKvBlock)
    score_block(head_at(kv, p / kKvBlock, head), kv, q, rows, min_of((last - p) / kLanes + 1, 4), args.scale,
                scores + p - base, span);
  for (int64_t r = 0; r < rows && args.soft_cap > 0.0f; ++r)
    soft_cap(scores + r * span, args.soft_cap, last + 1 - base);
  // Calls function(first depth inside the window, last depth, scores from the fork on, row) for each row of a
  // tree.
  const auto each_path = [&](const auto& function) {
    for (int64_t r = 0; r < rows && tree; ++r) {
      const int64_t query = queries.query_of(r);
      if (r % shared == 0) path.lead_to(query);
      function(max_of(0, queries.lowest(query) - fork), queries.depth(query), scores + r * span + fork - base,
               r);
    }
  };
  each_path([&](int64_t depth, int64_t deepest, float* seen, int64_t) { path.gather(seen, depth, deepest); });
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = queries.query_of(r);
    const float* sink = args.sinks ? args.sinks + head * shared + r % shared : nullptr;
    sums[r] = softmax_row(scores + r * span, base, end, queries.lowest(query), queries.position(query), sink);
  }
  for (int64_t i = 0; i < rows * width; i += 16) store(acc + i, zero());
  for (int64_t p = base; p < fork; p += kKvBlock)
    weigh_block(queries, head_at(kv, p / kKvBlock, head), p, min_of(kKvBlock, fork - p), rows,
                scores + p - base, span, width, block, acc);
  each_path([&](int64_t depth, int64_t deepest, float* weights, int64_t r) {
    path.weigh(weights, depth, deepest, acc + r * width);
  });
  for (int64_t r = 0; r < rows; ++r) {
    float* out = args.out + (queries.query_of(r) * args.heads + head * shared + r % shared) * value_dim;
    for (int64_t d = 0; d < value_dim; d += 16)
      store_partial(out + d, mul(load(acc + r * width + d), set1(1.0f / sums[r])), value_dim - d);
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
