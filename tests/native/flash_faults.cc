// Preloaded into a test's process, so that reads of files fail, come short, stall or bring other bytes
// (Linux), by pread and through io_uring.
//
// FLASH_FAULT_FILES: the files it is about, *.flash if it isn't set. FLASH_FAULT_LOG: gains a byte per fault.
// Faults of one kind all along:
//   FLASH_FAULT: refuse_open, refuse_read (direct reads), eintr, eio, end, short, stall, damage.
//   FLASH_FAULT_EVERY: about one call in so many is hit. FLASH_FAULT_STALL_MS: how long a stall lasts.
//   FLASH_FAULT_OFF: nothing happens while a file of this name exists.
// Or, changing while the process runs:
//   FLASH_FAULT_TABLE: a file of a Table, which the test maps too.
// FLASH_FAULT_BLOCK: what direct reads must be aligned to, 4096 if it isn't set.
// FLASH_FAULT_RING: the system has io_uring, and its reads are hit `also`, or `only` they are. If this isn't
// set, the system has none.
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "faults.h"
#include "faulty_ring.h"

using namespace faults;

namespace {

constexpr int kMaxFd = 4096;
std::atomic<bool> marked[kMaxFd], direct[kMaxFd];
std::atomic<uint32_t> calls;

const char* const kNames[kKinds] = {"eintr", "eio", "end", "short", "stall", "", "damage"};

// fault_rounds.py has the same.
struct Table {
  struct {
    std::atomic<uint32_t> every;  // about one call in so many is hit, none for 0,
    std::atomic<int32_t> left;    // as long as there are any left.
    std::atomic<uint32_t> done[kWays];
  } kinds[kKinds];
  std::atomic<uint32_t> seed, draws;
  std::atomic<uint32_t> cancelled;    // raised by the test when it has lost interest in the reads under way
  std::atomic<uint32_t> late[kWays];  // reads that came back after that
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Table) == 4 * (4 * kKinds + 5));

const char* setting(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

uint32_t block_bytes() {
  static const uint32_t bytes =
      *setting("FLASH_FAULT_BLOCK") ? static_cast<uint32_t>(atol(setting("FLASH_FAULT_BLOCK"))) : 4096;
  return bytes;
}

int log_fd() {
  static const int fd = open(setting("FLASH_FAULT_LOG"), O_WRONLY | O_APPEND | O_CLOEXEC);
  return fd;
}

// What a test asks for to know that it tested something.
void log_fault() {
  const int before = errno;
  if (write(log_fd(), "x", 1) != 1) abort();
  errno = before;
}

Table* map_table() {
  if (*setting("FLASH_FAULT_TABLE") == 0) return nullptr;
  log_fd();  // opened now: a test counts open files before the first fault and after it
  const int fd = open(setting("FLASH_FAULT_TABLE"), O_RDWR | O_CLOEXEC);
  void* memory = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) abort();
  close(fd);
  return static_cast<Table*>(memory);
}

Table* table() {
  static Table* const mapped = map_table();
  return mapped;
}

bool fault_is(const char* name) {
  static const char* fault = setting("FLASH_FAULT");
  static const char* off = setting("FLASH_FAULT_OFF");
  return strcmp(fault, name) == 0 && (*off == 0 || access(off, F_OK) != 0);
}

bool hit_by_table(Kind kind, Way way) {
  auto& fault = table()->kinds[kind];
  const uint32_t every = fault.every;
  if (every == 0 || fault.left <= 0 || draw() % every != 0 || fault.left.fetch_sub(1) <= 0) return false;
  ++fault.done[way];
  log_fault();
  return true;
}

bool has_ring(const char* which = nullptr) {
  static const char* const ring = setting("FLASH_FAULT_RING");
  return *ring && (!which || strcmp(ring, which) == 0);
}

int open_with(const char* symbol, const char* path, int flags, mode_t mode) {
  const char* files = *setting("FLASH_FAULT_FILES") ? setting("FLASH_FAULT_FILES") : "*.flash";
  const bool ours = fnmatch(files, path, 0) == 0 && (flags & O_ACCMODE) == O_RDONLY;
  if (ours && (flags & O_DIRECT) && fault_is("refuse_open")) {
    log_fault();
    errno = EINVAL;
    return -1;
  }
  int fd = real<int (*)(const char*, int, mode_t)>(symbol)(path, flags, mode);
  if (fd >= 0 && fd < kMaxFd) {
    marked[fd] = ours;
    direct[fd] = (flags & O_DIRECT) != 0;
  }
  return fd;
}

void pause_ms(long ms) {
  timespec pause = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&pause, nullptr);
}

ssize_t pread_with(const char* symbol, int fd, void* out, size_t nbytes, off_t offset) {
  auto next = real<ssize_t (*)(int, void*, size_t, off_t)>(symbol);
  if (!is_marked(fd)) return next(fd, out, nbytes, offset);
  if (direct[fd] && fault_is("refuse_read")) {
    log_fault();
    errno = EINVAL;
    return -1;
  }
  if (is_misaligned(fd, out, nbytes, static_cast<uint64_t>(offset))) {
    errno = EINVAL;
    return -1;
  }
  if (hit(kInterrupt, kPread)) {
    errno = EINTR;
    return -1;
  }
  if (hit(kError, kPread)) {
    errno = EIO;
    return -1;
  }
  if (hit(kEnd, kPread)) return 0;
  const uint32_t cancelled = times_cancelled();
  if (const long ms = held_ms(kPread)) pause_ms(ms);
  const size_t block = short_block(fd);
  if (nbytes > block && hit(kShort, kPread)) nbytes = block * (1 + draw() % ((nbytes - 1) / block));
  const ssize_t got = next(fd, out, nbytes, offset);
  if (got > 0 && hit(kDamage, kPread)) damage(out, static_cast<size_t>(got));
  count_late(kPread, cancelled);
  return got;
}

}  // namespace

namespace faults {

bool hit(Kind kind, Way way) {
  if (way == kPread && has_ring("only")) return false;
  if (table()) return hit_by_table(kind, way);
  if (*kNames[kind] == 0 || !fault_is(kNames[kind])) return false;
  static const uint32_t every = static_cast<uint32_t>(atoi(setting("FLASH_FAULT_EVERY")));
  if (every == 0 || draw() % every != 0) return false;
  log_fault();
  return true;
}

uint32_t draw() {
  uint32_t x = table() ? table()->seed + 2654435761u * table()->draws.fetch_add(1)
                       : 12345u + 2654435761u * calls.fetch_add(1);
  x ^= x >> 15;
  x *= 2246822519u;
  return x ^ (x >> 13);
}

long held_ms(Way way) {
  static const long stall_ms = atol(setting("FLASH_FAULT_STALL_MS"));
  long ms = 0;
  if (hit(kStall, way)) ms += table() ? 1 + draw() % 20 : stall_ms;
  if (hit(kLongStall, way)) ms += 1000 + draw() % 2000;
  return ms;
}

// In device blocks, and anywhere.
size_t short_block(int fd) { return direct[fd] ? 512 : 1; }

void damage(void* bytes, size_t count) {
  const uint32_t place = draw();
  static_cast<uint8_t*>(bytes)[place % count] ^= static_cast<uint8_t>(1 << place % 8);
}

bool is_marked(int fd) { return fd >= 0 && fd < kMaxFd && marked[fd]; }

bool is_misaligned(int fd, const void* out, uint64_t nbytes, uint64_t offset) {
  const uint32_t block = block_bytes();
  return direct[fd] && (offset % block || nbytes % block || reinterpret_cast<uintptr_t>(out) % block);
}

uint32_t times_cancelled() { return table() ? table()->cancelled.load() : 0; }

void count_late(Way way, uint32_t times_cancelled_before) {
  if (table() && table()->cancelled != times_cancelled_before) ++table()->late[way];
}

}  // namespace faults

extern "C" {

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_with("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_with("open64", path, flags, mode);
}

ssize_t pread(int fd, void* out, size_t nbytes, off_t offset) {
  return pread_with("pread", fd, out, nbytes, offset);
}

ssize_t pread64(int fd, void* out, size_t nbytes, off64_t offset) {
  return pread_with("pread64", fd, out, nbytes, offset);
}

#if defined(STATX_DIOALIGN)
int statx(int folder, const char* path, int flags, unsigned mask, struct statx* status) noexcept {
  using Call = int (*)(int, const char*, int, unsigned, struct statx*);
  const int result = real<Call>("statx")(folder, path, flags, mask, status);
  if (result == 0 && (mask & STATX_DIOALIGN)) {
    status->stx_mask |= STATX_DIOALIGN;
    status->stx_dio_offset_align = std::max(status->stx_dio_offset_align, block_bytes());
    status->stx_dio_mem_align = std::max(status->stx_dio_mem_align, block_bytes());
  }
  return result;
}
#endif

int close(int fd) {
  FaultyRing::close(fd);
  if (is_marked(fd)) marked[fd] = false;
  static const auto next = real<int (*)(int)>("close");
  return next(fd);
}

long syscall(long number, ...) {
  va_list rest;
  va_start(rest, number);
  long values[6];
  for (long& value : values) value = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_io_uring_setup) {
    if (has_ring())
      return FaultyRing::setup(static_cast<unsigned>(values[0]), reinterpret_cast<void*>(values[1]));
    errno = ENOSYS;
    return -1;
  }
  if (number == SYS_io_uring_enter) {
    FaultyRing* ring = FaultyRing::of(static_cast<int>(values[0]));
    if (ring)
      return ring->enter(static_cast<unsigned>(values[1]), static_cast<unsigned>(values[2]),
                         static_cast<unsigned>(values[3]), reinterpret_cast<void*>(values[4]),
                         static_cast<size_t>(values[5]));
  }
  using Call = long (*)(long, long, long, long, long, long, long);
  return real<Call>("syscall")(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}
}
