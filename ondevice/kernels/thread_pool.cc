#include "thread_pool.h"

#include <chrono>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ondevice {
namespace {

// How long a worker waits before it sleeps. It bridges the Python code between two kernels: waking a sleeping
// thread costs more, above all under a hypervisor. It spins at first, then yields its core to other threads,
// such as those that read flash, and then sleeps.
constexpr auto kSpin = std::chrono::microseconds(60), kYield = std::chrono::microseconds(500);

constexpr uint64_t kOpen = uint64_t{1} << 31;

bool open_to(uint64_t gate, uint64_t seen) { return (gate & kOpen) && gate >> 32 != seen; }

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : shares_(new Share[static_cast<size_t>(threads)]) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { worker(i); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
}

// An exception is kept for run() to throw: nothing would catch it in a worker, and the caller must not return
// while a worker is inside.
void ThreadPool::take_pieces(int thread) {
  try {
    for (int i = 0; i < threads(); ++i) {
      Share& share = shares_[static_cast<size_t>((thread + i) % threads())];
      for (;;) {
        const int64_t begin = share.next.fetch_add(grain_, std::memory_order_relaxed);
        if (begin >= share.end) break;
        call_(context_, begin, begin + grain_ < share.end ? begin + grain_ : share.end, thread);
      }
    }
  } catch (...) {
    for (int i = 0; i < threads(); ++i) shares_[static_cast<size_t>(i)].next.store(INT64_MAX / 2);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::run(int64_t count, int64_t grain, Call call, const void* context) {
  call_ = call;
  context_ = context;
  grain_ = grain;
  const int64_t pieces = (count + grain - 1) / grain;
  for (int64_t i = 0, begin = 0; i < threads(); ++i) {
    Share& share = shares_[static_cast<size_t>(i)];
    const int64_t end = pieces * (i + 1) / threads() * grain;
    share.next.store(begin, std::memory_order_relaxed);
    share.end = end < count ? end : count;
    begin = end;
  }
  // The 32-bit generation wraps. No worker sleeps through 2^32 runs without entering one.
  gate_.store(((gate_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | kOpen);
  if (sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  take_pieces(0);
  uint64_t gate = gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; gate & (kOpen - 1); ++spins) {
    relax();
    if (spins > 4096) std::this_thread::yield();
    gate = gate_.load(std::memory_order_acquire);
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Joins the run under way, unless it is over or the worker has already been in it.
bool ThreadPool::enter(uint64_t* seen) {
  uint64_t gate = gate_.load(std::memory_order_acquire);
  while (open_to(gate, *seen))
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
      *seen = gate >> 32;
      return true;
    }
  return false;
}

void ThreadPool::worker(int thread) {
  uint64_t seen = 0;
  while (!stop_.load()) {
    const auto since = std::chrono::steady_clock::now();
    int spins = 0;
    while (!stop_.load(std::memory_order_relaxed) && !enter(&seen)) {
      relax();
      if (++spins % 64) continue;
      const auto spun = std::chrono::steady_clock::now() - since;
      if (spun < kSpin) continue;
      if (spun < kYield) {
        std::this_thread::yield();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return open_to(gate_.load(), seen) || stop_.load(); });
      sleeping_.fetch_sub(1);
    }
    if (stop_.load()) return;
    take_pieces(thread);
    gate_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace ondevice
