#include "feed_forward.h"

#include <algorithm>
#include <cstring>

#include "feed_forward_pass.h"
#include "interleave.h"

namespace ondevice {
namespace {

constexpr int64_t kTilesPerBlock = kGroup / kTile;

// The codes of pack_down at 5 and 6 bits.
void pack_high_down(int bits, const uint8_t* const* rows, int64_t g, uint8_t* out) {
  uint8_t codes[kGroup][kGroup];  // by output, then by neuron
  for (int64_t n = 0; n < kGroup; ++n)
    for (int64_t k = 0; k < kGroup / 8; ++k) {
      uint64_t raw = 0;
      std::memcpy(&raw, rows[n] + (g * kGroup / 8 + k) * bits, static_cast<size_t>(bits));
      raw = spread_codes(raw, bits);
      for (int64_t i = 0; i < 8; ++i) codes[8 * k + i][n] = static_cast<uint8_t>(raw >> 8 * i);
    }
  for (int64_t o = 0; o < kGroup; ++o)
    for (int64_t k = 0; k < kGroup / 8; ++k) {
      uint64_t eight;
      std::memcpy(&eight, &codes[o][8 * k], 8);
      put_codes(eight, bits, o % kTile, k % 4, out + (o / kTile * 2 + k / 4) * half_block_bytes(bits));
    }
}

// One (group, block) of the down projection: outputs 64 g .. 64 g + 63 of 64 neurons, see
// targets/down_projection.cc. `rows`: the down rows of 64 neurons.
void pack_down(int bits, const uint8_t* const* rows, int64_t g, int64_t codes_bytes, int64_t groups,
               uint8_t* out) {
  const int64_t tile_bytes = kTile * kGroup * bits / 8;
  const bool apart = in_planes(bits);
  if (apart) pack_high_down(bits, rows, g, out);
  for (int64_t n = 0; n < kGroup && !apart; n += 32 / bits, out += 64)
    for (int64_t tile = 0; tile < kTilesPerBlock; ++tile) {
      const uint8_t* const* r = rows + n;
      const int64_t at = (g * kGroup + tile * kTile) * bits / 8;
      if (bits == 8)
        interleave_bytes(load_vector<Bytes16>(r[0] + at), load_vector<Bytes16>(r[1] + at),
                         load_vector<Bytes16>(r[2] + at), load_vector<Bytes16>(r[3] + at),
                         out + tile * tile_bytes);
      else
        interleave_bytes(join_nibbles(r[0] + at, r[1] + at), join_nibbles(r[2] + at, r[3] + at),
                         join_nibbles(r[4] + at, r[5] + at), join_nibbles(r[6] + at, r[7] + at),
                         out + tile * tile_bytes);
    }
  out += (kTilesPerBlock - (apart ? 0 : 1)) * tile_bytes;
  for (int64_t n = 0; n < kGroup; ++n) {
    std::memcpy(out + 2 * n, rows[n] + codes_bytes + 2 * g, 2);
    std::memcpy(out + 2 * (kGroup + n), rows[n] + codes_bytes + 2 * (groups + g), 2);
  }
}

}  // namespace

FeedForward::FeedForward(int64_t hidden, const RowFormat& rows, RecordShape record, const float* bias,
                         int64_t neurons)
    : hidden_(hidden),
      groups_(groups_of(hidden)),
      format_(rows),
      record_(record),
      row_bytes_(rows.row_bytes(groups_)),
      down_bytes_(RowFormat(rows.bits).row_bytes(groups_)) {
  if (!bias) return;
  bias_.resize(static_cast<size_t>(groups_of(neurons) * kGroup));
  std::copy(bias, bias + neurons, bias_.begin());
}

// A segment holds the gate tile and, in a gated layer, the up tile of each 16 neurons, so that both are read
// as one stream, and then all down rows.
void FeedForward::pack(Runner& runner, Segment& segment, int64_t block0, const uint8_t* records,
                       int64_t count) const {
  const int64_t blocks = (count + kGroup - 1) / kGroup, row0 = block0 * kGroup;
  const int64_t padding = blocks * kGroup - count, tile_bytes = kTile * row_bytes_;
  const int64_t parts = record_.rows() - 1;
  uint8_t* tiles = segment.data();
  uint8_t* down = tiles + parts * segment.blocks() * kGroup * row_bytes_;
  if (padding) {
    const int64_t first = (row0 + count) / kTile, end = (block0 + blocks) * kTilesPerBlock;
    std::memset(tiles + parts * first * tile_bytes, 0,
                static_cast<size_t>(parts * (end - first) * tile_bytes));
  }
  if (bits() == 16) {
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t* record = records + n * record_.stride;
      uint8_t* gate = tiles + (row0 + n) / kTile * parts * tile_bytes + (row0 + n) % kTile * row_bytes_;
      std::memcpy(gate, record + record_.gate, static_cast<size_t>(row_bytes_));
      if (parts == 2) std::memcpy(gate + tile_bytes, record + record_.up, static_cast<size_t>(row_bytes_));
      std::memcpy(down + (row0 + n) * row_bytes_, record + record_.down, static_cast<size_t>(row_bytes_));
    }
    std::memset(down + (row0 + count) * row_bytes_, 0, static_cast<size_t>(padding * row_bytes_));
    return;
  }
  const int64_t codes = groups_ * format_.codes_bytes(),
                biases = codes + groups_ * format_.scales() * format_.scale_bytes();
  for (int64_t part = 0; part < parts; ++part) {
    const uint8_t* base = records + (part ? record_.up : record_.gate);
    interleave_rows(runner.pool(), format_, groups_, row0, count,
                    {base, base + codes, base + biases, record_.stride, record_.stride, record_.stride},
                    tiles + part * tile_bytes, parts * tile_bytes);
  }
  uint8_t* zeros = reinterpret_cast<uint8_t*>(runner.scratch(down_bytes_ / 4));
  std::memset(zeros, 0, static_cast<size_t>(down_bytes_));
  runner.pool().parallel_for(blocks * groups_, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / groups_, g = i % groups_;
      const uint8_t* rows_of_block[kGroup];
      for (int64_t n = 0; n < kGroup; ++n) {
        const int64_t neuron = block * kGroup + n;
        rows_of_block[n] = neuron < count ? records + neuron * record_.stride + record_.down : zeros;
      }
      pack_down(bits(), rows_of_block, g, codes, groups_,
                down + (g * segment.blocks() + block0 + block) * down_block_bytes());
    }
  });
}

void FeedForward::forward(Runner& runner, const std::vector<const Segment*>& segments, const float* x,
                          int64_t x_stride, int64_t tokens, const GateForm& form, float* out,
                          const Norm& norm, const float* added) const {
  FeedForwardPass pass(runner, *this, runner.prepare(x, x_stride, tokens, hidden_, format_, norm), form);
  pass.add(segments, tokens);
  pass.finish(out, added);
}

int64_t FeedForward::forward_selected(Runner& runner, const Scorer& scorer, const ResidentRecords& resident,
                                      const float* x, int64_t x_stride, int64_t tokens, const GateForm& form,
                                      float* out, const Norm& norm, const float* added) const {
  FeedForwardScratch& scratch = runner.feed_forward_scratch();
  const Matrix& first = scorer.low_rank ? *scorer.low_rank : scorer.matrix;
  const int64_t neurons = scorer.matrix.rows();
  scratch.scores.grow(static_cast<size_t>(tokens * neurons) * sizeof(float));
  float* scores = scratch.scores.as<float>();
  InputRows rows = runner.prepare(x, x_stride, tokens, hidden_, first.format(), norm);
  runner.name_products(scorer.low_rank ? Step::kProducts : Step::kGateUp);
  if (scorer.low_rank) {
    const int64_t rank = scorer.low_rank->rows();
    scratch.low_rank.grow(static_cast<size_t>(tokens * rank) * sizeof(float));
    float* low_rank = scratch.low_rank.as<float>();
    scorer.low_rank->multiply(runner, rows, nullptr, low_rank);
    scorer.matrix.forward(runner, low_rank, rank, tokens, scorer.bias, scores);
  } else {
    scorer.matrix.multiply(runner, rows, scorer.bias, scores);
  }
  runner.name_products(Step::kProducts);
  // Gates of the layer's own format need the same form of x, which is still there.
  if (scorer.low_rank || !(first.format() == format_))
    rows = runner.prepare(x, x_stride, tokens, hidden_, format_, norm);
  FeedForwardPass pass(runner, *this, rows, form);
  std::vector<int32_t>& ids = scratch.selected_ids;
  std::vector<const uint8_t*>& parts = scratch.selected_parts;
  ids.resize(static_cast<size_t>(neurons));
  parts.resize(static_cast<size_t>(neurons));
  const int64_t count = select(scores, tokens, neurons, scorer.low_rank ? 0.0f : form.threshold, ids.data());
  for (int64_t k = 0; k < count; ++k) parts[k] = resident.slot_parts[resident.slots[ids[k]]];
  pass.add_selected({ids.data(), parts.data(), count, resident.whole, scores, neurons});
  pass.finish(out, added);
  return count;
}

void FeedForward::forward_records(Runner& runner, const uint8_t* records, int64_t count, const float* x,
                                  int64_t x_stride, int64_t tokens, const GateForm& form, float* out) const {
  FeedForwardScratch& scratch = runner.feed_forward_scratch();
  std::vector<int32_t>& ids = scratch.selected_ids;
  std::vector<const uint8_t*>& parts = scratch.selected_parts;
  ids.resize(static_cast<size_t>(count));
  parts.resize(static_cast<size_t>(count));
  const bool sparse = form.makes_zeros();
  scratch.scores.grow(static_cast<size_t>((sparse ? tokens : 1) * count) * sizeof(float));
  float* scores = scratch.scores.as<float>();
  for (int64_t k = 0; k < count; ++k) {
    ids[k] = static_cast<int32_t>(k);
    parts[k] = records + k * record_.stride;
  }
  FeedForwardPass pass(runner, *this, runner.prepare(x, x_stride, tokens, hidden_, format_), form);
  if (sparse) {
    pass.gates_of(parts.data(), count, scores);
    const int64_t firing = select(scores, tokens, count, form.threshold, ids.data());
    for (int64_t k = 0; k < firing; ++k) parts[k] = records + ids[k] * record_.stride + record_.up;
    pass.add_selected({ids.data(), parts.data(), firing, false, scores, count});
  } else {
    // All tokens have one row of scores.
    std::fill_n(scores, count, 1.0f);
    pass.add_selected({ids.data(), parts.data(), count, true, scores, 0});
  }
  pass.finish(out);
}

}  // namespace ondevice
