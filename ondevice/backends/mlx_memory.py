"""MLX's memory: checked against the system before MLX's CPU device allocates it, and limited.

MLX has one set of limits per process. Every budget bounds the process, so with several models the largest
counts. The limits from before the first model come back when the last one closes; only malloc's mapping of
large blocks stays, as it can't be undone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from mmap import mmap
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ondevice.errors import BackendUnavailableError
from ondevice.units import map_large_arrays

_lock = threading.Lock()
_open: dict[object, tuple[int, int]] = {}
"""(bytes of freed arrays that MLX may keep, budget) of every loaded model."""
_before: tuple[int, int, int] | None = None
"""Limits of MLX's cache, memory and wired memory before the first model was loaded."""


def on_cuda() -> bool:
    """Whether MLX's default device is a CUDA GPU.

    CUDA's driver moves pages between host and GPU, and direct reads that arrive meanwhile are lost. So on
    CUDA nothing is read from flash straight into arrays.
    """
    return mx.default_device() == mx.gpu and not mx.metal.is_available()


@contextmanager
def allocation() -> Iterator[None]:
    """Turns MLX's RuntimeError into a MemoryError if memory is lacking, and into a BackendUnavailableError if
    its kernels can't be compiled.
    """
    try:
        yield
    except RuntimeError as error:
        if "Failed to compile kernel" in str(error):
            message = _first_error(error)
            remedy = "use --backend cpu"
            if "open source file" in message:
                remedy = (
                    f"for CUDA 13, pip install 'nvidia-cuda-crt==13.*' brings missing headers; or {remedy}"
                )
            raise BackendUnavailableError(
                f"--backend mlx: MLX can't compile its kernels for this GPU ({message}); {remedy}"
            ) from error
        if "alloc" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def _first_error(error: RuntimeError) -> str:
    """The first error in a compiler's message, without the file's path; if there is none, the message's first
    line.
    """
    lines = str(error).splitlines()
    return next((line.partition("error: ")[2] for line in lines if "error: " in line), lines[0])


def require_memory(nbytes: int) -> None:
    """Ask the system for `nbytes` bytes without allocating them. Raises MemoryError if it refuses."""
    # MLX's CPU device doesn't check its allocations.
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
    """Start to compute `arrays` on the device and return at once. Raises MemoryError."""
    with allocation():
        mx.async_eval(*arrays)


def known(*arrays: mx.array) -> None:
    """Wait until `arrays` are computed. Raises MemoryError."""
    with allocation():
        mx.eval(*arrays)


class Synchronisations:
    """Number and total seconds of the host's waits for MLX."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def wait(self, *arrays: mx.array) -> None:
        """Wait until `arrays` are computed. Raises MemoryError."""
        started = time.perf_counter()
        known(*arrays)
        self.count += 1
        self.seconds += time.perf_counter() - started


class MlxLimits:
    """One model's share in MLX's limits.

    cache_bytes: most bytes of freed arrays that MLX keeps. budget_bytes: limits memory and wired memory.
    """

    def __init__(self, cache_bytes: int, budget_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self.keep_to(budget_bytes)

    def keep_to(self, budget_bytes: int) -> None:
        """Follow a new budget in bytes. Computations wait for memory beyond it, and a GPU keeps up to that
        much wired.
        """
        global _before
        with _lock:
            if _before is None:
                map_large_arrays()  # MLX's CPU device takes its memory from malloc
                _before = _set(self._cache_bytes, budget_bytes)
            _open[self] = self._cache_bytes, budget_bytes
            _apply()

    def restore(self) -> None:
        """Withdraw this model's limits. When the last model does, those from before the first are restored.
        Idempotent.
        """
        global _before
        with _lock:
            if _open.pop(self, None) is None:
                return
            if _open:
                _apply()
            elif _before is not None:
                _set(*_before[:2], wired_bytes=_before[2])
                _before = None


def _apply() -> None:
    caches, budgets = zip(*_open.values(), strict=True)
    _set(max(caches), max(budgets))


def _set(cache_bytes: int, memory_bytes: int, wired_bytes: int | None = None) -> tuple[int, int, int]:
    """Set MLX's limits. Returns those before: of its cache, memory and wired memory."""
    before = mx.set_cache_limit(cache_bytes), mx.set_memory_limit(memory_bytes)
    if not mx.metal.is_available():
        return *before, 0
    max_bytes = int(mx.device_info()["max_recommended_working_set_size"])
    return *before, mx.set_wired_limit(min(memory_bytes, max_bytes) if wired_bytes is None else wired_bytes)
