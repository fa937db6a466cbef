#include "kv_block.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// Where there are 32 registers of 16 lanes, four query rows and four vectors are multiplied side by side.
constexpr bool kManyRegisters = kPairedTokens > 0;
constexpr int kRowsTogether = kManyRegisters ? 4 : 1;

// Rows from which on keys are converted to floats once for all of them.
constexpr int64_t kConvertedRows = 8;

template <int BITS>
F load_codes(const uint8_t* base, int64_t index) {
  return BITS == 16 ? load_half(reinterpret_cast<const uint16_t*>(base) + index)
                    : load_int8(reinterpret_cast<const int8_t*>(base) + index);
}

F load_codes(const uint8_t* base, int bits, int64_t index) {
  return bits == 16 ? load_codes<16>(base, index) : load_codes<8>(base, index);
}

int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; }

// Dimensions [first, last) of keys and queries, whose products have the same scale for a key.
struct Dimensions {
  int64_t first, last;
  const float* scales;  // of the 64 keys, or null: 1
  bool joins;           // whether products are added to those of the dimensions before
};

// The products of R queries, from q on, with V vectors of 16 keys from vector `first` on. load_key(i) gives
// 16 values of the keys' block.
template <int R, int V, class Load>
ONDEVICE_INLINE void multiply_keys(const Load& load_key, int64_t head_dim, const Dimensions& dims,
                                   const float* q, int64_t first, F (*products)[V]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) products[r][v] = zero();
  for (int64_t d = dims.first; d < dims.last; ++d) {
    F k[V];
    for (int v = 0; v < V; ++v) k[v] = load_key(((first + v) * head_dim + d) * kLanes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) products[r][v] = fma(set1(q[r * head_dim + d]), k[v], products[r][v]);
  }
}

// Scores of `rows` queries against the first 16 * `vectors` keys of a block, of some dimensions
// -> scores[r * stride + position]. Queries share each key vector, and key vectors each query, so that enough
// sums are under way to keep the multiplier busy.
template <class Load>
void score_dimensions(const Load& load_key, int64_t head_dim, const Dimensions& dims, const float* q,
                      int64_t rows, int64_t vectors, float scale, float* scores, int64_t stride) {
  F factor[4];
  for (int i = 0; i < 4; ++i)
    factor[i] = dims.scales ? mul(load(dims.scales + 16 * i), set1(scale)) : set1(scale);
  int64_t r = 0;
  const auto score_vectors = [&](auto row_count, auto vector_count, int64_t first) ONDEVICE_INLINED {
    constexpr int R = row_count.value, V = vector_count.value;
    F products[R][V];
    multiply_keys<R>(load_key, head_dim, dims, q + r * head_dim, first, products);
    for (int i = 0; i < R; ++i)
      for (int v = 0; v < V; ++v) {
        float* to = scores + (r + i) * stride + 16 * (first + v);
        const F scaled = mul(products[i][v], factor[first + v]);
        store(to, dims.joins ? add(load(to), scaled) : scaled);
      }
  };
  const auto score_rows = [&](auto row_count) ONDEVICE_INLINED {
    constexpr int R = row_count.value, V = kManyRegisters ? 4 : R > 2 ? 1 : R > 1 ? 2 : 4;
    int64_t first = 0;
    for (; first + V <= vectors; first += V) score_vectors(row_count, Count<V>(), first);
    for (; first < vectors; ++first) score_vectors(row_count, Count<1>(), first);
    r += R;
  };
  while (r + 4 <= rows) score_rows(Count<4>());
  if (r + 3 <= rows) score_rows(Count<3>());
  if (r + 2 <= rows) score_rows(Count<2>());
  if (r < rows) score_rows(Count<1>());
}

// Scores over all dimensions: in two steps where those of values have scales of their dims. floats: scratch
// memory, (64, dim).
void score_block(const Head& head, const KvView& kv, const float* q, int64_t rows, int64_t vectors,
                 float scale, float* floats, float* scores, int64_t stride) {
  const int64_t dim = kv.head_dim, split = kv.latent && kv.bits == 8 ? kv.latent : 0;
  const auto score = [&](const auto& load_key) {
    if (split)
      score_dimensions(load_key, dim, {0, split, head.value_scales, false}, q, rows, vectors, scale, scores,
                       stride);
    score_dimensions(load_key, dim, {split, dim, head.key_scales, split > 0}, q, rows, vectors, scale, scores,
                     stride);
  };
  if (rows >= kConvertedRows) {
    for (int64_t i = 0; i < vectors * dim * kLanes; i += kLanes)
      store(floats + i, load_codes(head.keys, kv.bits, i));
    return score([&](int64_t i) { return load(floats + i); });
  }
  if (kv.bits == 16) return score([&](int64_t i) { return load_codes<16>(head.keys, i); });
  score([&](int64_t i) { return load_codes<8>(head.keys, i); });
}

// The largest of n values, at least one.
float largest(const float* values, int64_t n) {
  F tops = set1(values[0]);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) tops = max(tops, load(values + i));
  float lanes[kLanes];
  store(lanes, tops);
  float top = lanes[0];
  for (const float lane : lanes) top = lane > top ? lane : top;
  for (; i < n; ++i) top = values[i] > top ? values[i] : top;
  return top;
}

// exp(score - max) over positions [low, high] of a row that starts at position `base`; 0 outside.
// The sum is kept in 16 lanes by position % 16 and returned. sink: a score beside those of the row, or null.
float softmax_row(float* scores, int64_t base, int64_t end, int64_t low, int64_t high, const float* sink) {
  float top = largest(scores + low - base, high + 1 - low);
  if (sink && *sink > top) top = *sink;
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

// D vectors of values, from dimension d on, of positions [low, high] of one block, ascending: acc[r * width]
// gains weights[r * stride] * value, for R rows. load_at(p, d) gives values d .. d + 15 of position p.
template <int R, int D, class Load>
ONDEVICE_INLINE void weigh_dimensions(const Load& load_at, int64_t width, const float* weights,
                                      int64_t stride, int64_t low, int64_t high, int64_t d, float* acc) {
  F sums[R][D];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i) sums[r][i] = load(acc + r * width + d + 16 * i);
  for (int64_t p = low; p <= high; ++p) {
    F values[D];
    for (int i = 0; i < D; ++i) values[i] = load_at(p, d + 16 * i);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < D; ++i) sums[r][i] = fma(set1(weights[r * stride + p]), values[i], sums[r][i]);
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i) store(acc + r * width + d + 16 * i, sums[r][i]);
}

// `weigh_dimensions` for all of a value's dimensions.
template <int R, class Load>
void weigh_rows(const Load& load_at, int64_t width, const float* weights, int64_t stride, int64_t low,
                int64_t high, float* acc) {
  int64_t d = 0;
  for (; d + 64 <= width; d += 64) weigh_dimensions<R, 4>(load_at, width, weights, stride, low, high, d, acc);
  for (; d < width; d += 16) weigh_dimensions<R, 1>(load_at, width, weights, stride, low, high, d, acc);
}

// The same for one row.
template <class Load>
void weigh_values(const Load& load_at, int64_t width, const float* weights, int64_t low, int64_t high,
                  float* acc) {
  weigh_rows<1>(load_at, width, weights, 0, low, high, acc);
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

// Fetches a block's keys or values, `dim` codes each: blocks lie apart, where hardware doesn't foresee the
// next.
void prefetch_codes(const uint8_t* codes, const KvView& kv, int64_t dim) {
  for (int64_t at = 0; at < kKvBlock * dim * kv.bits / 8; at += 64) prefetch(codes + at);
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

// `weigh_block` for rows r to r + R - 1, which share each value at the positions that all of them see.
// load_at: as in `weigh_dimensions`. weights, acc: those of row r.
template <int R, class Load>
void weigh_together(const Load& load_at, const Queries& queries, int64_t r, int64_t p, int64_t seen,
                    const float* weights, int64_t span, int64_t width, float* acc) {
  int64_t low[R], high[R], from = 0, to = seen - 1;
  for (int i = 0; i < R; ++i) {
    const int64_t query = queries.query_of(r + i);
    low[i] = max_of(queries.lowest(query) - p, 0);
    high[i] = min_of(queries.position(query) - p, seen - 1);
    from = max_of(from, low[i]);
    to = min_of(to, high[i]);
  }
  to = max_of(to, from - 1);
  for (int i = 0; i < R && R > 1; ++i)
    weigh_values(load_at, width, weights + i * span, low[i], min_of(high[i], from - 1), acc + i * width);
  weigh_rows<R>(load_at, width, weights, span, from, to, acc);
  for (int i = 0; i < R && R > 1; ++i)
    weigh_values(load_at, width, weights + i * span, to + 1, high[i], acc + i * width);
}

// acc (rows, width) gains weight * value of each row's visible positions among the first `seen` of the block
// that begins at position `p`. weights: row r's are `span` floats behind row r - 1's, the first for position
// p; scaled in place. block: scratch memory, (64, width).
void weigh_block(const Queries& queries, const Head& at, int64_t p, int64_t seen, int64_t rows,
                 float* weights, int64_t span, int64_t width, float* block, float* acc) {
  const KvView& kv = queries.args.kv;
  for (int64_t r = 0; r < rows && at.value_scales; ++r) multiply(weights + r * span, at.value_scales, seen);
  const auto weigh_all = [&](const auto& load_at) {
    int64_t r = 0;
    const auto weigh_some = [&](auto count) ONDEVICE_INLINED {
      weigh_together<count.value>(load_at, queries, r, p, seen, weights + r * span, span, width,
                                  acc + r * width);
      r += count.value;
    };
    while (r + kRowsTogether <= rows) weigh_some(Count<kRowsTogether>());
    if (kRowsTogether > 3 && r + 3 <= rows) weigh_some(Count<3>());
    if (kRowsTogether > 2 && r + 2 <= rows) weigh_some(Count<2>());
    if (r < rows) weigh_some(Count<1>());
  };
  // Values are converted to floats once for all rows; where they are read once, as they are read.
  if (rows <= kRowsTogether && !kv.latent && width == kv.value_dim())
    return weigh_all([&](int64_t i, int64_t d) { return load_codes(at.values, kv.bits, i * width + d); });
  load_values(at, kv, seen, width, block);
  weigh_all([&](int64_t i, int64_t d) { return load(block + i * width + d); });
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
  float* block = acc + rows * width;  // (64, dim or width)
  float* sums = block + kKvBlock * pad16(max_of(dim, value_dim));
  Path path(args, head, width, sums + rows);  // (64, width), of a tree
  for (int64_t r = 0; r < rows; ++r)
    memcpy(q + r * dim, args.q + queries.query_of(r) * args.q_stride + (head * shared + r % shared) * dim,
           static_cast<size_t>(dim) * sizeof(float));
  for (int64_t p = base; p < end; p += kKvBlock) {
    if (p + kKvBlock < end) prefetch_codes(head_at(kv, p / kKvBlock + 1, head).keys, kv, dim);
    score_block(head_at(kv, p / kKvBlock, head), kv, q, rows, min_of((last - p) / kLanes + 1, 4), args.scale,
                block, scores + p - base, span);
  }
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
  for (int64_t p = base; p < fork; p += kKvBlock) {
    if (p + kKvBlock < fork) prefetch_codes(head_at(kv, p / kKvBlock + 1, head).values, kv, value_dim);
    weigh_block(queries, head_at(kv, p / kKvBlock, head), p, min_of(kKvBlock, fork - p), rows,
                scores + p - base, span, width, block, acc);
  }
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
