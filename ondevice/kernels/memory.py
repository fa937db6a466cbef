"""Large arrays in separate mappings, so that freed memory returns to the system at once.

The C library keeps freed memory. Every allocating thread has a heap whose end is never trimmed (glibc's
`malloc_trim` trims only the main thread's), and after a large block is freed, later blocks of that size come
from the heap too: 25 MB of pieces read while loading, and 12 MB of a wide forward pass's arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ondevice.kernels import _native

MAPPED_BYTES = 64 << 10
"""Minimum bytes of an array with a separate mapping; smaller arrays come from the heap."""


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A new C-contiguous array with undefined values, in a separate mapping. Raises MemoryError."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < MAPPED_BYTES:
        return np.empty(shape, dtype)
    return _native.allocate(nbytes).view(dtype).reshape(shape)
