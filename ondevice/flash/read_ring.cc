#include "read_ring.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <errno.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#endif

namespace ondevice {

#if defined(__linux__) && __has_include(<linux/io_uring.h>) && defined(IORING_FEAT_EXT_ARG) && \
    defined(__NR_io_uring_setup)
namespace {

constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
constexpr long long kWaitNanoseconds = 1000000;

template <class T>
T* at(void* base, unsigned offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

std::unique_ptr<ReadRing> ReadRing::make(unsigned depth) {
  std::unique_ptr<ReadRing> ring(new ReadRing());
  if (!ring->map(depth)) return nullptr;
  ring->ended_.reserve(depth);
  return ring;
}

bool ReadRing::map(unsigned depth) {
  io_uring_params params;
  memset(&params, 0, sizeof(params));
  params.flags = IORING_SETUP_CLAMP;
  fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
  if (fd_ < 0 || (params.features & kNeeded) != kNeeded || params.sq_entries < depth) return false;
  const size_t submit_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const size_t end_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  rings_bytes_ = submit_bytes > end_bytes ? submit_bytes : end_bytes;
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_SHARED | MAP_POPULATE;
  void* rings = mmap(nullptr, rings_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQ_RING);
  if (rings == MAP_FAILED) return false;
  rings_ = rings;
  void* entries = mmap(nullptr, entries_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQES);
  if (entries == MAP_FAILED) return false;
  entries_ = entries;
  submit_tail_ = at<unsigned>(rings_, params.sq_off.tail);
  submit_array_ = at<unsigned>(rings_, params.sq_off.array);
  submit_mask_ = *at<unsigned>(rings_, params.sq_off.ring_mask);
  end_head_ = at<unsigned>(rings_, params.cq_off.head);
  end_tail_ = at<unsigned>(rings_, params.cq_off.tail);
  end_mask_ = *at<unsigned>(rings_, params.cq_off.ring_mask);
  ends_ = at<void>(rings_, params.cq_off.cqes);
  // A sandbox may allow a ring to be created and refuse its use.
  return syscall(__NR_io_uring_enter, fd_, 0, 0, 0, nullptr, 0) >= 0;
}

ReadRing::~ReadRing() {
  if (entries_) munmap(entries_, entries_bytes_);
  if (rings_) munmap(rings_, rings_bytes_);
  if (fd_ >= 0) close(fd_);
}

void ReadRing::read(int fd, void* out, unsigned nbytes, int64_t offset, uint64_t tag) {
  const unsigned tail = *submit_tail_, index = tail & submit_mask_;
  io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[index];
  memset(&entry, 0, sizeof(entry));
  entry.opcode = IORING_OP_READ;
  entry.fd = fd;
  entry.addr = reinterpret_cast<uint64_t>(out);
  entry.len = nbytes;
  entry.off = static_cast<uint64_t>(offset);
  entry.user_data = tag;
  submit_array_[index] = index;
  __atomic_store_n(submit_tail_, tail + 1, __ATOMIC_RELEASE);
  ++queued_;
}

void ReadRing::wait(unsigned count) {
  if (queued_ == 0 && count == 0) return;
  __kernel_timespec most = {0, kWaitNanoseconds};
  io_uring_getevents_arg argument;
  memset(&argument, 0, sizeof(argument));
  argument.ts = reinterpret_cast<uint64_t>(&most);
  const long begun = syscall(__NR_io_uring_enter, fd_, queued_, count,
                             IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof(argument));
  // Reads that the kernel doesn't take now stay queued for the next call.
  if (begun > 0)
    queued_ -= static_cast<unsigned>(begun);
  else if (begun < 0 && errno != ETIME && errno != EINTR)
    usleep(kWaitNanoseconds / 1000);
}

const std::vector<std::pair<uint64_t, int>>& ReadRing::ended(size_t most) {
  ended_.clear();
  unsigned head = *end_head_;
  const unsigned tail = __atomic_load_n(end_tail_, __ATOMIC_ACQUIRE);
  for (; head != tail && ended_.size() < most; ++head) {
    const io_uring_cqe& end = static_cast<const io_uring_cqe*>(ends_)[head & end_mask_];
    ended_.emplace_back(end.user_data, end.res);
  }
  __atomic_store_n(end_head_, head, __ATOMIC_RELEASE);
  return ended_;
}

#else

std::unique_ptr<ReadRing> ReadRing::make(unsigned) { return nullptr; }
bool ReadRing::map(unsigned) { return false; }
ReadRing::~ReadRing() = default;
void ReadRing::read(int, void*, unsigned, int64_t, uint64_t) {}
void ReadRing::wait(unsigned) {}
const std::vector<std::pair<uint64_t, int>>& ReadRing::ended(size_t) { return ended_; }

#endif

}  // namespace ondevice
