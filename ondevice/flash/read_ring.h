// Reads through Linux's io_uring: one thread keeps many under way, with one system call for several of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace ondevice {

// Used by one thread at a time.
class ReadRing {
 public:
  // For up to `depth` reads under way. Null if the system lacks io_uring or forbids it.
  static std::unique_ptr<ReadRing> make(unsigned depth);
  ~ReadRing();
  ReadRing(const ReadRing&) = delete;
  ReadRing& operator=(const ReadRing&) = delete;

  // Queues a read, to be begun by wait(). At most `depth` may be queued and under way.
  void read(int fd, void* out, unsigned nbytes, int64_t offset, uint64_t tag);
  // Begins what is queued. Then waits until `count` reads have ended, but at most a millisecond.
  void wait(unsigned count);
  // (tag, bytes read or a negative errno) of at most `most` reads that have ended since the last call.
  const std::vector<std::pair<uint64_t, int>>& ended(size_t most);

 private:
  ReadRing() = default;
  bool map(unsigned depth);

  int fd_ = -1;
  void* rings_ = nullptr;
  void* entries_ = nullptr;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  unsigned *submit_tail_ = nullptr, *submit_array_ = nullptr, *end_head_ = nullptr, *end_tail_ = nullptr;
  unsigned submit_mask_ = 0, end_mask_ = 0, queued_ = 0;
  void* ends_ = nullptr;
  std::vector<std::pair<uint64_t, int>> ended_;
};

}  // namespace ondevice
