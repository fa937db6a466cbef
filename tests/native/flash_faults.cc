// Preloaded into a test's process, so that reads of files named *.flash fail, come short or stall (Linux).
//
// FLASH_FAULT: refuse_open, refuse_read (direct reads), eintr, eio, short, stall.
// FLASH_FAULT_EVERY: about one call in so many is hit. FLASH_FAULT_STALL_MS: how long a stall lasts.
// FLASH_FAULT_OFF: nothing happens while a file of this name exists. FLASH_FAULT_LOG: gains a byte per fault.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr int kMaxFd = 4096;
std::atomic<bool> marked[kMaxFd], direct[kMaxFd];
std::atomic<uint32_t> calls;

const char* setting(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

bool fault_is(const char* name) {
  static const char* fault = setting("FLASH_FAULT");
  static const char* off = setting("FLASH_FAULT_OFF");
  return strcmp(fault, name) == 0 && (*off == 0 || access(off, F_OK) != 0);
}

// A pseudo-random number per call; which call gets which depends on the threads.
uint32_t draw() {
  uint32_t x = calls.fetch_add(1) * 2654435761u + 12345u;
  x ^= x >> 15;
  x *= 2246822519u;
  return x ^ (x >> 13);
}

// What a test asks for to know that it tested something.
void log_fault() {
  static const int fd = open(setting("FLASH_FAULT_LOG"), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (write(fd, "x", 1) != 1) abort();
}

bool hit() {
  static const uint32_t every = static_cast<uint32_t>(atoi(setting("FLASH_FAULT_EVERY")));
  if (every == 0 || draw() % every != 0) return false;
  log_fault();
  return true;
}

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int open_with(const char* symbol, const char* path, int flags, mode_t mode) {
  size_t length = strlen(path);
  const bool ours = length > 6 && strcmp(path + length - 6, ".flash") == 0 && (flags & O_ACCMODE) == O_RDONLY;
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

ssize_t pread_with(const char* symbol, int fd, void* out, size_t nbytes, off_t offset) {
  auto next = real<ssize_t (*)(int, void*, size_t, off_t)>(symbol);
  if (fd < 0 || fd >= kMaxFd || !marked[fd]) return next(fd, out, nbytes, offset);
  if (direct[fd] && fault_is("refuse_read")) {
    log_fault();
    errno = EINVAL;
    return -1;
  }
  // As a device with blocks of 4096 bytes has it.
  if (direct[fd] && (offset % 4096 || nbytes % 4096 || reinterpret_cast<uintptr_t>(out) % 4096)) {
    errno = EINVAL;
    return -1;
  }
  if (fault_is("eintr") && hit()) {
    errno = EINTR;
    return -1;
  }
  if (fault_is("eio") && hit()) {
    errno = EIO;
    return -1;
  }
  if (fault_is("stall") && hit()) {
    static const long ms = atol(setting("FLASH_FAULT_STALL_MS"));
    timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, nullptr);
  }
  if (fault_is("short") && hit() && nbytes > 512) {
    // A direct read that comes short does so in device blocks, a buffered one anywhere.
    size_t fewer = 1 + draw() % (nbytes - 1);
    nbytes = direct[fd] ? fewer / 512 * 512 + 512 : fewer;
  }
  return next(fd, out, nbytes, offset);
}

}  // namespace

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
}
