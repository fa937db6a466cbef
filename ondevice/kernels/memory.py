"""Large arrays in mappings of their own: what is let go of goes back to the system at once.

The C library keeps what it is given back: each thread that allocates has a heap whose end is never trimmed
(glibc's `malloc_trim` does it for the main thread's alone), and once a block of some size has been freed, the
next of that size come from there. Twenty-five megabytes of pieces read while loading, and twelve of a wide
pass's arrays, stayed in such heaps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ondevice.kernels import _native

MAPPED_BYTES = 64 << 10
"""Arrays of so many bytes and more have a mapping of their own; smaller ones come from the heap."""


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A C-contiguous array whose elements are anything. Raises MemoryError."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < MAPPED_BYTES:
        return np.empty(shape, dtype)
    return _native.allocate(nbytes).view(dtype).reshape(shape)
