#include "faulty_ring.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "faults.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

namespace faults {

#if defined(IORING_FEAT_EXT_ARG)
namespace {

constexpr int kMaxFd = 4096;
std::atomic<FaultyRing*> rings[kMaxFd];

template <class... Values>
long call(long number, Values... values) {
  return real<long (*)(long, ...)>("syscall")(number, values...);
}

int64_t now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000} * now.tv_sec + now.tv_nsec / 1000000;
}

// The memory of a ring, the system's or the process's: both have the same layout.
struct Rings {
  io_uring_params params = {};
  char* memory = nullptr;
  io_uring_sqe* entries = nullptr;
  int fd = -1;

  size_t nbytes() const {
    return std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  }
  size_t entries_bytes() const { return params.sq_entries * sizeof(io_uring_sqe); }

  bool map() {
    constexpr int kProtection = PROT_READ | PROT_WRITE;
    void* both = mmap(nullptr, nbytes(), kProtection, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    if (both != MAP_FAILED) memory = static_cast<char*>(both);
    void* array = mmap(nullptr, entries_bytes(), kProtection, MAP_SHARED, fd, IORING_OFF_SQES);
    if (array != MAP_FAILED) entries = static_cast<io_uring_sqe*>(array);
    return memory && entries;
  }
  ~Rings() {
    if (memory) munmap(memory, nbytes());
    if (entries) munmap(entries, entries_bytes());
  }

  uint32_t* word(uint32_t offset) { return reinterpret_cast<uint32_t*>(memory + offset); }
  uint32_t* index(uint32_t place) { return word(params.sq_off.array) + (place & (params.sq_entries - 1)); }
  io_uring_cqe* end(uint32_t place) {
    return reinterpret_cast<io_uring_cqe*>(memory + params.cq_off.cqes) + (place & (params.cq_entries - 1));
  }
};

uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

struct UnderWay {
  io_uring_sqe entry;
  uint32_t times_cancelled;
};

struct HeldUp {
  io_uring_sqe entry;
  int64_t until_ms;
};

}  // namespace

struct RingState {
  Rings own, system;
  unsigned queued = 0;  // in the system's ring, not yet taken by it
  std::unordered_map<uint64_t, UnderWay> under_way;
  std::vector<HeldUp> held_up;

  bool make(unsigned depth, io_uring_params* params);
  unsigned take(unsigned most);
  void begin(io_uring_sqe entry);
  void queue(const io_uring_sqe& entry);
  void queue_what_is_due();
  void bring_back();
  void end(uint64_t tag, int result);
  uint32_t waiting() { return *own.word(own.params.cq_off.tail) - load(own.word(own.params.cq_off.head)); }

  ~RingState() {
    if (system.fd >= 0) ::close(system.fd);
  }
};

bool RingState::make(unsigned depth, io_uring_params* params) {
  system.fd = static_cast<int>(call(SYS_io_uring_setup, depth, params));
  if (system.fd < 0) return false;
  own.params = system.params = *params;
  if (!(params->features & IORING_FEAT_SINGLE_MMAP) || !system.map()) return false;
  own.fd = memfd_create("io_uring", MFD_CLOEXEC);
  const auto nbytes = static_cast<off_t>(IORING_OFF_SQES + own.entries_bytes());
  if (own.fd < 0 || own.fd >= kMaxFd || ftruncate(own.fd, nbytes) != 0 || !own.map()) return false;
  for (const auto& [ring_mask, entries, count] :
       {std::tuple{params->sq_off.ring_mask, params->sq_off.ring_entries, params->sq_entries},
        {params->cq_off.ring_mask, params->cq_off.ring_entries, params->cq_entries}}) {
    *own.word(ring_mask) = count - 1;
    *own.word(entries) = count;
  }
  return true;
}

// Takes what the process has queued. The call may be interrupted before all of it, or any, is taken.
unsigned RingState::take(unsigned most) {
  uint32_t* head = own.word(own.params.sq_off.head);
  most = std::min(most, load(own.word(own.params.sq_off.tail)) - *head);
  if (most > 0 && is_marked(own.entries[*own.index(*head)].fd) && hit(kInterrupt, kRing))
    most = draw() % most;
  for (unsigned i = 0; i < most; ++i) begin(own.entries[*own.index(*head + i)]);
  store(head, *head + most);
  return most;
}

void RingState::begin(io_uring_sqe entry) {
  if (!under_way.emplace(entry.user_data, UnderWay{entry, times_cancelled()}).second) abort();
  if (entry.opcode != IORING_OP_READ || !is_marked(entry.fd)) return queue(entry);
  const void* out = reinterpret_cast<const void*>(entry.addr);
  if (is_misaligned(entry.fd, out, entry.len, entry.off)) return end(entry.user_data, -EINVAL);
  if (hit(kInterrupt, kRing)) return end(entry.user_data, -EINTR);
  if (hit(kError, kRing)) return end(entry.user_data, -EIO);
  if (hit(kEnd, kRing)) {
    constexpr uint64_t kPage = 4096;
    struct stat status;
    if (fstat(entry.fd, &status) != 0) abort();
    entry.off = (static_cast<uint64_t>(status.st_size) + kPage - 1) / kPage * kPage;
  }
  const auto block = static_cast<uint32_t>(short_block(entry.fd));
  if (entry.len > block && hit(kShort, kRing)) entry.len = block * (1 + draw() % ((entry.len - 1) / block));
  if (const long ms = held_ms(kRing))
    held_up.push_back({entry, now_ms() + ms});
  else
    queue(entry);
}

void RingState::queue(const io_uring_sqe& entry) {
  uint32_t* tail = system.word(system.params.sq_off.tail);
  if (*tail - load(system.word(system.params.sq_off.head)) == system.params.sq_entries) abort();
  *system.index(*tail) = *tail & (system.params.sq_entries - 1);
  system.entries[*system.index(*tail)] = entry;
  store(tail, *tail + 1);
  ++queued;
}

void RingState::queue_what_is_due() {
  const int64_t now = now_ms();
  const auto due = std::stable_partition(held_up.begin(), held_up.end(),
                                         [&](const HeldUp& held) { return held.until_ms > now; });
  for (auto held = due; held != held_up.end(); ++held) queue(held->entry);
  held_up.erase(due, held_up.end());
}

void RingState::bring_back() {
  uint32_t* head = system.word(system.params.cq_off.head);
  for (const uint32_t tail = load(system.word(system.params.cq_off.tail)); *head != tail;) {
    const io_uring_cqe ended = *system.end(*head);
    store(head, *head + 1);
    const UnderWay& read = under_way.at(ended.user_data);
    if (is_marked(read.entry.fd)) {
      if (ended.res > 0 && hit(kDamage, kRing))
        damage(reinterpret_cast<void*>(read.entry.addr), static_cast<size_t>(ended.res));
      count_late(kRing, read.times_cancelled);
    }
    end(ended.user_data, ended.res);
  }
}

// Tells the process that a read has ended.
void RingState::end(uint64_t tag, int result) {
  if (waiting() == own.params.cq_entries) abort();
  uint32_t* tail = own.word(own.params.cq_off.tail);
  io_uring_cqe* ended = own.end(*tail);
  ended->user_data = tag;
  ended->res = result;
  ended->flags = 0;
  store(tail, *tail + 1);
  under_way.erase(tag);
}

FaultyRing::FaultyRing(std::unique_ptr<RingState> state) : state_(std::move(state)) {}
FaultyRing::~FaultyRing() = default;

int FaultyRing::setup(unsigned entries, void* params) {
  auto state = std::make_unique<RingState>();
  if (!state->make(entries, static_cast<io_uring_params*>(params))) {
    const int before = errno;
    if (state->own.fd >= 0) ::close(state->own.fd);
    state.reset();
    errno = before;
    return -1;
  }
  const int fd = state->own.fd;
  rings[fd] = new FaultyRing(std::move(state));
  return fd;
}

FaultyRing* FaultyRing::of(int fd) { return fd >= 0 && fd < kMaxFd ? rings[fd].load() : nullptr; }

void FaultyRing::close(int fd) {
  FaultyRing* ring = of(fd);
  if (!ring) return;
  if (!ring->state_->under_way.empty()) abort();
  rings[fd] = nullptr;
  delete ring;
}

int FaultyRing::enter(unsigned to_submit, unsigned min_complete, unsigned flags, void* argument,
                      size_t argument_bytes) {
  const unsigned taken = state_->take(to_submit);
  if (taken == 0 && to_submit > 0) {
    errno = draw() % 2 ? EINTR : EAGAIN;
    return -1;
  }
  state_->queue_what_is_due();
  // As the system does: it doesn't wait if it hasn't taken all, and counts what the process left in its ring.
  const unsigned waiting = taken < to_submit ? min_complete : state_->waiting();
  const unsigned awaited = min_complete > waiting ? min_complete - waiting : 0;
  const long begun =
      call(SYS_io_uring_enter, state_->system.fd, state_->queued, awaited, flags, argument, argument_bytes);
  const int error = errno;
  if (begun > 0) state_->queued -= static_cast<unsigned>(begun);
  state_->bring_back();
  if (taken > 0 || begun >= 0) return static_cast<int>(taken);
  errno = error;
  return -1;
}

#else

struct RingState {};

FaultyRing::FaultyRing(std::unique_ptr<RingState> state) : state_(std::move(state)) {}
FaultyRing::~FaultyRing() = default;

int FaultyRing::setup(unsigned, void*) {
  errno = ENOSYS;
  return -1;
}
FaultyRing* FaultyRing::of(int) { return nullptr; }
void FaultyRing::close(int) {}
int FaultyRing::enter(unsigned, unsigned, unsigned, void*, size_t) { return -1; }

#endif

}  // namespace faults
