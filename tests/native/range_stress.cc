// Stress of RangeReads, made to be run under ThreadSanitizer: several ranges under way, damage and a file
// that shrank among them, cancelled, closed and destroyed with their reads under way.
//
// Exits 1 with a message at the first wrong byte, missing or wrong error, or write to memory that was left.
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ondevice/flash/range_reads.h"
#include "../../ondevice/kernels/mapped_buffer.h"
#include "made_up_files.h"

using namespace ondevice;

namespace {

constexpr uint8_t kUntouched = 0xEE;
constexpr int64_t kAllUnits = 2 * kRecords;

int64_t unit_begin(int64_t unit) {
  return kHeader + unit / 2 * kStride + unit % 2 * static_cast<int64_t>(kUnits[0]);
}

// Whole units of a file, and memory for them between two pages that nobody may touch.
class Wanted {
 public:
  Wanted(const Files& files, std::mt19937& random)
      : files_(files), file_(random() % 2), first_(random() % kAllUnits) {
    const int64_t most = random() % 4 ? 150 : kAllUnits;  // one piece mostly, up to five else
    last_ = std::min<int64_t>(first_ + 1 + random() % most, kAllUnits);
    begin_ = unit_begin(first_);
    nbytes_ = unit_begin(last_) - begin_;
    pages_ = MappedBuffer(static_cast<size_t>(page_up(begin_ + nbytes_) - page_down(begin_) + 2 * kPage));
    std::fill(pages_.data(), pages_.data() + pages_.size(), kUntouched);
  }

  uint64_t begin(RangeReads& reads, bool ahead = false) {
    return reads.begin(file_, begin_, nbytes_, target(), ahead);
  }

  // What begin() must refuse, whatever is under way.
  void expect_refusals(RangeReads& reads) {
    const uint64_t to = target();
    expect(throws<std::out_of_range>([&] { reads.begin(2, begin_, nbytes_, to); }), "no third file");
    expect(throws<std::out_of_range>([&] { reads.begin(file_, begin_, 0, to); }), "no bytes");
    expect(throws<std::out_of_range>([&] { reads.begin(file_, begin_, kAllUnits * kStride, to); }),
           "bytes beyond the end");
    expect(throws<std::invalid_argument>([&] { reads.begin(file_, begin_, nbytes_ - 1, to); }),
           "half a unit at the end");
    expect(throws<std::invalid_argument>([&] { reads.begin(file_, begin_ + 1, nbytes_ - 1, to + 1); }),
           "half a unit at the begin");
    expect(throws<std::invalid_argument>([&] { reads.begin(file_, begin_, nbytes_, to + 512); }),
           "a target elsewhere in its page");
  }

  // After wait(): `error` is what it threw.
  void check(const std::string& error) const {
    expect(error.empty() == sound(), "damage went unnoticed, or was made up");
    const std::string& path = file_ ? files_.shrinking : files_.whole;
    expect(error.empty() || error.compare(0, path.size(), path) == 0, "the error names another file");
    if (error.empty())
      expect(memcmp(first_byte(), files_.data.bytes.data() + begin_, static_cast<size_t>(nbytes_)) == 0,
             "a range's bytes are wrong");
    check_guards();
  }

  // What is written here afterwards races with a read that comes late.
  void leave() {
    check_guards();
    std::fill(pages_.data(), pages_.data() + pages_.size(), uint8_t{0});
  }

  unsigned sum() const {
    unsigned sum = 0;
    for (size_t i = 0; i < pages_.size(); ++i) sum += pages_.data()[i];
    return sum;
  }

 private:
  uint8_t* first_byte() const { return pages_.data() + kPage + (begin_ - page_down(begin_)); }
  uint64_t target() const { return reinterpret_cast<uint64_t>(first_byte()); }

  bool sound() const {
    if (file_ == 1) return begin_ + nbytes_ <= kHeader + kLeft * kStride;
    const auto next_wrong = files_.wrong.lower_bound(first_);
    return next_wrong == files_.wrong.end() || *next_wrong >= last_;
  }

  void check_guards() const {
    const uint8_t* pages = pages_.data();
    for (const uint8_t* page : {pages, pages + pages_.size() - kPage})
      expect(std::all_of(page, page + kPage, [](uint8_t byte) { return byte == kUntouched; }),
             "bytes beside a range's pages were touched");
  }

  const Files& files_;
  size_t file_;
  int64_t first_, last_, begin_ = 0, nbytes_ = 0;  // units; bytes
  MappedBuffer pages_;
};

struct UnderWay {
  uint64_t ticket;
  std::unique_ptr<Wanted> wanted;
};

void wait_for(RangeReads& reads, std::deque<UnderWay>& all, size_t index) {
  std::string error;
  try {
    reads.wait(all[index].ticket);
  } catch (const FlashError& caught) {
    error = caught.what();
    expect(!error.empty(), "an error that says nothing");
  }
  expect(throws<std::invalid_argument>([&] { reads.wait(all[index].ticket); }), "a ticket was used twice");
  all[index].wanted->check(error);
  all[index].wanted->leave();
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(index));
}

void drop(RangeReads& reads, std::deque<UnderWay>& all, size_t index) {
  expect(throws<std::invalid_argument>([&] { reads.drop(all[index].ticket); }), "a ticket outlived drop()");
  all[index].wanted->leave();
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(index));
}

// As a pass over a model does it: up to six ranges under way, mostly waited for in order; some are begun
// ahead, hurried, dropped, cancelled, closed or destroyed with their reads under way.
void fetch(const std::shared_ptr<FlashReader>& reader, const Files& files, unsigned seed, int steps) {
  std::mt19937 random(seed);
  auto reads = std::make_unique<RangeReads>(reader);
  std::deque<UnderWay> all;
  for (int step = 0; step < steps; ++step) {
    const unsigned kind = random() % 16;
    if (kind == 0) {
      if (random() % 2) {
        reads->cancel();
        for (const UnderWay& it : all)
          expect(throws<std::invalid_argument>([&] { reads->wait(it.ticket); }),
                 "a ticket outlived cancel()");
      } else {
        if (random() % 2) {
          reads->close();
          Wanted wanted(files, random);
          expect(throws<std::invalid_argument>([&] { wanted.begin(*reads); }), "closed, and it begins");
        }
        reads = std::make_unique<RangeReads>(reader);  // the old one is destroyed
      }
      for (UnderWay& it : all) it.wanted->leave();
      all.clear();
    } else if (kind == 1) {
      Wanted(files, random).expect_refusals(*reads);
    } else if (all.size() < 6 && kind < 9) {
      auto wanted = std::make_unique<Wanted>(files, random);
      const uint64_t ticket = wanted->begin(*reads, random() % 3 == 0);
      all.push_back({ticket, std::move(wanted)});
    } else if (!all.empty() && kind < 12) {
      const size_t index = random() % all.size();
      if (kind == 9)
        reads->hurry(all[index].ticket);
      else if (kind == 10)
        reads->arrived(all[index].ticket);
      else if (reads->drop(all[index].ticket))
        drop(*reads, all, index);
    } else if (!all.empty()) {
      wait_for(*reads, all, random() % 4 ? 0 : random() % all.size());
    }
  }
  while (!all.empty()) wait_for(*reads, all, 0);
}

// Closes the reads from two threads at once, or their reader, while their owner begins and waits.
void close_under_an_owner(const Files& files, bool close_reader, bool ring, unsigned pause_us) {
  auto reader = files.open(IoMode::kAuto, 2, ring);
  std::mt19937 random(pause_us);
  RangeReads reads(reader);
  std::deque<UnderWay> all;
  for (int i = 0; i < 5; ++i) all.push_back({0, std::make_unique<Wanted>(files, random)});
  std::thread owner([&] {
    for (bool refused = false; !refused;) {
      try {
        for (UnderWay& it : all) it.ticket = it.wanted->begin(reads);
        for (UnderWay& it : all) {
          try {
            reads.wait(it.ticket);
          } catch (const FlashError&) {
          }
        }
      } catch (const std::invalid_argument&) {
        refused = true;
      }
    }
    // Whatever refused it, nothing writes to the memory once cancel() has returned.
    reads.cancel();
    for (const UnderWay& it : all) (void)it.wanted->sum();
  });
  auto close_one = [&] {
    usleep(pause_us);
    if (close_reader)
      reader->close();
    else
      reads.close();
    for (const UnderWay& it : all) (void)it.wanted->sum();
  };
  std::thread other(close_one);
  close_one();
  other.join();
  owner.join();
  for (UnderWay& it : all) it.wanted->leave();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: range_stress FOLDER [rounds]\n");
    return 2;
  }
  const int rounds = argc > 2 ? atoi(argv[2]) : 3;
  const Files files(std::string(argv[1]) + "/range_stress");
  for (int round = 0; round < rounds; ++round) {
    for (const auto& [io, ring] :
         {std::pair{IoMode::kAuto, false}, {IoMode::kAuto, true}, {IoMode::kBuffered, false}}) {
      auto reader = files.open(io, 4, ring);
      std::vector<std::thread> threads;
      for (unsigned i = 0; i < 3; ++i)
        threads.emplace_back([&, i] { fetch(reader, files, 10 * round + i, 150); });
      for (std::thread& thread : threads) thread.join();
    }
    for (unsigned i = 0; i < 60; ++i) close_under_an_owner(files, i % 4 == 3, i % 8 < 4, 40 * i);
  }
  printf("range_stress: passed%s\n", files.io_uring ? "" : ", without io_uring, which this system lacks");
  return 0;
}
