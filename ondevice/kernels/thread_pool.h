// A small persistent pool. Work is split over outputs only, so results don't depend on the split.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ondevice {

class ThreadPool {
 public:
  // threads >= 1 includes the calling thread. Throws std::system_error if the system refuses a thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end, thread) over pieces of [0, count) of at most `grain`; returns when all are done.
  // A thread goes through neighbouring pieces, in order, and then through what is left of other threads':
  // memory that a kernel prefetches behind a piece is then mostly its next piece's.
  // If a body throws, rethrows the first exception once no thread is in a body; some pieces may not have run.
  // One caller at a time.
  template <class Body>
  void parallel_for(int64_t count, int64_t grain, const Body& body) {
    if (count <= 0) return;
    if (workers_.empty() || count <= grain) {
      body(0, count, 0);
      return;
    }
    run(
        count, grain,
        [](const void* context, int64_t begin, int64_t end, int thread) {
          (*static_cast<const Body*>(context))(begin, end, thread);
        },
        &body);
  }

 private:
  using Call = void (*)(const void* context, int64_t begin, int64_t end, int thread);

  void stop();
  void run(int64_t count, int64_t grain, Call call, const void* context);
  void take_pieces(int thread);
  void worker(int thread);
  bool enter(uint64_t* seen);

  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t grain_ = 1;
  // Of each thread, its part of [0, count): what no thread has taken yet.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::unique_ptr<Share[]> shares_;
  // generation << 32 | kOpen | workers inside. A run is over when its gate is closed and no worker is inside.
  // A worker that the system hasn't scheduled yet isn't waited for: it finds the gate closed.
  alignas(64) std::atomic<uint64_t> gate_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
};

}  // namespace ondevice
