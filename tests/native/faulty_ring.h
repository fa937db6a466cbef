// Stands between a process and its io_uring, so that reads go wrong there too.
//
// The process gets a ring in a file of memory, laid out like the real one. Each io_uring_enter takes what is
// queued there, queues it in the real ring, spoilt or not, now or later, and brings back what has ended. So
// nothing is rewritten while the system or the process may look at it.
#pragma once

#include <stddef.h>

#include <memory>

namespace faults {

struct RingState;

// Belongs to one thread at a time, like a ring.
class FaultyRing {
 public:
  // io_uring_setup(2): the descriptor of the process's ring, or -1.
  static int setup(unsigned entries, void* params);
  // The ring of a descriptor that setup() returned; null for any other.
  static FaultyRing* of(int fd);
  // The descriptor is about to be closed. Aborts if reads are still under way.
  static void close(int fd);

  ~FaultyRing();
  // io_uring_enter(2).
  int enter(unsigned to_submit, unsigned min_complete, unsigned flags, void* argument, size_t argument_bytes);

 private:
  explicit FaultyRing(std::unique_ptr<RingState> state);

  std::unique_ptr<RingState> state_;
};

}  // namespace faults
