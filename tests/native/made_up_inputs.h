// Inputs of the native tests: numbers, rows and neuron records that every build makes alike.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/feed_forward.h"
#include "kernels/runner.h"

namespace {

using ondevice::groups_of;
using ondevice::kGroup;
using ondevice::Runner;

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;
using Halves = std::vector<uint16_t>;

// xorshift64*; floats are sums of four 16-bit integers around 0, scaled by a power of two.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1dull;
  }
  float value() {
    const uint64_t bits = next();
    int sum = 0;
    for (int shift = 0; shift < 64; shift += 16) sum += static_cast<int16_t>(bits >> shift);
    return static_cast<float>(sum) * (1.0f / 32768.0f);
  }
  Floats values(int64_t count) {
    Floats out(static_cast<size_t>(count));
    for (float& x : out) x = value();
    return out;
  }

 private:
  uint64_t state_;
};

// One row as it lies on disk.
struct Row {
  Bytes codes, scales, biases;
};

// A row of MXFP4: codes are the low bits of floats, and scales those around one, the least and large ones.
Row made_up_mxfp4(const float* x, int64_t cols) {
  const int64_t groups = groups_of(cols);
  Row row{Bytes(static_cast<size_t>(groups * kGroup / 2)), Bytes(static_cast<size_t>(groups * 2)), {}};
  Random random(static_cast<uint64_t>(x[0] * 32768.0f + 131072.0f));
  for (uint8_t& codes : row.codes) codes = static_cast<uint8_t>(random.next() >> 32);
  for (uint8_t& scale : row.scales) {
    const uint64_t bits = random.next() >> 32;
    scale = static_cast<uint8_t>(bits % 16 < 14    ? 120 + bits / 16 % 8
                                 : bits % 16 == 14 ? bits / 16 % 3
                                                   : 150);
  }
  return row;
}

Row quantize(Runner& runner, const ondevice::RowFormat& format, const float* x, int64_t cols) {
  if (format.mxfp4()) return made_up_mxfp4(x, cols);
  const auto bytes = static_cast<size_t>(format.bits == 16 ? 0 : groups_of(cols) * format.scales() * 2);
  Row row{Bytes(static_cast<size_t>(groups_of(cols) * format.codes_bytes())), Bytes(bytes), Bytes(bytes)};
  if (format.bits == 16)
    runner.kernels().float_to_half(x, reinterpret_cast<uint16_t*>(row.codes.data()), cols);
  else
    runner.kernels().quantize_block(format, x, 1, cols, row.codes.data(),
                                    reinterpret_cast<uint16_t*>(row.scales.data()),
                                    reinterpret_cast<uint16_t*>(row.biases.data()));
  return row;
}

void append_row(const Row& row, Bytes* out) {
  for (const Bytes* part : {&row.codes, &row.scales, &row.biases})
    out->insert(out->end(), part->begin(), part->end());
}

// `neurons` records of [gate][up | down] rows, a gap after the first part. Down rows have the format of their
// bits alone.
struct Records {
  ondevice::RecordShape shape;
  Bytes bytes;
};

[[maybe_unused]] Records make_records(Runner& runner, const ondevice::RowFormat& format, int64_t hidden,
                                      int64_t neurons) {
  Random random(static_cast<uint64_t>(hidden * 1000 + neurons));
  Records records{};
  for (int64_t n = 0; n < neurons; ++n) {
    const Floats rows = random.values(3 * hidden);
    const int64_t start = static_cast<int64_t>(records.bytes.size());
    append_row(quantize(runner, format, rows.data(), hidden), &records.bytes);
    records.bytes.resize(records.bytes.size() + 32);
    records.shape.up = static_cast<int64_t>(records.bytes.size()) - start;
    append_row(quantize(runner, format, rows.data() + hidden, hidden), &records.bytes);
    records.shape.down = static_cast<int64_t>(records.bytes.size()) - start;
    append_row(quantize(runner, format.bits, rows.data() + 2 * hidden, hidden), &records.bytes);
    records.shape.stride = static_cast<int64_t>(records.bytes.size()) - start;
  }
  return records;
}

}  // namespace
