"""MLX's limits on memory, which belong to the plan while a model is loaded: one set for the whole process.

Where several models are loaded, the last to change a limit decides; what was there before any comes back with
the last to close.
"""

from __future__ import annotations

import mlx.core as mx

_open: list[MlxLimits] = []
_before: list[tuple[int, int]] = []


class MlxLimits:
    """Freed arrays of at most `cache_bytes` are kept; memory and what is wired follow the budget."""

    def __init__(self, cache_bytes: int) -> None:
        before = mx.set_cache_limit(cache_bytes)
        if not _open:
            memory = mx.set_memory_limit(1 << 40)
            mx.set_memory_limit(memory)
            _before.append((before, memory))
        _open.append(self)

    def keep_to(self, budget_bytes: int) -> None:
        """Evaluations wait for memory beyond the budget; on a GPU as much of it as may be stays wired."""
        mx.set_memory_limit(budget_bytes)
        if mx.metal.is_available():
            most = int(mx.device_info()["max_recommended_working_set_size"])
            mx.set_wired_limit(min(budget_bytes, most))

    def restore(self) -> None:
        """Idempotent."""
        if self not in _open:
            return
        _open.remove(self)
        if not _open:
            cache, memory = _before.pop()
            mx.set_cache_limit(cache)
            mx.set_memory_limit(memory)
            if mx.metal.is_available():
                mx.set_wired_limit(0)
