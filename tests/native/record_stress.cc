// Stress of RecordBatch, made to be run under ThreadSanitizer: batches that somebody waits for and that are
// read ahead, damage and a file that shrank among their records, closed whenever it hurts most.
//
// Exits 1 with a message at the first wrong byte, missing or wrong error, or write to a target that was left.
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ondevice/flash/record_batch.h"
#include "made_up_files.h"

using namespace ondevice;

namespace {

constexpr uint8_t kUntouched = 0xEE;
constexpr size_t kGuard = 8, kBlock = 512;

// Some records of a file, and a target for each between bytes that nobody may touch.
class Wanted {
 public:
  Wanted(const Files& files, std::mt19937& random)
      : files_(files), file_(random() % 4 == 0), part_(random() % 2), parts_(part_ ? 1 : 1 + random() % 2) {
    const int64_t step = 1 + random() % 40;
    for (int64_t id = random() % kRecords; id < kRecords && ids_.size() < 200; id += 1 + random() % step)
      ids_.push_back(static_cast<int32_t>(id));
    gap_bytes_ = static_cast<int64_t>(random() % 3 * 3000);
    for (size_t part = part_; part < part_ + parts_; ++part) nbytes_ += kUnits[part];
    on_blocks_ = random() % 2;
    stride_ = on_blocks_ ? (nbytes_ + kGuard + kBlock - 1) / kBlock * kBlock : nbytes_ + kGuard;
    rows_.assign(ids_.size() * stride_ + kBlock, kUntouched);
    // All rows begin on a block, or none does: rows of whole eights never come to lie on one from there.
    const size_t beyond = reinterpret_cast<uintptr_t>(rows_.data()) % kBlock;
    first_ = on_blocks_ ? kBlock - beyond : 4;
    for (size_t i = 0; i < ids_.size(); ++i) targets_.push_back(reinterpret_cast<uint64_t>(row(i)));
  }

  void start(RecordBatch& batch) {
    batch.start(file_, part_, parts_, ids_.data(), ids_.size(), targets_.data(), gap_bytes_);
  }

  // After finish(): `error` is what it threw.
  void check(const std::string& error) {
    const auto bad = std::find_if(ids_.begin(), ids_.end(), [&](int64_t id) { return !sound(id); });
    expect(error.empty() == (bad == ids_.end()), "damage went unnoticed, or was made up");
    if (!error.empty() && file_ == 0) {
      const bool first = part_ == 0 && files_.wrong.count(2 * *bad);
      const int64_t offset = kHeader + *bad * kStride + (first ? 0 : static_cast<int64_t>(kUnits[0]));
      expect(error.find(" from " + std::to_string(offset) + " ") != std::string::npos,
             "the error isn't that of the lowest record");
    }
    check_rows(error.empty());
  }

  // A target is whole or untouched, unless it may have been read to straight: then, after an error, it holds
  // anything. What is written here afterwards races with a read that comes late.
  void check_rows(bool all) {
    for (size_t i = 0; i < ids_.size(); ++i) {
      const uint8_t* bytes = row(i);
      const uint8_t* record = files_.data.record(ids_[i]) + (part_ ? kUnits[0] : 0);
      const bool whole = memcmp(bytes, record, nbytes_) == 0;
      expect(whole || (!all && (on_blocks_ || untouched(bytes, nbytes_))),
             "a target is neither whole nor untouched");
      expect(!whole || sound(ids_[i]) || (!all && on_blocks_), "a damaged record was delivered");
      expect(untouched(bytes + nbytes_, kGuard), "bytes behind a target were touched");
    }
    std::fill(rows_.begin(), rows_.end(), uint8_t{0});
  }

  unsigned sum() const {
    unsigned sum = 0;
    for (const uint8_t byte : rows_) sum += byte;
    return sum;
  }

 private:
  uint8_t* row(size_t i) { return rows_.data() + first_ + i * stride_; }
  bool sound(int64_t id) const { return files_.sound(file_, part_, parts_, id); }
  static bool untouched(const uint8_t* bytes, size_t count) {
    return std::all_of(bytes, bytes + count, [](uint8_t byte) { return byte == kUntouched; });
  }

  const Files& files_;
  size_t file_, part_, parts_, nbytes_ = 0, stride_ = 0, first_ = 0;
  bool on_blocks_ = false;
  int64_t gap_bytes_ = 0;
  std::vector<int32_t> ids_;
  std::vector<uint8_t> rows_;
  std::vector<uint64_t> targets_;
};

struct UnderWay {
  std::unique_ptr<RecordBatch> batch;
  std::unique_ptr<Wanted> wanted;
};

void finish(UnderWay& it) {
  std::string error;
  try {
    it.batch->finish();
  } catch (const FlashError& caught) {
    error = caught.what();
  }
  it.wanted->check(error);
  it.wanted.reset();
}

// As a pass over a model does it: two urgent batches and one that is read ahead, in any order; some are
// closed, or destroyed, with their reads under way.
void fetch(const std::shared_ptr<FlashReader>& reader, const Files& files, unsigned seed, int steps) {
  std::mt19937 random(seed);
  UnderWay all[3];
  for (int step = 0; step < steps; ++step) {
    const size_t index = random() % 3;
    UnderWay& it = all[index];
    if (!it.batch) it.batch = std::make_unique<RecordBatch>(reader, index < 2);
    if (!it.wanted) {
      it.wanted = std::make_unique<Wanted>(files, random);
      it.wanted->start(*it.batch);
      expect(throws<std::invalid_argument>([&] { it.wanted->start(*it.batch); }), "two sets under way");
    } else if (random() % 8 == 0) {
      if (random() % 2)
        it.batch.reset();
      else
        it.batch->close();
      it.wanted->check_rows(false);
      if (it.batch) {
        expect(throws<std::invalid_argument>([&] { it.wanted->start(*it.batch); }), "closed, and it starts");
        it.batch.reset();
      }
      it.wanted.reset();
    } else if (index < 2 || it.batch->done() || random() % 4 == 0) {
      finish(it);
    }
  }
  for (UnderWay& it : all)
    if (it.wanted) finish(it);
}

// Closes a batch from two threads at once, or its reader, while its owner starts and finishes.
void close_under_an_owner(const Files& files, bool close_reader, bool ring, unsigned pause_us) {
  auto reader = files.open(IoMode::kAuto, 3, ring);
  std::mt19937 random(pause_us);
  RecordBatch batch(reader, pause_us % 4 < 2);
  Wanted wanted(files, random);
  std::atomic<bool> refused{false};
  std::thread owner([&] {
    while (!refused) {
      try {
        wanted.start(batch);
        batch.finish();
      } catch (const FlashError&) {
      } catch (const std::invalid_argument&) {
        refused = true;
      }
    }
  });
  std::thread watcher([&] {
    while (!refused) {
      (void)batch.done();
      (void)batch.stats();
      std::this_thread::yield();
    }
  });
  auto close_one = [&] {
    usleep(pause_us);
    if (close_reader) return;
    batch.close();
    // Whichever thread closed it may take the targets away: nothing writes there any more.
    expect(batch.done(), "closed, with reads under way");
    (void)wanted.sum();
  };
  std::thread other(close_one);
  close_one();
  if (close_reader) reader->close();
  other.join();
  owner.join();
  watcher.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: record_stress FOLDER [rounds]\n");
    return 2;
  }
  const int rounds = argc > 2 ? atoi(argv[2]) : 3;
  const Files files(std::string(argv[1]) + "/record_stress");
  for (int round = 0; round < rounds; ++round) {
    for (const auto& [io, ring] :
         {std::pair{IoMode::kAuto, false}, {IoMode::kAuto, true}, {IoMode::kBuffered, false}}) {
      auto reader = files.open(io, 4, ring);
      std::atomic<bool> over{false};
      std::vector<std::thread> threads;
      for (unsigned i = 0; i < 3; ++i)
        threads.emplace_back([&, i] { fetch(reader, files, 10 * round + i, 150); });
      std::thread trimmer([&] {
        while (!over) {
          reader->pool().trim();
          (void)reader->pool().staging_bytes();
          (void)reader->pool().stats();
          usleep(200);
        }
      });
      for (std::thread& thread : threads) thread.join();
      over = true;
      trimmer.join();
      reader->pool().trim();
      expect(reader->pool().staging_bytes() == 0, "staging buffers leaked");
    }
    for (unsigned i = 0; i < 60; ++i) close_under_an_owner(files, i % 4 == 3, i % 8 < 4, 40 * i);
  }
  printf("record_stress: passed%s\n", files.io_uring ? "" : ", without io_uring, which this system lacks");
  return 0;
}
