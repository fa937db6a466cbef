"""Memory that MLX takes: asked for before, where its CPU device wouldn't ask, and refused as everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from mmap import mmap
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@contextmanager
def allocation() -> Iterator[None]:
    """What MLX raises for want of memory is a MemoryError outside."""
    try:
        yield
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def require_memory(nbytes: int) -> None:
    """Raises MemoryError where the system refuses so many bytes; takes none of them."""
    # MLX's CPU device doesn't ask whether it got its memory.
    try:
        mmap(-1, max(1, nbytes)).close()
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes for MLX: {error.strerror}") from error


def writable(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, NDArray[Any]]:
    """An array of zeros and the numpy view through which it is written. Raises MemoryError."""
    require_memory(prod(shape) * dtype.size)
    with allocation():
        array = mx.zeros(shape, dtype=dtype)
        mx.eval(array)
    return array, np.array(array, copy=False)


def begin(*arrays: mx.array) -> None:
    """Have them computed while the host goes on. Raises MemoryError."""
    with allocation():
        mx.async_eval(*arrays)


def known(*arrays: mx.array) -> None:
    """Wait until they are computed. Raises MemoryError."""
    with allocation():
        mx.eval(*arrays)


class Synchronisations:
    """How often the host has waited for what MLX computes, and how long."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def wait(self, *arrays: mx.array) -> None:
        """One more: `known`."""
        started = time.perf_counter()
        known(*arrays)
        self.count += 1
        self.seconds += time.perf_counter() - started
