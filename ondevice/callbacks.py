"""Types of the callbacks that long work takes: progress reports and cancellation checks."""

from __future__ import annotations

from collections.abc import Callable

from ondevice.records import dataclass


@dataclass(frozen=True)
class PromptProgress:
    """How far a prompt of `tokens` tokens has been read.

    `reused_tokens`: tokens that weren't computed, which count as read. `seconds`: since reading began.
    """

    tokens: int
    read_tokens: int
    reused_tokens: int
    seconds: float


OnPrompt = Callable[[PromptProgress], None]
"""Called as a prompt is read: before its first pass, and after every one but the last."""
OnProgress = Callable[[float, str], None]
"""Called with the share done, from 0 to 1, and a description of the current step."""
OnCount = Callable[[int], None]
"""Called with the number of units done, such as tokens."""
OnBytes = Callable[[int, int], None]
"""Called with the bytes read so far and the total bytes."""
IsCancelled = Callable[[], bool]
"""Returns True once the work must stop. Called between two pieces of the work."""


def ignore_progress(fraction: float, what: str) -> None:
    """Do nothing: the `OnProgress` of a caller that wants no reports."""


def ignore_count(count: int) -> None:
    """Do nothing: the `OnCount` of a caller that wants no reports."""


def never_cancelled() -> bool:
    """False: the `IsCancelled` of work that nothing cancels."""
    return False


class Cancelled(Exception):  # noqa: N818 - an outcome that its caller handles, never an error a user sees
    """Raised when work is cancelled between two pieces. What it worked on is as it was before."""
