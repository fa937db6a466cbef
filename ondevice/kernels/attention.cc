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

// The last blocks of one head as a node of a token tree sees them: what came before the tree, and behind it
// the node's ancestors and itself, each where it lies in plain decoding.
class Path {
 public:
  // memory: of kPathBlocks head blocks.
  Path(const AttentionArgs& args, int64_t head, uint8_t* memory)
      : args_(args), head_(head), memory_(memory), first_(args.position / kKvBlock) {
    // What no path has written is masked, but must be numbers.
    const int64_t copied = args.position % kKvBlock ? args.kv.head_bytes : 0;
    if (copied)
      memcpy(memory, args.kv.blocks[first_] + args.kv.layer_offset + head * copied,
             static_cast<size_t>(copied));
    memset(memory + copied, 0, static_cast<size_t>(kPathBlocks * args.kv.head_bytes - copied));
    for (int64_t& node : held_) node = -1;
  }

  void show(int64_t node) {
    for (; node >= 0; node = args_.tree.parents[node]) {
      const int64_t depth = args_.tree.depths[node];
      if (held_[depth] == node) continue;
      held_[depth] = node;
      const int64_t stored = args_.position + node, shown = args_.position + depth;
      copy_position(args_.kv, head_at(args_.kv, stored / kKvBlock, head_), stored % kKvBlock, at(shown),
                    shown % kKvBlock);
    }
  }

  Head at(int64_t position) const {
    return head_in(args_.kv, memory_ + (position / kKvBlock - first_) * args_.kv.head_bytes);
  }

 private:
  const AttentionArgs& args_;
  int64_t head_;
  uint8_t* memory_;
  int64_t first_;
  int64_t held_[kKvBlock];  // the node shown at each depth, or -1
};

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

// A block's values as floats (64, width), zeros behind head_dim.
void load_values(const Head& head, const KvView& kv, int64_t width, float* values) {
  const int64_t bytes = kv.bits / 8;
  for (int64_t p = 0; p < kKvBlock; ++p)
    for (int64_t d = 0; d < width; d += 16) {
      const int64_t index = p * kv.head_dim + d;
      if (d + 16 <= kv.head_dim) {
        store(values + p * width + d, load_codes(head.values, kv.bits, index));
        continue;
      }
      uint8_t tail[32] = {0};
      memcpy(tail, head.values + index * bytes, static_cast<size_t>((kv.head_dim - d) * bytes));
      store(values + p * width + d, load_codes(tail, kv.bits, 0));
    }
}

int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

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
  const auto position_of = [&](int64_t query) {
    return args.position + (tree ? args.tree.depths[query] : query);
  };
  const auto lowest_of = [&](int64_t query) {
    return args.window ? max_of(0, position_of(query) - args.window + 1) : 0;
  };
  int64_t last = position_of(q_begin), first = lowest_of(q_begin);
  for (int64_t query = q_begin + 1; query < q_end; ++query) {
    last = max_of(last, position_of(query));
    first = min_of(first, lowest_of(query));
  }
  const int64_t base = first / kKvBlock * kKvBlock, end = (last / kKvBlock + 1) * kKvBlock, span = end - base;
  // From here on, what a query sees of a block depends on its path.
  const int64_t fork = tree ? max_of(base, args.position / kKvBlock * kKvBlock) : end;
  float* q = scratch;                 // (rows, dim)
  float* scores = q + rows * dim;     // (rows, span)
  float* acc = scores + rows * span;  // (rows, width)
  float* block = acc + rows * width;  // (64, width)
  float* sums = block + kKvBlock * width;
  uint8_t* path_memory = reinterpret_cast<uint8_t*>(sums + rows);
  for (int64_t r = 0; r < rows; ++r)
    memcpy(q + r * dim, args.q + (q_begin + r / shared) * args.q_stride + (head * shared + r % shared) * dim,
           static_cast<size_t>(dim) * sizeof(float));
  const float scale = 1.0f / sqrtf(static_cast<float>(dim));
  const auto score = [&](const Head& at, int64_t p, int64_t row, int64_t count, int64_t highest) {
    score_block(at, kv, q + row * dim, count, min_of((highest - p) / kLanes + 1, 4), scale,
                scores + row * span + p - base, span);
  };
  // Several queries share the conversion to float; one goes without.
  const auto weigh = [&](const Head& at, int64_t p, int64_t row, int64_t count) {
    const bool convert = count > 1 || width != dim;
    if (convert) load_values(at, kv, width, block);
    for (int64_t r = row; r < row + count; ++r) {
      const int64_t high = position_of(q_begin + r / shared), low = lowest_of(q_begin + r / shared);
      float* weights = scores + r * span + p - base;
      if (at.value_scales)
        for (int64_t i = 0; i < kKvBlock; i += 16)
          store(weights + i, mul(load(weights + i), load(at.value_scales + i)));
      const int64_t begin = max_of(low - p, 0), last_seen = min_of(high - p, kKvBlock - 1);
      float* sum = acc + r * width;
      if (convert)
        weigh_values([&](int64_t i, int64_t d) { return load(block + i * width + d); }, width, weights, begin,
                     last_seen, sum);
      else
        weigh_values([&](int64_t i, int64_t d) { return load_codes(at.values, kv.bits, i * dim + d); }, width,
                     weights, begin, last_seen, sum);
    }
  };
  for (int64_t p = base; p < fork; p += kKvBlock) score(head_at(kv, p / kKvBlock, head), p, 0, rows, last);
  if (tree) {
    Path path(args, head, path_memory);
    for (int64_t query = q_begin; query < q_end; ++query) {
      path.show(query);
      for (int64_t p = fork; p <= position_of(query); p += kKvBlock)
        score(path.at(p), p, (query - q_begin) * shared, shared, position_of(query));
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = q_begin + r / shared;
    sums[r] = softmax_row(scores + r * span, base, end, lowest_of(query), position_of(query));
  }
  for (int64_t i = 0; i < rows * width; i += 16) store(acc + i, zero());
  for (int64_t p = base; p < fork; p += kKvBlock) weigh(head_at(kv, p / kKvBlock, head), p, 0, rows);
  if (tree) {
    Path path(args, head, path_memory);
    for (int64_t query = q_begin; query < q_end; ++query) {
      path.show(query);
      for (int64_t p = fork; p <= position_of(query); p += kKvBlock)
        weigh(path.at(p), p, (query - q_begin) * shared, shared);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* out = args.out + ((q_begin + r / shared) * args.heads + head * shared + r % shared) * dim;
    for (int64_t d = 0; d < dim; d += 16)
      store_partial(out + d, mul(load(acc + r * width + d), set1(1.0f / sums[r])), dim - d);
  }
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
