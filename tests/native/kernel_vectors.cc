// Every kernel on made-up inputs with tails, on each target and on 1 and 2 threads: the bytes must be equal.
//
//   kernel_vectors --write FILE     and keep them
//   kernel_vectors --compare FILE   and compare with those another build (or another processor) kept
// Inputs come from integers by exact arithmetic, so that every build makes the same ones.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flash/crc32c.h"
#include "kernels/dispatch.h"
#include "kernels/error_feedback.h"
#include "kernels/expert.h"
#include "kernels/feed_forward_pass.h"
#include "kernels/mamba2.h"
#include "kernels/quantize_rows.h"
#include "made_up_inputs.h"
#include "tile_vectors.h"

namespace {

using ondevice::Activation;
using ondevice::GateForm;
using ondevice::kKvBlock;

const ondevice::RowFormat kMxfp4(4, 32, ScaleKind::kMxfp4);

struct Vector {
  std::string name;
  Bytes bytes;
};
using Vectors = std::vector<Vector>;

template <class T>
void keep(Vectors* out, const std::string& name, const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const uint8_t*>(values.data());
  out->push_back({name, Bytes(first, first + values.size() * sizeof(T))});
}

void linear(Runner& runner, const ondevice::RowFormat& format, int64_t rows, int64_t cols, Vectors* out) {
  Random random(static_cast<uint64_t>(rows * 1000 + cols));
  ondevice::Matrix matrix(rows, cols, format);
  Bytes quantized;
  for (int64_t r = 0; r < rows; ++r) {
    const Floats weights = random.values(cols);
    const Row row = quantize(runner, format, weights.data(), cols);
    append_row(row, &quantized);
    matrix.load_rows(runner, r, 1, {row.codes.data(), row.scales.data(), row.biases.data(), 0, 0, 0});
  }
  const std::string name = "linear bits=" + std::to_string(format.bits) +
                           (format.mxfp4()           ? " mxfp4"
                            : format.group == kGroup ? ""
                            : format.implied()       ? " group=32 implied"
                                                     : " group=32") +
                           " " + std::to_string(rows) + "x" + std::to_string(cols);
  keep(out, name + " rows", quantized);
  const Floats bias = random.values(rows), x = random.values(19 * cols);
  for (const int64_t tokens : {1, 2, 3, 5, 19}) {
    Floats y(static_cast<size_t>(tokens * rows));
    matrix.forward(runner, x.data(), cols, tokens, tokens % 2 ? bias.data() : nullptr, y.data());
    keep(out, name + " tokens=" + std::to_string(tokens), y);
  }
  const Floats norm = random.values(cols), added = random.values(5 * rows);
  for (const int64_t tokens : {1, 5}) {
    Floats y(added.begin(), added.begin() + tokens * rows);
    matrix.forward(runner, x.data(), cols, tokens, bias.data(), y.data(), {norm.data(), 1e-5f}, y.data());
    keep(out, name + " normed tokens=" + std::to_string(tokens), y);
  }
  Floats tiny = random.values(cols), y(static_cast<size_t>(rows));
  for (float& value : tiny) value *= 0x1p-130f;
  matrix.forward(runner, tiny.data(), cols, 1, nullptr, y.data());
  keep(out, name + " tiny", y);
  // Activations that aren't finite, with finite ones behind them in the same lane.
  for (const float broken : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    Floats input = random.values(cols);
    input[static_cast<size_t>(cols / 2)] = broken;
    matrix.forward(runner, input.data(), cols, 1, nullptr, y.data());
    keep(out, name + " not finite", y);
  }
}

ondevice::Matrix gate_matrix(Runner& runner, const ondevice::RowFormat& format, int64_t hidden,
                             const Records& records) {
  const int64_t stride = records.shape.stride;
  const int64_t neurons = static_cast<int64_t>(records.bytes.size()) / stride;
  const int64_t groups = groups_of(hidden), codes = groups * format.codes_bytes();
  const uint8_t* rows = records.bytes.data();
  ondevice::Matrix gate(neurons, hidden, format);
  gate.load_rows(runner, 0, neurons, {rows, rows + codes, rows + codes + 2 * groups, stride, stride, stride});
  return gate;
}

// The neurons with a gate above `limit` for any token, from their records.
void add_selected(ondevice::FeedForwardPass& pass, const Records& records, const Floats& gates, float limit) {
  const int64_t tokens = pass.tokens(), neurons = static_cast<int64_t>(gates.size()) / tokens;
  std::vector<int32_t> ids(static_cast<size_t>(neurons));
  const int64_t count = ondevice::select(gates.data(), tokens, neurons, limit, ids.data());
  std::vector<const uint8_t*> parts;
  for (int64_t k = 0; k < count; ++k)
    parts.push_back(records.bytes.data() + ids[k] * records.shape.stride + records.shape.up);
  pass.add_selected({ids.data(), parts.data(), count, false, gates.data(), neurons});
}

Floats forward_selected(Runner& runner, const ondevice::FeedForward& layer, const Records& records,
                        const ondevice::Matrix& gate, const Floats& x, const ondevice::Norm& norm,
                        int64_t tokens, const GateForm& form) {
  std::vector<int32_t> slots;
  std::vector<const uint8_t*> parts;
  for (int64_t n = 0; n < gate.rows(); ++n) {
    slots.push_back(static_cast<int32_t>(gate.rows() - 1 - n));
    parts.push_back(records.bytes.data() + slots.back() * records.shape.stride + records.shape.up);
  }
  Floats y(x.begin(), x.begin() + tokens * layer.hidden());
  layer.forward_selected(runner, {gate, layer.bias(), nullptr}, {slots.data(), parts.data(), false}, y.data(),
                         layer.hidden(), tokens, form, y.data(), norm, y.data());
  return y;
}

// The same neurons in one segment, or split: in segments of one block, and for activations that make zeros,
// only the neurons that fire. Equal bytes are kept under equal names.
void feed_forward(Runner& runner, const ondevice::RowFormat& format, int64_t hidden, int64_t neurons,
                  bool split, bool gated, Vectors* out) {
  Records records = make_records(runner, format, hidden, neurons);
  // An ungated layer's records have an up row here as well, which isn't read.
  if (!gated) records.shape.up = records.shape.down;
  const Floats bias = Random(9).values(neurons);
  const ondevice::FeedForward layer(hidden, format, records.shape, gated ? nullptr : bias.data(), neurons);
  const int64_t blocks = (neurons + kGroup - 1) / kGroup, step = split ? 1 : blocks;
  std::vector<ondevice::Segment> segments;
  for (int64_t block = 0; block < blocks; block += step) {
    segments.emplace_back(layer.segment_bytes(step));
    segments.back().lay_out(step);
    const int64_t first = block * kGroup;
    const int64_t count = neurons - first < step * kGroup ? neurons - first : step * kGroup;
    layer.pack(runner, segments.back(), 0, records.bytes.data() + first * records.shape.stride, count);
  }
  std::vector<const ondevice::Segment*> order;
  for (const auto& segment : segments) order.push_back(&segment);
  const Floats x = Random(7).values(17 * hidden), weight = Random(8).values(hidden);
  const ondevice::Matrix gate = gate_matrix(runner, format, hidden, records);
  const ondevice::Norm norm{weight.data(), 1e-5f};
  for (int act = 0; act < 7; ++act)
    for (const int64_t tokens : {1, 2, 3, 7, 17}) {
      Floats y(static_cast<size_t>(tokens * hidden)), gates(static_cast<size_t>(tokens * neurons));
      gate.forward(runner, x.data(), hidden, tokens, layer.bias(), gates.data());
      const Activation activation = static_cast<Activation>(act);
      const bool fat = activation == Activation::kFatRelu;
      const GateForm form{activation, fat ? 0.25f : 0.0f, fat, 1.0f, 1.702f};
      const bool selected = split && form.makes_zeros();
      ondevice::FeedForwardPass pass(runner, layer, runner.prepare(x.data(), hidden, tokens, hidden, format),
                                     form);
      if (selected)
        add_selected(pass, records, gates, form.threshold);
      else
        pass.add(order, pass.tokens());
      pass.finish(y.data());
      const std::string name = (gated ? "feed_forward bits=" : "ungated feed_forward bits=") +
                               std::to_string(format.bits) + (format.mxfp4() ? " mxfp4 " : " ") +
                               std::to_string(hidden) + "x" + std::to_string(neurons) +
                               " act=" + std::to_string(act) + " tokens=" + std::to_string(tokens);
      keep(out, name, y);
      if (tokens > 1) {
        ondevice::FeedForwardPass part(runner, layer,
                                       runner.prepare(x.data(), hidden, tokens, hidden, format), form);
        part.add(order, tokens / 2);
        part.finish(y.data());
        keep(out, name + " first half", y);
      }
      if (selected) {
        y = forward_selected(runner, layer, records, gate, x, norm, tokens, form);
      } else {
        y.assign(x.begin(), x.begin() + tokens * hidden);
        layer.forward(runner, order, y.data(), hidden, tokens, form, y.data(), norm, y.data());
      }
      keep(out, name + " normed", y);
    }
}

// A matrix of made-up weights behind the bytes of `record`, padded to a multiple of 64, with its biases.
ondevice::RecordMatrix put_matrix(Runner& runner, const ondevice::RowFormat& format, int64_t rows,
                                  int64_t cols, Random* random, Bytes* record) {
  ondevice::RecordMatrix matrix{format, rows, cols, static_cast<int64_t>(record->size())};
  record->resize(record->size() + static_cast<size_t>(matrix.tiles() * matrix.tile_bytes()));
  uint8_t* tiles = record->data() + matrix.offset;
  for (int64_t r = 0; r < rows; ++r) {
    const Floats weights = random->values(cols);
    const Row row = quantize(runner, format, weights.data(), cols);
    if (format.bits == 16)
      std::memcpy(tiles + r * matrix.tile_bytes() / ondevice::kTile, row.codes.data(), row.codes.size());
    else
      ondevice::interleave_rows(runner.pool(), format, groups_of(cols), r, 1,
                                {row.codes.data(), reinterpret_cast<const uint8_t*>(row.scales.data()),
                                 reinterpret_cast<const uint8_t*>(row.biases.data()), 0, 0, 0},
                                tiles, matrix.tile_bytes());
  }
  const Floats bias = random->values(rows);
  matrix.bias = static_cast<int64_t>(record->size());
  record->resize((record->size() + bias.size() * sizeof(float) + 63) / 64 * 64);
  std::memcpy(record->data() + matrix.bias, bias.data(), bias.size() * sizeof(float));
  return matrix;
}

// An expert whole, or split: tile by tile, from the last to the first. Equal bytes are kept under equal
// names.
void expert(Runner& runner, const ondevice::RowFormat& rows, const ondevice::RowFormat& down, int64_t hidden,
            int64_t neurons, bool split, bool gated, Vectors* out) {
  Random random(static_cast<uint64_t>(hidden * 1000 + neurons));
  Bytes record;
  const ondevice::RecordMatrix gate = put_matrix(runner, rows, neurons, hidden, &random, &record);
  std::optional<ondevice::RecordMatrix> up;
  if (gated) up = put_matrix(runner, rows, neurons, hidden, &random, &record);
  ondevice::RecordMatrix last = put_matrix(runner, down, hidden, neurons, &random, &record);
  if (!gated) last.bias = -1;
  const ondevice::Expert expert(gate, up, last);
  const Floats x = random.values(17 * hidden);
  const int64_t h_stride = gate.tiles() * ondevice::kTile;
  for (const int64_t tokens : {1, 2, 3, 7, 17}) {
    const GateForm form{tokens % 2 ? Activation::kSilu : Activation::kGeluTanh};
    Floats y(static_cast<size_t>(tokens * hidden)), h(static_cast<size_t>(tokens * h_stride));
    if (split) {
      Floats products(static_cast<size_t>(tokens * ondevice::Expert::kProducts));
      const auto inputs = runner.prepare(x.data(), hidden, tokens, hidden, rows);
      for (int64_t tile = gate.tiles() - 1; tile >= 0; --tile)
        expert.multiply_up(runner.kernels(), record.data(), inputs, form, products.data(), h.data(), h_stride,
                           tile, tile + 1);
      const auto hidden_rows = runner.prepare(h.data(), h_stride, tokens, neurons, down);
      for (int64_t tile = last.tiles() - 1; tile >= 0; --tile)
        expert.multiply_down(runner.kernels(), record.data(), hidden_rows, y.data(), tile, tile + 1);
    } else {
      expert.forward(runner, record.data(), x.data(), hidden, tokens, form, y.data());
    }
    keep(out,
         std::string(gated ? "expert" : "ungated expert") + " bits=" + std::to_string(rows.bits) + "/" +
             std::to_string(down.bits) + " " + std::to_string(hidden) + "x" + std::to_string(neurons) +
             " tokens=" + std::to_string(tokens),
         y);
  }
}

// `value` is the width of a value, at most that of a key, `dim`.
void attention(Runner& runner, int bits, int64_t heads, int64_t kv_heads, int64_t dim, int64_t value,
               int64_t window, Vectors* out) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim)), cap = window ? 2.0f : 0.0f;
  constexpr int64_t kLength = 150;
  Random random(static_cast<uint64_t>(bits * dim + window));
  const int64_t head_bytes = kKvBlock * ((dim + value) * bits / 8 + (bits == 8 ? 8 : 0));
  constexpr int64_t kBlocks = (kLength + kKvBlock - 1) / kKvBlock;
  std::vector<ondevice::MappedBuffer> memory;
  std::vector<uint8_t*> blocks;
  for (int64_t b = 0; b < kBlocks; ++b) {
    memory.emplace_back(static_cast<size_t>(kv_heads * head_bytes));
    blocks.push_back(memory.back().data());
  }
  const ondevice::KvView kv{blocks.data(), 0, head_bytes, kv_heads, dim, bits, 0, value};
  const std::string name = "attention bits=" + std::to_string(bits) + " heads=" + std::to_string(heads) +
                           "/" + std::to_string(kv_heads) + " dim=" + std::to_string(dim) + "/" +
                           std::to_string(value) + " window=" + std::to_string(window);
  int64_t position = 0;
  for (const int64_t tokens : {1, 70, 9, 1, 69}) {
    const Floats k = random.values(tokens * kv_heads * dim), v = random.values(tokens * kv_heads * value);
    for (int64_t t = 0; t < tokens; ++t)
      runner.kernels().kv_write(kv, position + t, k.data() + t * kv_heads * dim,
                                v.data() + t * kv_heads * value);
    const Floats q = random.values(tokens * heads * dim);
    Floats y(static_cast<size_t>(tokens * heads * value));
    const auto attend = [&](const std::string& kind, const ondevice::TreeView& tree, const float* sinks) {
      runner.attention(
          {q.data(), heads * dim, heads, kv, position, window, scale, cap, y.data(), tree, sinks}, tokens);
      keep(out, name + kind + " position=" + std::to_string(position), y);
    };
    attend("", {nullptr, nullptr}, nullptr);
    const Floats sinks = random.values(heads);
    attend(" sinks", {nullptr, nullptr}, sinks.data());
    // The same tokens as a tree: most follow the one before them, each fifth one two tokens earlier.
    std::vector<int32_t> parents, depths;
    for (int32_t t = 0; t < tokens; ++t) {
      parents.push_back(t % 5 == 4 ? t - 3 : t - 1);
      depths.push_back(t == 0 ? 0 : depths[static_cast<size_t>(parents.back())] + 1);
    }
    attend(" tree", {parents.data(), depths.data()}, nullptr);
    const int64_t stride = (heads + kv_heads) * dim + kv_heads * value;
    Floats qkv = random.values(tokens * stride);
    const Floats weight = random.values(dim), turn = random.values(tokens * dim / 2);
    const ondevice::Norm norm{weight.data(), 1e-5f};
    runner.attend(qkv.data(), {{norm, 0}, {norm, 0}, false, turn.data(), turn.data()},
                  {qkv.data(), stride, heads, kv, position, window, scale, cap, y.data(), {nullptr, nullptr}},
                  tokens);
    keep(out, name + " from a projection position=" + std::to_string(position), y);
    if (tokens > 2) runner.kernels().kv_move(kv, position + 2, position + 1);
    position += tokens;
  }
  Bytes cache;
  for (const ondevice::MappedBuffer& block : memory)
    cache.insert(cache.end(), block.data(), block.data() + block.size());
  keep(out, name + " cache", cache);
}

// A Mamba-2 mixer over 70 tokens, or over a tree of 5, a head at a time, and what its gates leave.
void mixer(Runner& runner, bool is_tree, Vectors* out) {
  const int64_t tokens = is_tree ? 5 : 70;
  ondevice::MixerArgs args{};
  args.heads = 4, args.width = 24, args.groups = 2, args.rows = 19, args.taps = 3;
  args.time_factor = args.gate_factor = 0.5f, args.out_factor = args.most_time = 1.5f, args.norm_groups = 2;
  const int64_t channels = args.channels(), values = args.values();
  Random random(static_cast<uint64_t>(tokens));
  const Floats conv = random.values(3 * channels), bias = random.values(channels), heads = random.values(4),
               projected = random.values(tokens * channels), steps = random.values(tokens * 4),
               gates = random.values(tokens * values), weight = random.values(values),
               state = random.values(args.state_floats());
  Floats decay = heads, after(state.size()), found(gates.size());
  for (float& x : decay) x = -std::fabs(x);
  const std::vector<int32_t> parents{-1, 0, 0, 1, -1}, slots{0, 1, 0, 1, 2};
  args.conv = conv.data(), args.conv_bias = bias.data(), args.decay = decay.data(), args.stride = channels;
  args.inputs = steps.data(), args.time_bias = args.skip = heads.data(), args.projected = projected.data();
  args.state = state.data(), args.tail = args.state + args.head_floats();
  args.norm = {weight.data(), 1e-6f}, args.out = found.data();
  if (is_tree)
    args.parents = parents.data(), args.slots = slots.data(), args.num_slots = 3;
  else
    args.next_state = after.data(), args.next_tail = after.data() + args.head_floats();
  Floats room(static_cast<size_t>(args.scratch(tokens)));
  for (int64_t head = 0; head < 4; ++head) runner.kernels().mamba2(args, tokens, head, head + 1, room.data());
  for (int64_t at = 0; at < tokens * values; at += values / 2)
    runner.kernels().mixer_gate(args, gates.data() + at / values * values, at % values, values / 2,
                                found.data() + at / values * values);
  found.insert(found.end(), after.begin(), after.end());
  keep(out, is_tree ? "mixer of a tree" : "mixer", found);
}

void vector_ops(Runner& runner, Vectors* out) {
  const ondevice::KernelTable& kernels = runner.kernels();
  Random random(3);
  for (const int64_t n : {1, 15, 16, 17, 100, 256}) {
    const Floats x = random.values(n), weight = random.values(n);
    Floats y(static_cast<size_t>(n));
    kernels.norm(x.data(), {weight.data(), 1e-5f}, n, y.data());
    keep(out, "norm " + std::to_string(n), y);
    kernels.norm(x.data(), {weight.data(), 1e-5f, weight.data(), true}, n, y.data());
    keep(out, "centred norm " + std::to_string(n), y);
    y = x;
    kernels.soft_cap(y.data(), 3.0f, n);
    keep(out, "soft cap " + std::to_string(n), y);
  }
  for (const int64_t dim : {2, 8, 10, 64, 80, 128}) {
    Floats x = random.values(dim);
    const Floats cos = random.values(dim / 2), sin = random.values(dim / 2);
    kernels.rope(x.data(), cos.data(), sin.data(), dim);
    keep(out, "rope " + std::to_string(dim), x);
  }
  for (int act = 0; act < 6; ++act) {
    Floats gate, up = random.values(208), h(208);
    for (int i = -104; i < 104; ++i) gate.push_back(static_cast<float>(i) * 0.875f);
    const float threshold = act == 5 ? 3.5f : 0.0f;
    for (const bool relu_up : {false, true}) {
      kernels.activate({static_cast<Activation>(act), threshold, relu_up}, gate.data(), up.data(), h.data(),
                       208);
      keep(out, "activate " + std::to_string(act) + (relu_up ? " relu" : ""), h);
    }
    kernels.activate({static_cast<Activation>(act), threshold, false}, gate.data(), nullptr, h.data(), 208);
    keep(out, "activate alone " + std::to_string(act), h);
  }
  for (const int bits : {4, 5, 6, 8}) {
    const Floats x = random.values(200);
    Floats y(256);
    const auto dequantize = [&](const ondevice::RowFormat& format) {
      const Row row = quantize(runner, format, x.data(), 200);
      kernels.dequantize_row(format, row.codes.data(), row.scales.data(),
                             reinterpret_cast<const uint16_t*>(row.biases.data()), 4, y.data());
    };
    dequantize(bits);
    keep(out, "dequantize_row bits=" + std::to_string(bits), y);
    for (const ScaleKind kind : {ScaleKind::kAffine, ScaleKind::kSymmetric}) {
      dequantize({bits, 32, kind});
      keep(out, "dequantize_row group=32 bits=" + std::to_string(bits), y);
    }
    if (bits != 4) continue;
    dequantize(kMxfp4);
    keep(out, "dequantize_row mxfp4", y);
  }
}

// Every finite float16, and floats at, below and above the midpoints between neighbours.
void halves(Runner& runner, Vectors* out) {
  Halves all;
  for (uint32_t h = 0; h < 0x10000; ++h)
    if ((h & 0x7c00) != 0x7c00) all.push_back(static_cast<uint16_t>(h));
  Floats wide(all.size());
  runner.kernels().half_to_float(all.data(), wide.data(), static_cast<int64_t>(all.size()));
  keep(out, "half_to_float", wide);
  Floats between;
  for (size_t i = 0; i + 1 < wide.size(); i += 7) {
    const float middle = 0.5f * (wide[i] + wide[i + 1]);
    for (const float scale : {1.0f, 1.0f - 1.0f / 65536, 1.0f + 1.0f / 65536})
      between.push_back(middle * scale);
  }
  Halves narrow(between.size());
  runner.kernels().float_to_half(between.data(), narrow.data(), static_cast<int64_t>(between.size()));
  keep(out, "float_to_half", narrow);
}

void import_rows(Runner& runner, Vectors* out) {
  constexpr int64_t kRows = 21, kCols = 130, kGroups = 3;
  const Floats source = Random(11).values(kRows * kCols);
  Halves half(source.size()), brain(source.size());
  runner.kernels().float_to_half(source.data(), half.data(), kRows * kCols);
  for (size_t i = 0; i < source.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &source[i], sizeof(bits));
    brain[i] = static_cast<uint16_t>(bits >> 16);
  }
  using ondevice::SourceType;
  const std::pair<SourceType, const void*> types[] = {{SourceType::kFloat, source.data()},
                                                      {SourceType::kHalf, half.data()},
                                                      {SourceType::kBfloat, brain.data()}};
  for (const auto& [type, data] : types)
    for (const bool transposed : {false, true})
      for (const int bits : {4, 5, 6, 8, 16}) {
        const int64_t rows = transposed ? kCols : kRows, cols = transposed ? kRows : kCols;
        const int64_t groups = transposed ? 1 : kGroups;
        Bytes codes(static_cast<size_t>(rows * groups * kGroup * bits / 8));
        Halves scales(static_cast<size_t>(rows * groups)), biases(scales.size());
        const ondevice::SourceRows from{static_cast<const uint8_t*>(data), type, transposed ? 1 : kCols,
                                        transposed ? kCols : 1};
        ondevice::quantize_rows(runner, from, rows, cols, bits, codes.data(), scales.data(), biases.data());
        const std::string name = "import type=" + std::to_string(static_cast<int>(type)) +
                                 (transposed ? " transposed" : "") + " bits=" + std::to_string(bits);
        keep(out, name + " codes", codes);
        if (bits == 16) continue;
        keep(out, name + " scales", scales);
        keep(out, name + " biases", biases);
      }
}

void error_feedback(Runner& runner, Vectors* out) {
  constexpr int64_t kRows = 21, kInputs = 130, kCols = 1100, kTokens = 40;
  const Floats inputs = Random(12).values(kTokens * kInputs);
  std::vector<double> moments(static_cast<size_t>(kInputs * kInputs));
  for (int64_t i = 0; i < kInputs; ++i) {
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t j = 0; j < kInputs; ++j)
        moments[static_cast<size_t>(i * kInputs + j)] +=
            static_cast<double>(inputs[static_cast<size_t>(t * kInputs + i)]) *
            inputs[static_cast<size_t>(t * kInputs + j)];
    moments[static_cast<size_t>(i * kInputs + i)] += 0.5;
  }
  Floats factor(moments.size());
  ondevice::feedback_factor(runner, moments.data(), kInputs, factor.data());
  keep(out, "feedback factor", factor);
  for (const int bits : {4, 5, 6})
    for (const bool by_row : {false, true}) {
      const ondevice::RowFormat format(bits);
      const int64_t rows = by_row ? kInputs : kRows, cols = by_row ? kCols : kInputs,
                    groups = groups_of(cols);
      const Floats weights = Random(13).values(rows * cols);
      Bytes codes(static_cast<size_t>(rows * groups * format.codes_bytes()));
      Halves scales(static_cast<size_t>(rows * groups)), biases(scales.size());
      const auto rounding = by_row ? ondevice::round_rows : ondevice::round_columns;
      rounding(runner, weights.data(), rows, cols, format, factor.data(), codes.data(), scales.data(),
               biases.data());
      const std::string name = (by_row ? "round rows " : "round columns ") + std::to_string(bits);
      keep(out, name + " codes", codes);
      keep(out, name + " scales", scales);
      keep(out, name + " biases", biases);
    }
}

void checksums(bool hardware, Vectors* out) {
  Bytes data;
  Random random(5);
  for (int i = 0; i < 100000; ++i) data.push_back(static_cast<uint8_t>(random.next() >> 56));
  const auto target = hardware ? ondevice::Crc32cTarget::kHardware : ondevice::Crc32cTarget::kTable;
  for (const std::vector<uint64_t>& units : {std::vector<uint64_t>{4096}, {2560, 4608}, {1}, {77, 3, 512}}) {
    std::vector<uint32_t> crcs(ondevice::count_crc_units(data.size(), units, 0));
    ondevice::crc32c_units(data.data(), data.size(), units, 0, crcs.data(), target);
    keep(out, "crc32c " + std::to_string(units[0]) + "/" + std::to_string(units.size()), crcs);
  }
}

void mxfp4(Runner& runner, bool split, Vectors* out) {
  for (const auto& [rows, cols] : std::vector<std::pair<int, int>>{{1, 1}, {17, 65}, {37, 100}, {64, 1088}})
    linear(runner, kMxfp4, rows, cols, out);
  for (const auto& [hidden, neurons] : std::vector<std::pair<int, int>>{{64, 64}, {1100, 130}})
    for (const bool gated : {true, false}) feed_forward(runner, kMxfp4, hidden, neurons, split, gated, out);
}

Vectors run(const std::string& target, int threads, bool hardware_checksums) {
  Runner runner(threads, target);
  const bool split = threads > 1;
  Vectors out;
  for (const int bits : {4, 5, 6, 8, 16}) {
    for (const auto& [rows, cols] :
         std::vector<std::pair<int, int>>{{1, 1}, {16, 64}, {17, 65}, {37, 100}, {200, 320}})
      linear(runner, bits, rows, cols, &out);
    for (const auto& [hidden, neurons] : std::vector<std::pair<int, int>>{{64, 64}, {100, 130}, {192, 321}})
      for (const bool gated : {true, false}) feed_forward(runner, bits, hidden, neurons, split, gated, &out);
  }
  for (const int bits : {4, 5, 6, 8})
    for (const ScaleKind kind : {ScaleKind::kAffine, ScaleKind::kSymmetric})
      for (const auto& [rows, cols] :
           std::vector<std::pair<int, int>>{{1, 1}, {17, 65}, {37, 100}, {64, 320}})
        linear(runner, {bits, 32, kind}, rows, cols, &out);
  mxfp4(runner, split, &out);
  for (const auto& [rows, down] :
       std::vector<std::pair<ondevice::RowFormat, ondevice::RowFormat>>{{4, 4},
                                                                        {{4, 32}, {6, 32}},
                                                                        {{8, 32, ScaleKind::kSymmetric}, 5},
                                                                        {{5, 32, ScaleKind::kSymmetric}, 8},
                                                                        {16, 16}})
    for (const bool gated : {true, false}) {
      expert(runner, rows, down, 100, 130, split, gated, &out);
      expert(runner, rows, down, 64, 49, split, gated, &out);
    }
  for (const auto& [name, products] : all_tile_products(runner, split)) keep(&out, name, products);
  for (const int bits : {8, 16})
    for (const int64_t window : {0, 1, 37})
      for (const int64_t dim : {8, 20, 64}) {
        attention(runner, bits, 4, 4, dim, dim, window, &out);
        attention(runner, bits, 6, 2, dim, dim, window, &out);
        attention(runner, bits, 6, 2, dim, dim - dim / 4, window, &out);
      }
  vector_ops(runner, &out);
  for (const bool is_tree : {false, true}) mixer(runner, is_tree, &out);
  halves(runner, &out);
  import_rows(runner, &out);
  error_feedback(runner, &out);
  checksums(hardware_checksums, &out);
  return out;
}

// The number of vectors that differ, each named with its first differing byte.
int differences(const Vectors& a, const std::string& a_name, const Vectors& b, const std::string& b_name) {
  if (a.size() != b.size()) {
    std::fprintf(stderr, "%s has %zu vectors and %s has %zu\n", a_name.c_str(), a.size(), b_name.c_str(),
                 b.size());
    return 1;
  }
  int found = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].name == b[i].name && a[i].bytes == b[i].bytes) continue;
    size_t at = 0;
    while (at < a[i].bytes.size() && at < b[i].bytes.size() && a[i].bytes[at] == b[i].bytes[at]) ++at;
    std::fprintf(stderr, "%s: %s and %s differ from byte %zu on\n", a[i].name.c_str(), a_name.c_str(),
                 b_name.c_str(), at);
    ++found;
  }
  return found;
}

void write(const Vectors& vectors, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const Vector& vector : vectors) {
    file << vector.name << '\n' << vector.bytes.size() << '\n';
    file.write(reinterpret_cast<const char*>(vector.bytes.data()),
               static_cast<std::streamsize>(vector.bytes.size()));
    file << '\n';
  }
}

Vectors read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Vectors vectors;
  for (std::string name, size; std::getline(file, name) && std::getline(file, size);) {
    Bytes bytes(std::stoull(size));
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    file.ignore(1);
    vectors.push_back({name, std::move(bytes)});
  }
  return vectors;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc == 3 ? argv[1] : "";
  if (argc != 1 && mode != "--write" && mode != "--compare") {
    std::fprintf(stderr, "usage: kernel_vectors [--write FILE | --compare FILE]\n");
    return 2;
  }
  const Vectors oracle = run("scalar", 1, false);
  int wrong = 0;
  for (const std::string& target : ondevice::available_targets())
    for (const int threads : {1, 2}) {
      const Vectors vectors = run(target, threads, ondevice::has_crc32c_instruction());
      wrong += differences(oracle, "scalar", vectors, target + " on " + std::to_string(threads) + " threads");
      std::printf("%s, %d threads: %zu vectors\n", target.c_str(), threads, vectors.size());
    }
  if (mode == "--write") write(oracle, argv[2]);
  if (mode == "--compare") wrong += differences(read(argv[2]), argv[2], oracle, "this build");
  std::printf(wrong ? "%d vectors differ\n" : "all equal\n", wrong);
  return wrong ? 1 : 0;
}
