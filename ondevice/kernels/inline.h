// How functions on vectors are declared: inlined wherever they are used. GCC calls many of those on NEON's
// four registers if it may choose, and a call spills all sums that are in registers.
#pragma once

#define ONDEVICE_INLINED __attribute__((always_inline))
#define ONDEVICE_INLINE ONDEVICE_INLINED static inline
