"""The progress of a conversion, in the form that callers get."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Progress of a conversion, in bytes of the checkpoint."""

    step: str
    """The bundle file being made."""
    done_bytes: int
    total_bytes: int
    bytes_per_second: float
    """Mean speed of this run; 0 until something is done."""
    remaining_seconds: float | None
    """None until something is done."""

    @property
    def fraction(self) -> float:
        """The share of the work that is done, from 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


REPORT_SECONDS = 0.1

OnProgress = Callable[[Progress], None]


class ProgressMeter:
    """Counts bytes and reports them. Bytes that an earlier run has done are skipped and don't count for the
    speed.
    """

    def __init__(self, total_bytes: int, on_progress: OnProgress | None) -> None:
        self._total_bytes = total_bytes
        self._on_progress = on_progress
        self._skipped_bytes = 0
        self._done_bytes = 0
        self._start_seconds = time.monotonic()
        self._reported_seconds = float("-inf")

    def skip(self, nbytes: int) -> None:
        """Count `nbytes` that need no work, because an earlier run has done them."""
        self._skipped_bytes += nbytes

    def advance(self, step: str, nbytes: int) -> None:
        """Count `nbytes` more as done, and report: at most every 0.1 s, and at the end."""
        self._done_bytes += nbytes
        now = time.monotonic()
        left = self._total_bytes - self._skipped_bytes - self._done_bytes
        if self._on_progress is None or (left and now - self._reported_seconds < REPORT_SECONDS):
            return
        self._reported_seconds = now
        speed = self._done_bytes / max(now - self._start_seconds, 1e-9)
        self._on_progress(
            Progress(
                step=step,
                done_bytes=self._skipped_bytes + self._done_bytes,
                total_bytes=self._total_bytes,
                bytes_per_second=speed,
                remaining_seconds=left / speed if speed else None,
            )
        )
