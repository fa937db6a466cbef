"""MLX's limits on memory, which belong to the plans of the models that are loaded: one set for the process.

Every budget bounds the whole process, so with several models the largest counts. What was there before the
first comes back with the last to close; but that malloc maps large blocks stays, as it can't be unsaid.
"""

from __future__ import annotations

import threading

import mlx.core as mx

from ondevice.units import map_large_arrays

_lock = threading.Lock()
_open: dict[object, tuple[int, int]] = {}
"""(freed bytes that may be kept, budget) of every model that is loaded."""
_before: tuple[int, int, int] | None = None
"""Limits of MLX's cache, memory and wired memory before the first of them."""


class MlxLimits:
    """Freed arrays of at most `cache_bytes` are kept; memory and what is wired follow `budget_bytes`."""

    def __init__(self, cache_bytes: int, budget_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self.keep_to(budget_bytes)

    def keep_to(self, budget_bytes: int) -> None:
        """Evaluations wait for memory beyond the budget; on a GPU as much of it as may be stays wired."""
        global _before
        with _lock:
            if _before is None:
                map_large_arrays()  # MLX's CPU device takes its memory from malloc
                _before = _set(self._cache_bytes, budget_bytes)
            _open[self] = self._cache_bytes, budget_bytes
            _apply()

    def restore(self) -> None:
        """Idempotent."""
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
    """The limits that were there before."""
    before = mx.set_cache_limit(cache_bytes), mx.set_memory_limit(memory_bytes)
    if not mx.metal.is_available():
        return *before, 0
    most = int(mx.device_info()["max_recommended_working_set_size"])
    return *before, mx.set_wired_limit(min(memory_bytes, most) if wired_bytes is None else wired_bytes)
