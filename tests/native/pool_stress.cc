// Stress of ThreadPool, made to be run under ThreadSanitizer: tiny runs with pauses between them, so that
// workers are met awake, falling asleep and asleep; and bodies that throw.
//
// Exits 1 with a message at the first piece that ran never, twice or after its run was over.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "kernels/thread_pool.h"

using ondevice::ThreadPool;

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "pool_stress: %s\n", what);
  _exit(1);
}

void pause(std::mt19937& random) {
  // Workers spin for 60 microseconds before they sleep.
  const unsigned kind = random() % 8;
  if (kind == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  if (kind == 1) std::this_thread::yield();
}

// Every index is counted once, by plain writes: two threads on one index, or one that comes late, is a race.
void count_once(ThreadPool& pool, std::mt19937& random) {
  const int64_t count = random() % 40, grain = 1 + random() % 5;
  std::vector<int> hits(static_cast<size_t>(count), 0);
  std::vector<int64_t> by_thread(static_cast<size_t>(pool.threads()), 0);
  pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int thread) {
    expect(thread >= 0 && thread < pool.threads(), "a thread number outside the pool");
    expect(begin < end && end <= count, "a piece outside the range");
    for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
    by_thread[static_cast<size_t>(thread)] += end - begin;
  });
  for (const int hit : hits) expect(hit == 1, "an index ran never or twice");
  int64_t done = 0;
  for (const int64_t part : by_thread) done += part;
  expect(done == count, "two threads had one number");
}

// One piece throws while the others, which use this frame, are still at work.
void throw_one(ThreadPool& pool, bool from_caller, std::mt19937& random) {
  const int64_t count = 3 * pool.threads();
  std::vector<int> hits(static_cast<size_t>(count), 0);
  std::atomic<bool> thrown{false};
  std::atomic<int> inside{0};
  const unsigned pause_us = random() % 50;
  bool caught = false;
  try {
    pool.parallel_for(count, 1, [&](int64_t begin, int64_t, int thread) {
      ++inside;
      ++hits[static_cast<size_t>(begin)];
      if ((thread == 0) == from_caller && !thrown.exchange(true)) {
        --inside;
        throw std::bad_alloc();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
      --inside;
    });
  } catch (const std::bad_alloc&) {
    caught = true;
  }
  expect(inside == 0, "run() was left with a worker inside");
  expect(caught == thrown, "an exception was lost or made up");
  for (const int hit : hits) expect(hit <= 1, "an index ran twice");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 4000;
  for (const int threads : {1, 2, 3, 8}) {
    std::mt19937 random(static_cast<unsigned>(threads));
    for (int made = 0; made < 5; ++made) {
      ThreadPool pool(threads);
      for (int round = 0; round < rounds / 20 * (threads == 8 ? 10 : 1); ++round) {
        pause(random);
        count_once(pool, random);
        if (round % 16 == 0) throw_one(pool, round % 32 == 0, random);
      }
    }
  }
  std::printf("pool_stress: passed\n");
  return 0;
}
