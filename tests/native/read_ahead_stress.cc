// Stress of FlashReader and ReadAhead from many threads, made to be run under ThreadSanitizer.
//
//   c++ -std=c++17 -O1 -g -fsanitize=thread -pthread tests/native/read_ahead_stress.cc
//   ondevice/flash/crc32c.cc
//       ondevice/flash/flash_file.cc ondevice/flash/read_pool.cc ondevice/flash/flash_reader.cc
//       ondevice/flash/read_ahead.cc ondevice/kernels/mapped_buffer.cc -o read_ahead_stress &&
//       ./read_ahead_stress FOLDER [rounds]
//
// Exits 1 with a message at the first wrong byte, missing error or wrong refusal.
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../ondevice/flash/flash_reader.h"
#include "../../ondevice/flash/read_ahead.h"
#include "made_up_file.h"

using namespace ondevice;

namespace {

// Extent number kDamaged of the file differs from its checksums.
constexpr int64_t kPerExtent = 100, kExtents = kRecords / kPerExtent, kDamaged = 7;

std::vector<Extent> make_extents(const std::vector<int64_t>& order) {
  std::vector<Extent> extents;
  for (const int64_t i : order)
    extents.push_back({0, kHeader + i * kPerExtent * kStride, kPerExtent * kStride});
  return extents;
}

std::vector<int64_t> all_extents() {
  std::vector<int64_t> order(kExtents);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

constexpr size_t kSlotBytes = kPerExtent * kStride + 2 * 4096;  // what a page begins or ends with included

// The schedule: extents of the file in some order, some of them twice or not at all.
std::vector<int64_t> shuffled(std::mt19937& random) {
  std::vector<int64_t> order;
  for (size_t i = 0, n = 1 + random() % kExtents; i < n; ++i)
    order.push_back(static_cast<int64_t>(random() % kExtents));
  return order;
}

// Consumes with random holds, rewinds and other schedules; every extent must be the schedule's next.
void consume(const std::shared_ptr<FlashReader>& reader, const MadeUpFile& data, unsigned seed, int steps) {
  std::mt19937 random(seed);
  std::vector<int64_t> order = all_extents();
  const size_t slots = 2 + random() % 4;
  ReadAhead ahead(reader, make_extents(order), kSlotBytes, slots, true);
  size_t at = 0, held = 0;
  for (int step = 0; step < steps; ++step) {
    if (order[at] == kDamaged) {
      expect(throws<FlashError>([&] { ahead.next(); }), "damage went unnoticed");
    } else {
      ReadAhead::View view = ahead.next();
      expect(view.nbytes == kPerExtent * kStride, "an extent of the wrong size");
      expect(memcmp(view.data, data.record(order[at] * kPerExtent), view.nbytes) == 0,
             "an extent's bytes are wrong");
      ++held;
    }
    at = (at + 1) % order.size();
    // Failed extents behind a held one fill the ring too; hold one less than the ring allows.
    while (held > 0 && (held + 2 > slots - 1 || random() % 2)) {
      ahead.release();
      --held;
    }
    if (random() % 23 == 0) {
      ahead.rewind();
      at = held = 0;
    }
    if (random() % 11 == 0) {
      order = shuffled(random);
      ahead.reschedule(make_extents(order));
      at = held = 0;
    }
    (void)ahead.stats();
  }
}

void read_records(const std::shared_ptr<FlashReader>& reader, const MadeUpFile& data, unsigned seed,
                  int steps) {
  std::mt19937 random(seed);
  for (int step = 0; step < steps; ++step) {
    std::vector<int64_t> ids;
    for (size_t i = 0, n = 1 + random() % 50; i < n; ++i) {
      int64_t id = static_cast<int64_t>(random() % kRecords);
      if (id / kPerExtent != kDamaged) ids.push_back(id);
    }
    std::vector<uint8_t> rows(ids.size() * kStride);
    reader->read_records(0, ids.data(), ids.size(), rows.data());
    for (size_t i = 0; i < ids.size(); ++i)
      expect(memcmp(rows.data() + i * kStride, data.record(ids[i]), kStride) == 0,
             "a record's bytes are wrong");
    (void)reader->pool().stats();
  }
}

constexpr size_t kClosedSlots = 3;

// Closes the read-ahead, or its reader, while another thread consumes and reschedules.
void close_under_a_consumer(const MadeUpFile& data, bool close_reader, unsigned pause_us) {
  auto reader = std::make_shared<FlashReader>(std::vector<FileSpec>{data.spec}, IoMode::kAuto, 3, false);
  ReadAhead ahead(reader, make_extents(all_extents()), kSlotBytes, kClosedSlots, true);
  std::atomic<bool> refused{false};
  std::thread consumer([&] {
    std::mt19937 random(pause_us);
    while (!refused) {
      try {
        if (random() % 4 == 0) ahead.reschedule(make_extents(shuffled(random)));
        ReadAhead::View view = ahead.next();
        expect(view.data >= view.owner.get() &&
                   view.data + view.nbytes <= view.owner.get() + kClosedSlots * (kSlotBytes + kPage),
               "a view outside its owner");
        ahead.release();
      } catch (const FlashError&) {
      } catch (const std::invalid_argument&) {
        refused = true;
      }
    }
  });
  usleep(pause_us);
  if (close_reader)
    reader->close();
  else
    ahead.close();
  consumer.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: read_ahead_stress FOLDER [rounds]\n");
    return 2;
  }
  const int rounds = argc > 2 ? atoi(argv[2]) : 3;
  const std::string path = std::string(argv[1]) + "/read_ahead_stress.bin";
  const MadeUpFile data = make_up_file(path, {2 * kDamaged * kPerExtent + 5});
  for (int round = 0; round < rounds; ++round) {
    for (IoMode io : {IoMode::kAuto, IoMode::kBuffered}) {
      auto reader = std::make_shared<FlashReader>(std::vector<FileSpec>{data.spec}, io, 4, false);
      std::vector<std::thread> threads;
      for (unsigned i = 0; i < 3; ++i)
        threads.emplace_back([&, i] { consume(reader, data, 10 * round + i, 150); });
      for (unsigned i = 0; i < 2; ++i)
        threads.emplace_back([&, i] { read_records(reader, data, 100 * round + i, 50); });
      for (std::thread& thread : threads) thread.join();
    }
    for (unsigned i = 0; i < 10; ++i) close_under_a_consumer(data, i % 2 == 1, 300 * i);
  }
  unlink(path.c_str());
  printf("read_ahead_stress: passed\n");
  return 0;
}
