// The kernels of one instruction set ("target"), as a table. Each target defines one; the runner picks one.
//
// Every function computes a range of outputs, allocates nothing, validates nothing and has one order of
// operations per output: the numbers of tokens and threads and the target don't change a bit.
#pragma once

#include <cstdint>

namespace ondevice {

constexpr int64_t kGroup = 64;      // columns that share one scale and bias
constexpr int64_t kSuperGroup = 4;  // times 64 columns that share the upper one of two levels of scales
constexpr int64_t kTile = 16;       // output rows that are stored interleaved
constexpr int64_t kKvBlock = 64;    // positions of a KV block

// Groups of a row of `cols` columns.
constexpr int64_t groups_of(int64_t cols) { return (cols + kGroup - 1) / kGroup; }

// What makes weights of codes, in the order of `config.Scales`. With two levels, 256 columns share d and, in
// kTwoLevel, dmin, both float16; each group has integers, a scale s and in kTwoLevel a minimum m.
enum class ScaleKind {
  kAffine,             // scale * code + bias, float16
  kSymmetric,          // scale * (code - 2^(bits - 1))
  kMxfp4,              // 4 bits in groups of 32: 2^(s - 127) * E2M1 of the code, s a byte
  kTable,              // 4 bits in groups of 32: scale * kTableValues of the code
  kTwoLevel,           // 2 bits in groups of 16, 4 and 5 in groups of 32: d * s * code - dmin * m
  kTwoLevelSymmetric,  // 3 and 6 bits in groups of 16: d * s * (code - 2^(bits - 1))
  kTwoLevelTable,      // 4 bits in groups of 32: d * s * kTableValues of the code
};

// How rows of weights are stored: bits per weight, columns that share a scale (16, 32 or 64), and the kind of
// scales.
struct RowFormat {
  int bits;
  int group = kGroup;
  ScaleKind kind = ScaleKind::kAffine;

  RowFormat(int bits, int group = kGroup,
            ScaleKind kind = ScaleKind::kAffine)  // NOLINT: bits alone are a format
      : bits(bits), group(group), kind(kind) {}
  bool operator==(const RowFormat& other) const {
    return bits == other.bits && group == other.group && kind == other.kind;
  }
  bool implied() const { return kind == ScaleKind::kSymmetric; }
  bool mxfp4() const { return kind == ScaleKind::kMxfp4; }
  bool two_levels() const { return kind >= ScaleKind::kTwoLevel; }
  bool has_biases() const { return bits != 16 && kind == ScaleKind::kAffine; }
  int64_t scale_bytes() const { return mxfp4() ? 1 : 2; }
  // Scales of 64 columns.
  int64_t scales() const { return kGroup / group; }
  // Scales of the 64 activations that they meet: each group has one. With two levels all share one, so that
  // the sum over groups stays an integer.
  int64_t input_scales() const { return two_levels() ? 1 : scales(); }
  // Bytes of 64 columns: of their codes, and of their scales and biases where they have one level.
  int64_t codes_bytes() const { return kGroup * bits / 8; }
  int64_t affine_bytes() const { return bits == 16 ? 0 : scales() * scale_bytes() * (has_biases() ? 2 : 1); }
  // With two levels: bytes of d and dmin, and of these and the integers of 256 columns.
  int64_t upper_bytes() const { return kind == ScaleKind::kTwoLevel ? 4 : 2; }
  int64_t header_bytes() const {
    const bool shared = bits == 3 || (kind == ScaleKind::kTwoLevel && bits > 2);  // bytes of several integers
    return upper_bytes() + kSuperGroup * (shared ? 3 : scales());
  }
  // Bytes of a row of `groups` times 64 columns; with two levels `groups` is a multiple of 4.
  int64_t row_bytes(int64_t groups) const {
    if (two_levels()) return groups * codes_bytes() + groups / kSuperGroup * header_bytes();
    return groups * (codes_bytes() + affine_bytes());
  }
};

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kFatRelu, kClampedSwish };

// What stands between a feed-forward's gates and its down projection: h = act(gate) * up, or act(gate).
struct GateForm {
  Activation act;
  float threshold = 0.0f;  // of kFatRelu: a gate above it stays as it is, another becomes zero
  bool relu_up = false;    // max(0, up) in the place of up
  // Of kClampedSwish: with g = min(gate, clamp), h = g / (1 + e^(-slope * g)), times 1 more than the up,
  // which is kept from -clamp to clamp.
  float clamp = 0.0f, slope = 0.0f;

  // Whether gates at or below the threshold become zeros.
  bool makes_zeros() const {
    return act == Activation::kRelu || act == Activation::kRelu2 || act == Activation::kFatRelu;
  }
};

// Activations of tokens, quantised to int8 for weights of one format: 64 columns of all rows lie together, as
// a block of weights meets one token after another. Rows of 4096 bytes and more, each in one piece, took the
// products of 32 tokens a fifth more time.
struct QuantizedRows {
  int8_t* codes;      // (groups, rows, 64); for weights below 8 bits each 8 in the order 0 2 4 6 1 3 5 7
  float* scales;      // (groups, rows, scaled) of 64 / scaled codes each
  float* sums;        // (groups, rows, scaled) scale * sum of these codes; only where `scaled` is `parts`
  int32_t* int_sums;  // (groups, rows, parts) sum of 64 / parts codes each
  int64_t groups;
  int64_t rows;
  int64_t parts = 1;   // RowFormat::scales
  int64_t scaled = 1;  // RowFormat::input_scales, 1 or 2

  // Index of a token's 64 columns.
  int64_t at(int64_t t, int64_t g) const { return g * rows + t; }
  // The rows from `row` on.
  QuantizedRows from(int64_t row) const {
    return {codes + row * kGroup,
            scales + row * scaled,
            sums + row * scaled,
            int_sums + row * parts,
            groups,
            rows,
            parts,
            scaled};
  }
};

// One layer's keys and values: position p is in blocks[p / 64], at the offset of (layer, kv head); see
// targets/kv_block.h.
struct KvView {
  uint8_t* const* blocks;
  int64_t layer_offset;  // bytes from a block's start to this layer's first head
  int64_t head_bytes;    // bytes from one kv head to the next
  int64_t heads, head_dim;
  int bits;            // 8 or 16
  int64_t latent = 0;  // if not 0, a multiple of 16: a value is the first `latent` dimensions of its key
  int64_t values = 0;  // if not 0, the width of a value, at most head_dim

  int64_t value_dim() const { return latent ? latent : values ? values : head_dim; }
};

// A draft tree. Query i's token follows token parents[i] < i, or the text before the tree if that is -1.
// depths[i], less than 64, is the number of tree tokens before it on its path. Null: each token follows the
// one before it.
struct TreeView {
  const int32_t *parents, *depths;
};

struct AttentionArgs {
  const float* q;  // (T, heads, head_dim) with q_stride floats between tokens
  int64_t q_stride, heads;
  KvView kv;
  int64_t position;              // of the first query
  int64_t window;                // positions that a query sees, its own included; 0 means all
  float scale;                   // of scores
  float soft_cap;                // of scores; 0: none
  float* out;                    // (T, heads * kv.value_dim())
  TreeView tree;                 // keys and values of token i are stored at position + i
  const float* sinks = nullptr;  // (heads) scores that take part in the softmax, and weigh no value; or null
};

// Bytes of one 16-row, 64-column block of an interleaved tile of one level of scales: codes, then for each
// group 16 scales, then for each group 16 biases, if they are stored.
inline int64_t tile_group_bytes(const RowFormat& format) { return kTile * format.row_bytes(1); }

// Selected neurons, ids ascending. A neuron's down row begins `down` bytes into its part.
struct SelectedRows {
  const int32_t* ids;
  const uint8_t* const* parts;
  int64_t down, count;
};

// A norm of root mean square, or a LayerNorm if `centred`: the mean is taken off first. A null weight means
// no norm, a null bias none.
struct Norm {
  const float* weight = nullptr;
  float eps = 0.0f;
  const float* bias = nullptr;
  bool centred = false;
};

struct DeltaArgs;  // in gated_delta.h
struct ConvArgs;   // in short_conv.h
struct MixerArgs;  // in mamba2.h

struct KernelTable {
  // x: cols floats -> row t of `out`. nibble_order: in the order that weights below 8 bits need.
  void (*quantize_activations)(const float* x, int64_t cols, bool nibble_order, const QuantizedRows& out,
                               int64_t t);
  // out[t, 16 * tile + r] for tiles in [begin, end); rows from `rows` on are not stored. bias may be null. So
  // may `added`, which is added to the result, has the layout of out, and may be out.
  void (*linear_quantized)(const RowFormat& format, const uint8_t* tiles, const QuantizedRows& x,
                           int64_t tokens, const float* bias, const float* added, float* out,
                           int64_t out_stride, int64_t rows, int64_t begin, int64_t end);
  // The same with high planes of tiles alone, low bits of codes being their mean; of formats that have two.
  void (*linear_high)(const RowFormat& format, const uint8_t* planes, const QuantizedRows& x, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t rows,
                      int64_t begin, int64_t end);
  // out[r] of 16 scattered rows, for one token: what linear_quantized gives for a tile of these rows, whose
  // scales are `affine`, group by group and 16 side by side, and behind them its biases. `next`, if not null:
  // 16 rows to prefetch into the cache.
  void (*linear_gathered)(const RowFormat& format, const uint8_t* const* rows, const uint8_t* const* next,
                          const uint8_t* affine, const QuantizedRows& x, float* out);
  // Row-major float16 weights. Rows of weights and of x have padded_cols columns, a multiple of 16, padded
  // with zeros.
  void (*linear_half)(const uint16_t* weights, int64_t padded_cols, const float* x, int64_t tokens,
                      const float* bias, const float* added, float* out, int64_t out_stride, int64_t begin,
                      int64_t end);
  // The codes of a block of a tile, of the two planes in which they lie on flash; see planes.h.
  void (*join_codes)(int bits, const uint8_t* high, const uint8_t* low, uint8_t* codes);
  // h = act(gate) * up, elementwise; without `up` (null) h = act(gate).
  void (*activate)(const GateForm& form, const float* gate, const float* up, float* h, int64_t n);
  // Adds the down projection of `blocks` blocks of 64 neurons to the outputs of one group; see
  // targets/down_projection.cc.
  void (*down_quantized)(int bits, const uint8_t* group, int64_t blocks, const float* h, int64_t h_stride,
                         int64_t tokens, float* y, int64_t y_stride, float* bias_lanes, int64_t lanes_stride);
  // The same for selected neurons, from their records, and for groups [g_begin, g_end); g_begin is a multiple
  // of 16. Where a neuron doesn't fire for a token, its h is zero and its row isn't read. h has 64 readable
  // floats behind its last column. The lanes are (T, groups / 16, 16, 16), 16 groups side by side, and at 4
  // bits y has the order that `unzip_outputs` undoes.
  void (*down_selected)(int bits, const SelectedRows& neurons, int64_t groups, int64_t g_begin, int64_t g_end,
                        const float* h, int64_t h_stride, int64_t tokens, float* y, int64_t y_stride,
                        float* bias_lanes, int64_t lanes_stride);
  // Outputs of down_selected at 4 bits, in each 32 the even ones before the odd ones -> in order.
  void (*unzip_outputs)(float* y, int64_t groups);
  // Adds h times float16 rows to y[t, j] for j in [begin, end), multiples of 16, by fused multiply-adds in
  // ascending order of neurons.
  void (*down_half)(const uint16_t* rows, int64_t stride, int64_t neurons, const float* h, int64_t h_stride,
                    int64_t tokens, float* y, int64_t y_stride, int64_t begin, int64_t end);
  // out = y + the sum of the group's 16 lanes + added, for one token; added may be null or out.
  void (*add_bias_lanes)(const float* y, const float* lanes, const float* added, float* out, int64_t n);
  // out = norm(x), which may be x.
  void (*norm)(const float* x, const Norm& norm, int64_t n, float* out);
  // x = cap * tanh(x / cap), elementwise.
  void (*soft_cap)(float* x, float cap, int64_t n);
  // Rotary embedding of one head in place, dimensions i and i + head_dim / 2 paired. cos and sin have
  // head_dim / 2 values.
  void (*rope)(float* x, const float* cos, const float* sin, int64_t head_dim);
  // v: not read where values are parts of keys.
  void (*kv_write)(const KvView& kv, int64_t position, const float* k, const float* v);
  // Copies one layer's key and value at position `from` to position `to`, as they are stored.
  void (*kv_move)(const KvView& kv, int64_t from, int64_t to);
  // Attention of queries [q_begin, q_end), for the query heads that read kv head `head`.
  void (*attention)(const AttentionArgs& args, int64_t head, int64_t q_begin, int64_t q_end, float* scratch);
  // The gated delta rule for key heads [begin, end) and their value heads, token after token.
  void (*gated_delta)(const DeltaArgs& args, int64_t tokens, int64_t begin, int64_t end, float* scratch);
  // x *= 1 / (1 + e^-gates), elementwise.
  void (*sigmoid_gate)(const float* gates, float* x, int64_t n);
  // Row-major codes, scales (float16, or bytes in MXFP4) and biases -> floats. `groups` has 64 columns each,
  // whatever the format.
  void (*dequantize_row)(const RowFormat& format, const uint8_t* codes, const void* scales,
                         const uint16_t* biases, int64_t groups, float* out);
  // Up to 16 rows of floats -> codes, scales, biases at 4 to 8 bits, biases stored. False if a value isn't
  // finite or overflows float16; what is written then is undefined.
  bool (*quantize_block)(const RowFormat& format, const float* x, int64_t rows, int64_t cols, uint8_t* codes,
                         uint16_t* scales, uint16_t* biases);
  // The same at 4 to 6 bits, for rows side by side: column c of row r is x[c * stride + r]. 16
  // rows can be read, all finite; the first `rows` are stored.
  bool (*quantize_lanes)(const RowFormat& format, const float* x, int64_t stride, int64_t rows, int64_t cols,
                         uint8_t* codes, uint16_t* scales, uint16_t* biases);
  void (*half_to_float)(const uint16_t* in, float* out, int64_t n);
  bool (*float_to_half)(const float* in, uint16_t* out, int64_t n);
  // Indices and values of the `count` largest of x (n), largest first, ties to the lower index.
  void (*largest)(const float* x, int64_t n, int64_t count, int32_t* ids, float* best);
  // The sum of exp(x - top). For estimates only: its bits may differ between targets.
  float (*sum_of_exps)(const float* x, int64_t n, float top);
  // out[j] += sum over k < count of a[k] * b[k * b_stride + j], for j < n: product after product, none fused.
  void (*add_products)(const float* a, int64_t count, const float* b, int64_t b_stride, float* out,
                       int64_t n);
  // The same with -=.
  void (*subtract_products)(const double* a, int64_t count, const double* b, int64_t b_stride, double* out,
                            int64_t n);
  // The gated short convolution for channels [begin, end).
  void (*short_conv)(const ConvArgs& args, int64_t tokens, int64_t begin, int64_t end);
  // A Mamba-2 mixer's heads [begin, end), token after token, without gates and norm.
  void (*mamba2)(const MixerArgs& args, int64_t tokens, int64_t begin, int64_t end, float* scratch);
  // Gates, and norms, values [first, first + n) of one token's output, a part that is normed by itself.
  void (*mixer_gate)(const MixerArgs& args, const float* gates, int64_t first, int64_t n, float* out);
};

// Floats of scratch memory that one call of `attention` needs, for positions below `end`.
inline int64_t attention_scratch_floats(const AttentionArgs& args, int64_t end, int64_t query_rows) {
  const int64_t head_dim = args.kv.head_dim, width = (head_dim + 15) / 16 * 16;
  const int64_t span = (end + kKvBlock - 1) / kKvBlock * kKvBlock;
  const int64_t path = args.tree.parents ? kKvBlock * width : 0;
  return query_rows * (head_dim + span + width + 1) + kKvBlock * width + path + 64;
}

}  // namespace ondevice
