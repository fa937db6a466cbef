#include "expert.h"

#include <algorithm>

#include "planes.h"

namespace ondevice {
namespace {

// Tiles that share the loads of activations, and tiles that a thread takes at a time.
constexpr int64_t kTogether = 2, kUpGrain = 4, kDownGrain = 8;

// Tiles [begin, end) of a matrix: where they lie, or joined to `joined`, which has room for them.
const uint8_t* tiles_of(const KernelTable& kernels, const RecordMatrix& matrix, const RecordBytes& record,
                        int64_t begin, int64_t end, uint8_t* joined) {
  const int64_t bytes = matrix.tile_bytes();
  if (record.tiles) return record.tiles + matrix.offset + begin * bytes;
  if (matrix.low < 0) return record.high + matrix.high + begin * bytes;
  const int64_t groups = groups_of(matrix.cols), low_bytes = low_tile_bytes(matrix.format, groups),
                high_bytes = bytes - low_bytes;
  for (int64_t tile = begin; tile < end; ++tile)
    join_tile(kernels, matrix.format, groups, record.high + matrix.high + tile * high_bytes,
              record.low + matrix.low + tile * low_bytes, joined + (tile - begin) * bytes);
  return joined;
}

// Rows of tiles [begin, end), at most kTogether, of a record's matrix times x, to out[t * stride] on. bias:
// of all of the matrix's rows, in place of the record's; added: like out; both may be null.
void multiply(const KernelTable& kernels, const RecordMatrix& matrix, const RecordBytes& record,
              const InputRows& x, float* out, int64_t stride, int64_t begin, int64_t end, uint8_t* joined,
              const float* bias = nullptr, const float* added = nullptr) {
  const int64_t row = begin * kTile, rows = std::min(end * kTile, matrix.rows) - row;
  if (matrix.bias >= 0) bias = reinterpret_cast<const float*>(record.tiles + matrix.bias);
  if (bias) bias += row;
  if (!record.tiles && !record.low && matrix.low >= 0) {
    const int64_t high_bytes = high_tile_bytes(matrix.format, groups_of(matrix.cols));
    kernels.linear_high(matrix.format, record.high + matrix.high + begin * high_bytes, x.quantized, x.tokens,
                        bias, added, out, stride, rows, 0, end - begin);
    return;
  }
  const uint8_t* tiles = tiles_of(kernels, matrix, record, begin, end, joined);
  if (matrix.format.bits == 16)
    kernels.linear_half(reinterpret_cast<const uint16_t*>(tiles), groups_of(matrix.cols) * kGroup, x.padded,
                        x.tokens, bias, added, out, stride, 0, rows);
  else
    kernels.linear_quantized(matrix.format, tiles, x.quantized, x.tokens, bias, added, out, stride, rows, 0,
                             end - begin);
}

}  // namespace

int64_t RecordMatrix::end() const {
  return bias < 0 ? offset + tiles() * tile_bytes() : bias + tiles() * kTile * int64_t{sizeof(float)};
}

int64_t RecordMatrix::read_bytes(const RecordBytes& record) const {
  const bool is_high = !record.tiles && !record.low && low >= 0;
  return tiles() * (is_high ? high_tile_bytes(format, groups_of(cols)) : tile_bytes());
}

int64_t Expert::record_bytes() const { return std::max({gate_.end(), up_ ? up_->end() : 0, down_.end()}); }

template <class Visit>
void Expert::each_matrix(const Visit& visit) const {
  visit(gate_);
  if (up_) visit(*up_);
  visit(down_);
}

int64_t Expert::high_bytes() const {
  int64_t end = 0;
  each_matrix([&](const RecordMatrix& matrix) {
    const int64_t groups = groups_of(matrix.cols);
    const int64_t tile = matrix.low < 0 ? matrix.tile_bytes() : high_tile_bytes(matrix.format, groups);
    if (matrix.high >= 0) end = std::max(end, matrix.high + matrix.tiles() * tile);
  });
  return end;
}

int64_t Expert::low_bytes() const {
  int64_t end = 0;
  each_matrix([&](const RecordMatrix& matrix) {
    const int64_t tile = low_tile_bytes(matrix.format, groups_of(matrix.cols));
    if (matrix.low >= 0) end = std::max(end, matrix.low + matrix.tiles() * tile);
  });
  return end;
}

int64_t Expert::joined_bytes() const {
  int64_t most = 0;
  each_matrix([&](const RecordMatrix& matrix) {
    if (matrix.low >= 0) most = std::max(most, kTogether * matrix.tile_bytes());
  });
  return most;
}

void Expert::join(Runner& runner, const uint8_t* high, const uint8_t* low, uint8_t* record) const {
  const RecordBytes planes(high, low);
  each_matrix([&](const RecordMatrix& matrix) {
    runner.pool().parallel_for(matrix.tiles(), kDownGrain, [&](int64_t begin, int64_t end, int) {
      uint8_t* to = record + matrix.offset + begin * matrix.tile_bytes();
      const uint8_t* from = tiles_of(runner.kernels(), matrix, planes, begin, end, to);
      if (from != to) std::copy_n(from, (end - begin) * matrix.tile_bytes(), to);
    });
  });
}

void Expert::forward(Runner& runner, const uint8_t* record, const float* x, int64_t x_stride, int64_t tokens,
                     const GateForm& form, float* out) const {
  const KernelTable& kernels = runner.kernels();
  FeedForwardScratch& scratch = runner.feed_forward_scratch();
  const int64_t h_stride = gate_.tiles() * kTile;
  scratch.hidden.grow(static_cast<size_t>(tokens * h_stride) * sizeof(float));
  scratch.gate_up.grow(static_cast<size_t>(runner.pool().threads() * tokens * kProducts) * sizeof(float));
  float *h = scratch.hidden.as<float>(), *products = scratch.gate_up.as<float>();
  const InputRows inputs = runner.prepare(x, x_stride, tokens, hidden(), gate_.format);
  const Timed up = time_up(runner, record, 1, tokens);
  runner.pool().parallel_for(gate_.tiles(), kUpGrain, [&](int64_t begin, int64_t end, int thread) {
    multiply_up(kernels, record, inputs, form, products + thread * tokens * kProducts, h, h_stride, begin,
                end);
  });
  const InputRows hidden_rows = runner.prepare(h, h_stride, tokens, neurons(), down_.format);
  const Timed down = time_down(runner, record, 1, tokens);
  runner.pool().parallel_for(down_.tiles(), kDownGrain, [&](int64_t begin, int64_t end, int) {
    multiply_down(kernels, record, hidden_rows, out, begin, end);
  });
}

Timed Expert::time_up(Runner& runner, const RecordBytes& record, int64_t count, int64_t tokens) const {
  const int64_t all = count * (up_ ? 2 : 1);
  return {runner.times(), Step::kGateUp, all * tokens * neurons() * hidden(), all * gate_.read_bytes(record)};
}

Timed Expert::time_down(Runner& runner, const RecordBytes& record, int64_t count, int64_t tokens) const {
  return {runner.times(), Step::kDown, count * tokens * neurons() * hidden(),
          count * down_.read_bytes(record)};
}

void Expert::multiply_up(const KernelTable& kernels, const RecordBytes& record, const InputRows& x,
                         const GateForm& form, float* products, float* h, int64_t h_stride, int64_t begin,
                         int64_t end, uint8_t* joined, const float* bias) const {
  constexpr int64_t kStride = 2 * kTogether * kTile;
  static_assert(kStride == kProducts,
                "products hold the gates and ups of tiles that are multiplied together");
  for (int64_t tile = begin; tile < end; tile += kTogether) {
    const int64_t last = std::min(tile + kTogether, end),
                  count = std::min(last * kTile, neurons()) - tile * kTile;
    multiply(kernels, gate_, record, x, products, kStride, tile, last, joined, bias);
    float* ups = products + kTogether * kTile;
    if (up_) multiply(kernels, *up_, record, x, ups, kStride, tile, last, joined);
    for (int64_t t = 0; t < x.tokens; ++t)
      kernels.activate(form, products + t * kStride, up_ ? ups + t * kStride : nullptr,
                       h + t * h_stride + tile * kTile, count);
  }
}

void Expert::multiply_down(const KernelTable& kernels, const RecordBytes& record, const InputRows& h,
                           float* out, int64_t begin, int64_t end, uint8_t* joined,
                           const float* added) const {
  const int64_t step = record.tiles ? end - begin : kTogether;
  for (int64_t tile = begin; tile < end; tile += step)
    multiply(kernels, down_, record, h, out + tile * kTile, hidden(), tile, std::min(tile + step, end),
             joined, nullptr, added ? added + tile * kTile : nullptr);
}

}  // namespace ondevice
