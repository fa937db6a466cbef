"""Callbacks that long work takes: how far it is, and whether it is cancelled."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[float, str], None]
"""Gets the share that is done, from 0 to 1, and what is being done."""
OnCount = Callable[[int], None]
"""Gets how many units are done, tokens for example."""
OnBytes = Callable[[int, int], None]
"""Gets the bytes read and the bytes in all."""
IsCancelled = Callable[[], bool]
"""Whether the work is to stop. It is asked between two pieces of the work."""


def ignore_progress(fraction: float, what: str) -> None:
    """The `OnProgress` of a caller that doesn't ask for progress."""


def ignore_count(count: int) -> None:
    """The `OnCount` of a caller that doesn't ask for progress."""


def never_cancelled() -> bool:
    """The `IsCancelled` of work that nothing cancels."""
    return False
