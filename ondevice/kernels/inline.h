// How functions on vectors are declared: inlined wherever they are used, for GCC calls many of those on
// NEON's four registers if it may choose, and a call spills all sums that are in registers. Not so on the
// scalar target, whose vectors are arrays: it would compile three times as long.
#pragma once

#if defined(ONDEVICE_TARGET_SCALAR)
#define ONDEVICE_INLINED
#else
#define ONDEVICE_INLINED __attribute__((always_inline))
#endif
#define ONDEVICE_INLINE ONDEVICE_INLINED static inline
