// What the parts of the preloaded library share: which faults there are, and whether one is due.
#pragma once

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

namespace faults {

enum Kind { kInterrupt, kError, kEnd, kShort, kStall, kLongStall, kDamage, kKinds };
// How a read is made.
enum Way { kPread, kRing, kWays };

// Whether the read (or call) at hand meets such a fault, which is counted then.
bool hit(Kind kind, Way way);
// Pseudo-random numbers, the same in every run; which read gets which depends on the threads.
uint32_t draw();
// How long the read at hand is held up; 0 for most.
long held_ms(Way way);
// What a direct read that comes short is a multiple of, and a buffered one.
size_t short_block(int fd);
// Spoils one of `count` bytes.
void damage(void* bytes, size_t count);

// Whether a descriptor is of the files that faults are for, and whether its direct reads must be aligned.
bool is_marked(int fd);
bool is_misaligned(int fd, const void* out, uint64_t nbytes, uint64_t offset);

// How often the test has lost interest in the reads under way; a read that began before and ends now is late.
uint32_t times_cancelled();
void count_late(Way way, uint32_t times_cancelled_before);

// The system's own function of this name, which the library stands before.
template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace faults
