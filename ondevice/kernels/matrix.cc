#include "matrix.h"

#include <algorithm>
#include <cstring>

#include "interleave.h"
#include "tile_lane.h"

namespace ondevice {
namespace {

// Tiles that a thread takes at a time; fewer of 16-bit weights, which have more bytes.
constexpr int64_t grain_of(const RowFormat& format) { return format.bits == 16 ? 2 : 8; }

// Bytes of all sections' tiles.
size_t bytes_of(const std::vector<Section>& sections, int64_t groups) {
  int64_t bytes = 0;
  for (const Section& section : sections) bytes += section.tiles() * kTile * section.format.row_bytes(groups);
  return static_cast<size_t>(bytes);
}

// Rows of tiles [begin, end) of a section times x, to out on, which has the section's first row.
void multiply_tiles(const KernelTable& kernels, const Section& section, const uint8_t* tiles,
                    const InputRows& x, const float* bias, const float* added, float* out, int64_t stride,
                    int64_t begin, int64_t end) {
  if (section.format.bits != 16)
    return kernels.linear_quantized(section.format, tiles, x.quantized, x.tokens, bias, added, out, stride,
                                    section.rows, begin, end);
  const int64_t last = end * kTile < section.rows ? end * kTile : section.rows;
  kernels.linear_half(reinterpret_cast<const uint16_t*>(tiles), x.quantized.groups * kGroup, x.padded,
                      x.tokens, bias, added, out, stride, begin * kTile, last);
}

}  // namespace

void interleave_rows(ThreadPool& pool, const RowFormat& format, int64_t groups, int64_t row0, int64_t count,
                     const StoredRows& source, uint8_t* tiles, int64_t tile_stride) {
  const int64_t words = format.codes_bytes() / 4, block = tile_group_bytes(format);
  const int64_t parts = format.scales(), wide = format.scale_bytes();
  const int64_t first = row0 / kTile, last = (row0 + count - 1) / kTile;
  pool.parallel_for(last - first + 1, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = first + begin; tile < first + end; ++tile) {
      const int64_t low = tile * kTile < row0 ? row0 - tile * kTile : 0;
      const int64_t high = (tile + 1) * kTile > row0 + count ? row0 + count - tile * kTile : kTile;
      const int64_t base = tile * kTile - row0;
      for (int64_t g = 0; g < groups; ++g) {
        uint8_t* out = tiles + tile * tile_stride + g * block;
        uint8_t* scales = out + kTile * format.codes_bytes();
        uint8_t* biases = scales + wide * kTile * parts;
        const uint8_t* codes = source.codes + base * source.codes_stride + g * words * 4;
        const bool apart = in_planes(format.bits), whole = low == 0 && high == kTile && !apart;
        if (whole)
          for (int64_t r = 0; r < kTile; r += 4)
            for (int64_t w = 0; w < words; w += 4)
              transpose_words(codes + r * source.codes_stride + w * 4,
                              codes + (r + 1) * source.codes_stride + w * 4,
                              codes + (r + 2) * source.codes_stride + w * 4,
                              codes + (r + 3) * source.codes_stride + w * 4, out + w * 64 + r * 4);
        for (int64_t r = low; r < high; ++r) {
          if (apart) put_row(codes + r * source.codes_stride, format.bits, r, out);
          for (int64_t w = 0; w < words && !whole && !apart; ++w)
            std::memcpy(out + w * 64 + r * 4, codes + r * source.codes_stride + w * 4, 4);
          for (int64_t s = 0; s < parts; ++s) {
            const int64_t from = wide * (g * parts + s), to = wide * (s * kTile + r);
            std::memcpy(scales + to, source.scales + (base + r) * source.scales_stride + from,
                        static_cast<size_t>(wide));
            if (format.has_biases())
              std::memcpy(biases + to, source.biases + (base + r) * source.biases_stride + from, 2);
          }
        }
      }
    }
  });
}

void tile_two_level(ThreadPool& pool, const RowFormat& format, int64_t groups, int64_t rows,
                    const uint8_t* codes, const uint8_t* headers, uint8_t* tiles) {
  const int64_t width = format.codes_bytes(), header = format.header_bytes(), upper = format.upper_bytes();
  const int64_t supers = groups / kSuperGroup, bytes = kTile * format.row_bytes(kSuperGroup);
  pool.parallel_for((rows + kTile - 1) / kTile, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * supers; at < end * supers; ++at) {
      const int64_t row0 = at / supers * kTile, super = at % supers;
      uint8_t* out = tiles + at * bytes;
      for (int64_t r = 0; r < kTile && row0 + r < rows; ++r) {
        const uint8_t* from = headers + ((row0 + r) * supers + super) * header;
        for (int64_t k = 0; k < upper; k += 2) std::memcpy(out + k * kTile + 2 * r, from + k, 2);
        for (int64_t k = upper; k < header; ++k) out[k * kTile + r] = from[k];
        const uint8_t* row = codes + ((row0 + r) * groups + super * kSuperGroup) * width;
        uint8_t* block = out + header * kTile;
        for (int64_t b = 0; b < kSuperGroup; ++b, row += width, block += kTile * width)
          if (in_planes(format.bits))
            put_row(row, format.bits, r, block);
          else
            for (int64_t k = 0; k < width; k += 4) std::memcpy(block + k * kTile + 4 * r, row + k, 4);
      }
    }
  });
}

Matrix::Matrix(const std::vector<Section>& sections, int64_t cols)
    : sections_(sections), cols_(cols), groups_(groups_of(cols)), memory_(bytes_of(sections, groups_)) {
  int64_t offset = 0;
  for (const Section& section : sections_) {
    size_t inputs = 0;
    while (inputs < inputs_.size() && !same_inputs(inputs_[inputs], section.format)) ++inputs;
    if (inputs == inputs_.size()) inputs_.push_back(section.format);
    places_.push_back({rows_, offset, inputs});
    rows_ += section.rows;
    offset += section.tiles() * kTile * section.format.row_bytes(groups_);
  }
}

Timed Matrix::time(Runner& runner, int64_t tokens) const {
  StepTimes* times = runner.times();
  return {times, times ? times->products : Step::kProducts, tokens * rows_ * cols_, nbytes()};
}

void Matrix::load_rows(Runner& runner, int64_t row0, int64_t count, const StoredRows& source) {
  if (format().bits != 16) {
    interleave_rows(runner.pool(), format(), groups_, row0, count, source, memory_.data(), tile_bytes(0));
    return;
  }
  const int64_t bytes = groups_ * kGroup * 2;
  for (int64_t r = 0; r < count; ++r)
    std::memcpy(memory_.data() + (row0 + r) * bytes, source.codes + r * source.codes_stride,
                static_cast<size_t>(bytes));
}

void Matrix::load_tiles(int64_t index, int64_t first, int64_t count, const uint8_t* tiles, int64_t stride) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(tile(index, first + i), tiles + i * stride, static_cast<size_t>(tile_bytes(index)));
}

void Matrix::look_up(const KernelTable& kernels, int64_t row, float* out) const {
  const uint8_t* tile = memory_.data() + row / kTile * tile_bytes(0);
  dequantize_lane(kernels, format(), tile, row % kTile, groups_, out);
}

void Matrix::forward(Runner& runner, const float* x, int64_t x_stride, int64_t tokens, const float* bias,
                     float* out, const Norm& norm, const float* added) const {
  InputRows inputs[kInputKinds];
  for (size_t i = 0; i < inputs_.size(); ++i)
    inputs[i] = runner.prepare(x, x_stride, tokens, cols_, inputs_[i], norm, i);
  multiply_all(runner, inputs, bias, out, added);
}

void Matrix::forward_stacked(Runner& runner, const std::vector<const Matrix*>& matrices, const float* x,
                             int64_t x_stride, int64_t tokens, float* out, int64_t out_stride,
                             const Norm& norm) {
  const Matrix &first = *matrices.front(), &last = *matrices.back();
  const InputRows inputs = runner.prepare(x, x_stride, tokens, first.cols_, first.format(), norm);
  const int64_t unit = first.sections_[0].tiles(), before = static_cast<int64_t>(matrices.size()) - 1;
  const StepTimes* times = runner.times();
  const Timed timed(runner.times(), times ? times->products : Step::kProducts,
                    tokens * (before * first.rows_ + last.rows_) * first.cols_,
                    before * first.nbytes() + last.nbytes());
  const int64_t tiles = before * unit + last.sections_[0].tiles();
  runner.pool().parallel_for(tiles, grain_of(first.format()), [&](int64_t begin, int64_t end, int) {
    while (begin < end) {
      const int64_t index = begin / unit, at = index * unit, stop = std::min(end, at + unit);
      const Matrix& matrix = *matrices[static_cast<size_t>(index)];
      multiply_tiles(runner.kernels(), matrix.sections_[0], matrix.memory_.data(), inputs, nullptr, nullptr,
                     out + at * kTile, out_stride, begin - at, stop - at);
      begin = stop;
    }
  });
}

void Matrix::forward_heads(Runner& runner, const float* x, int64_t heads, int64_t tokens, float* out) const {
  const KernelTable& kernels = runner.kernels();
  const InputRows inputs = runner.prepare(x, cols_, heads * tokens, cols_, format(), {});
  const int64_t head_tiles = rows_ / heads / kTile;
  const Timed timed = time(runner, tokens);
  runner.pool().parallel_for(rows_ / kTile, grain_of(format()), [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end;) {
      const int64_t head = at / head_tiles, next = (head + 1) * head_tiles, stop = next < end ? next : end;
      InputRows of_head = inputs;
      of_head.tokens = tokens;
      if (inputs.padded)
        of_head.padded = inputs.padded + head * tokens * groups_ * kGroup;
      else
        of_head.quantized = inputs.quantized.from(head * tokens);
      multiply_tiles(kernels, sections_[0], memory_.data(), of_head, nullptr, nullptr, out, rows_, at, stop);
      at = stop;
    }
  });
}

void Matrix::multiply_all(Runner& runner, const InputRows* inputs, const float* bias, float* out,
                          const float* added) const {
  const Timed timed = time(runner, inputs[0].tokens);
  const KernelTable& kernels = runner.kernels();
  int64_t tiles = 0;
  for (const Section& section : sections_) tiles += section.tiles();
  runner.pool().parallel_for(tiles, grain_of(format()), [&](int64_t begin, int64_t end, int) {
    // Tiles count through all sections, of which a range may touch several.
    for (size_t i = 0; i < sections_.size() && end > 0; ++i) {
      const Section& section = sections_[i];
      const Place& place = places_[i];
      const int64_t count = section.tiles(), last = end < count ? end : count;
      if (begin < last)
        multiply_tiles(kernels, section, memory_.data() + place.offset, inputs[place.inputs],
                       bias ? bias + place.row : nullptr, added ? added + place.row : nullptr,
                       out + place.row, rows_, begin, last);
      begin = begin < count ? 0 : begin - count;
      end -= count;
    }
  });
}

}  // namespace ondevice
