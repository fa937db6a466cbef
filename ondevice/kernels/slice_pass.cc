#include "slice_pass.h"

#include <algorithm>
#include <cstring>

#include "feed_forward_pass.h"

namespace ondevice {
namespace {

// Tiles that a thread takes at a time.
constexpr int64_t kUpGrain = 4, kDownGrain = 8;

}  // namespace

SlicePass::SlicePass(Runner& runner, const Expert& slice, const InputRows& x, const GateForm& form,
                     const float* bias, int64_t biased)
    : runner_(runner),
      slice_(slice),
      x_(x),
      form_(form),
      bias_(bias),
      biased_(biased),
      input_version_(runner.input_version()) {}

void SlicePass::add(const std::vector<RecordBytes>& records, int64_t tokens, const float* base, float* out) {
  const size_t bytes = static_cast<size_t>(tokens * slice_.hidden()) * sizeof(float);
  if (records.empty() && !base) std::memset(out, 0, bytes);
  if (records.empty() && base && base != out) std::memcpy(out, base, bytes);
  const int64_t width = slice_.gate().tiles() * kTile, count = static_cast<int64_t>(records.size());
  const int64_t together = std::max<int64_t>(1, kHiddenFloats / (tokens * width));
  for (int64_t first = 0; first < count; first += together) {
    add_some(records.data() + first, std::min(together, count - first), tokens, base, out);
    base = out;
  }
}

void SlicePass::add_some(const RecordBytes* records, int64_t count, int64_t tokens, const float* base,
                         float* out) {
  const KernelTable& kernels = runner_.kernels();
  FeedForwardScratch& scratch = runner_.feed_forward_scratch();
  const int64_t up_tiles = slice_.gate().tiles(), width = up_tiles * kTile, neurons = slice_.neurons();
  const int64_t of_thread = tokens * Expert::kProducts, joined_bytes = slice_.joined_bytes();
  scratch.hidden.grow(static_cast<size_t>(count * tokens * width) * sizeof(float));
  scratch.gate_up.grow(static_cast<size_t>(runner_.pool().threads() * of_thread) * sizeof(float));
  scratch.joined.grow(static_cast<size_t>(runner_.pool().threads() * joined_bytes));
  float *h = scratch.hidden.as<float>(), *products = scratch.gate_up.as<float>();
  uint8_t* joined = scratch.joined.as<uint8_t>();
  InputRows x = x_;
  x.tokens = tokens;
  const Timed timed_up = slice_.time_up(runner_, *records, count, tokens);
  // Slice s has the rows from s * tokens on of hidden values (count * tokens, width).
  runner_.pool().parallel_for(count * up_tiles, kUpGrain, [&](int64_t begin, int64_t end, int thread) {
    while (begin < end) {
      const int64_t s = begin / up_tiles, tile = begin % up_tiles,
                    last = std::min(up_tiles, tile + end - begin);
      slice_.multiply_up(kernels, records[s], x, form_, products + thread * of_thread, h + s * tokens * width,
                         width, tile, last, joined + thread * joined_bytes,
                         bias_ ? bias_ + (added_ + s) * neurons : nullptr);
      begin += last - tile;
    }
  });
  const RecordMatrix& down = slice_.down();
  const InputRows rows = runner_.prepare_hidden(h, width, count * tokens, neurons, down.format);
  const Timed timed_down = slice_.time_down(runner_, *records, count, tokens);
  runner_.pool().parallel_for(down.tiles(), kDownGrain, [&](int64_t begin, int64_t end, int thread) {
    const float* sum = base;
    for (int64_t s = 0; s < count; ++s) {
      InputRows hidden{tokens, rows.quantized, rows.padded};
      if (down.format.bits == 16)
        hidden.padded += s * tokens * groups_of(neurons) * kGroup;
      else
        hidden.quantized = rows.quantized.from(s * tokens);
      slice_.multiply_down(kernels, records[s], hidden, out, begin, end, joined + thread * joined_bytes, sum);
      sum = out;
    }
  });
  added_ += count;
}

}  // namespace ondevice
