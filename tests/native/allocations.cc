// Kernels and reads of records allocate nothing once their scratch has its size: every op runs twice, the
// second time without heap.
//
// Exits 1 with the op's name at the first allocation. Scratch comes from mmap, which isn't watched.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../../ondevice/flash/flash_reader.h"
#include "../../ondevice/flash/record_batch.h"
#include "kernels/feed_forward_pass.h"
#include "kernels/quantize_rows.h"
#include "made_up_file.h"

namespace {

std::atomic<bool> watched{false};
std::atomic<int> allocations{0};

}  // namespace

void* operator new(std::size_t bytes) {
  if (watched) ++allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using ondevice::Runner;

int failures = 0;

void twice(const char* name, int bits, const std::function<void()>& op) {
  op();
  allocations = 0;
  watched = true;
  op();
  watched = false;
  if (allocations == 0) return;
  std::fprintf(stderr, "allocations: %s at %d bits allocates %d times\n", name, bits, allocations.load());
  ++failures;
}

void run(Runner& runner, int bits) {
  constexpr int64_t kRows = 100, kCols = 130, kGroups = 3, kTokens = 5;
  std::vector<float> x(kRows * kCols, 0.5f), y(kRows * kCols);
  std::vector<uint8_t> codes(static_cast<size_t>(kRows * kGroups * 8 * bits));
  std::vector<uint16_t> scales(kRows * kGroups), biases(kRows * kGroups);
  const ondevice::SourceRows source{reinterpret_cast<const uint8_t*>(x.data()), ondevice::SourceType::kFloat,
                                    kCols, 1};
  twice("quantize_rows", bits, [&] {
    ondevice::quantize_rows(runner, source, kRows, kCols, bits, codes.data(), scales.data(), biases.data());
  });
  ondevice::Matrix matrix(kRows, kCols, bits);
  const ondevice::StoredRows rows{codes.data(),
                                  reinterpret_cast<const uint8_t*>(scales.data()),
                                  reinterpret_cast<const uint8_t*>(biases.data()),
                                  kGroups * 8 * bits,
                                  2 * kGroups,
                                  2 * kGroups};
  twice("load_rows", bits, [&] { matrix.load_rows(runner, 0, kRows, rows); });
  twice("linear", bits, [&] { matrix.forward(runner, x.data(), kCols, kTokens, nullptr, y.data()); });
  const ondevice::Norm norm{x.data(), 1e-5f};
  twice("normed linear", bits,
        [&] { matrix.forward(runner, x.data(), kCols, kTokens, nullptr, y.data(), norm, y.data()); });

  const int64_t row = kGroups * 8 * bits + (bits == 16 ? 0 : 4 * kGroups);
  const ondevice::FeedForward layer(kCols, bits, {3 * row, 0, row, 2 * row});
  const std::vector<uint8_t> records(static_cast<size_t>(kRows * 3 * row), 0);
  ondevice::Segment segment(layer.segment_bytes(2));
  segment.lay_out(2);
  twice("pack", bits, [&] { layer.pack(runner, segment, 0, records.data(), kRows); });
  const std::vector<const ondevice::Segment*> segments{&segment};
  twice("feed_forward", bits, [&] {
    ondevice::FeedForwardPass pass(runner, layer, runner.prepare(x.data(), kCols, kTokens, kCols, bits),
                                   {ondevice::Activation::kSilu});
    pass.add(segments, pass.tokens());
    pass.finish(y.data());
  });
  const std::vector<float> gates(kTokens * kRows, 1.0f);
  std::vector<int32_t> ids;
  std::vector<const uint8_t*> parts;
  for (int32_t n = 0; n < kRows; n += 3) {
    ids.push_back(n);
    parts.push_back(records.data() + (3 * n + 1) * row);
  }
  const ondevice::SelectedNeurons neurons{ids.data(), parts.data(), static_cast<int64_t>(ids.size()),
                                          false,      gates.data(), kRows};
  twice("feed_forward of selected neurons", bits, [&] {
    ondevice::FeedForwardPass pass(runner, layer, runner.prepare(x.data(), kCols, kTokens, kCols, bits),
                                   {ondevice::Activation::kRelu});
    pass.add_selected(neurons);
    pass.finish(y.data());
  });
  std::vector<int32_t> slots;
  std::vector<const uint8_t*> places;
  for (int32_t n = 0; n < kRows; ++n) {
    slots.push_back(n);
    places.push_back(records.data() + (3 * n + 1) * row);
  }
  twice("feed_forward of a layer in memory", bits, [&] {
    layer.forward_selected(runner, {matrix, nullptr, nullptr}, {slots.data(), places.data(), false}, x.data(),
                           kCols, kTokens, {ondevice::Activation::kRelu}, y.data(), norm, nullptr);
  });
}

void attention(Runner& runner, int bits) {
  constexpr int64_t kHeads = 4, kDim = 20, kTokens = 5;
  const int64_t head_bytes = 2 * ondevice::kKvBlock * (kDim * bits / 8 + (bits == 8 ? 4 : 0));
  ondevice::MappedBuffer memory(static_cast<size_t>(kHeads * head_bytes));
  uint8_t* blocks[] = {memory.data()};
  const std::vector<float> q(kTokens * kHeads * kDim, 0.5f);
  std::vector<float> y(q.size());
  const ondevice::KvView kv{blocks, 0, head_bytes, kHeads, kDim, bits};
  twice("attention", bits, [&] {
    runner.attention({q.data(), kHeads * kDim, kHeads, kv, 0, 0, 0.25f, 0.0f, y.data(), {nullptr, nullptr}},
                     kTokens);
  });
  std::vector<float> qkv(3 * q.size(), 0.5f);
  const ondevice::Norm norm{q.data(), 1e-5f};
  twice("attention from a projection", bits, [&] {
    runner.attend(
        qkv.data(), {{norm, 0}, {norm, 0}, false, q.data(), q.data()},
        {qkv.data(), 3 * kHeads * kDim, kHeads, kv, 0, 0, 0.25f, 0.0f, y.data(), {nullptr, nullptr}},
        kTokens);
  });
  const int32_t parents[kTokens] = {-1, 0, 0, 1, 3}, depths[kTokens] = {0, 1, 1, 2, 3};
  twice("attention in a tree", bits, [&] {
    runner.attention({q.data(), kHeads * kDim, kHeads, kv, 0, 0, 0.25f, 0.0f, y.data(), {parents, depths}},
                     kTokens);
  });
}

// Records on their own and in runs, to slots on the device's blocks and to others.
void records(const ondevice::FileSpec& spec, const char* name, ondevice::IoMode io, bool ring) {
  constexpr size_t kWanted = 300, kDepth = 32, kSlot = ondevice::kStride + 512;
  auto reader =
      std::make_shared<ondevice::FlashReader>(std::vector<ondevice::FileSpec>{spec}, io, kDepth, ring);
  ondevice::RecordBatch batch(reader, true);
  ondevice::MappedBuffer slots(kWanted * kSlot);
  std::vector<int32_t> ids;
  std::vector<uint64_t> targets;
  for (size_t i = 0; i < kWanted; ++i) {
    ids.push_back(static_cast<int32_t>(i < kWanted / 2 ? i : 5 * i));
    targets.push_back(reinterpret_cast<uint64_t>(slots.data()) + i * kSlot + 8 * (i % 2));
  }
  twice(name, 8, [&] {
    batch.start(0, 0, ondevice::kUnits.size(), ids.data(), kWanted, targets.data(), 0);
    batch.finish();
  });
}

}  // namespace

int main(int argc, char** argv) {
  Runner runner(2, "auto");
  for (const int bits : {4, 8, 16}) run(runner, bits);
  for (const int bits : {8, 16}) attention(runner, bits);
  const std::string path = std::string(argc > 1 ? argv[1] : ".") + "/allocations.bin";
  const ondevice::FileSpec spec = ondevice::make_up_file(path, {}).spec;
  records(spec, "records through io_uring", ondevice::IoMode::kDirect, true);
  records(spec, "records on threads", ondevice::IoMode::kDirect, false);
  records(spec, "records from the page cache", ondevice::IoMode::kBuffered, false);
  unlink(path.c_str());
  if (failures) return 1;
  std::printf("allocations: none\n");
  return 0;
}
