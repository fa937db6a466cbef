"""Decides how many rows each prompt has in a forward pass.

Prompt rows take most of a pass's time, and decoding texts wait for the pass. So short prompts go first, and a
pass gets as many prompt rows as take `pass_seconds` by the latest timings. A long prompt is left out of
passes for at most a tenth of its reading time. This module knows nothing of models and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from ondevice.model.sequence_state import SequenceState
from ondevice.records import dataclass

UNTIMED_ROWS = 64
"""Rows of prompts in a pass with decoding texts if there is no time limit, and in passes before any timing.

With fewer, prompts take longer; with more, texts do (docs/serve.md#several-at-once)."""
MIN_ROWS = 32
"""Minimum number of rows of a pass, whatever time they take: fewer have less than 0.9 of the speed."""
LOST_SHARE = 0.1
"""Share of a prompt's reading time for which it may be left out of passes."""
MAX_CREDIT_SECONDS = 5.0
"""Longest time in seconds for which a prompt may be left out, after ten times as much reading."""


@dataclass
class _Prompt:
    """A prompt that is being read."""

    row_seconds: float
    """Seconds per row in the latest passes; 0: unknown."""
    credit_seconds: float = 0.0
    """Seconds for which it may still be left out."""
    is_timed: bool = False


class PrefillSchedule:
    """Divides passes among prompts by the time of earlier passes. Used by the thread that runs the passes."""

    def __init__(self, max_rows: int, pass_seconds: Callable[[], float]) -> None:
        """max_rows: the most rows of a pass. pass_seconds: returns the longest time that a pass should take;
        0: no limit.
        """
        self._max_rows = max_rows
        self._pass_seconds = pass_seconds
        self._prompts: dict[SequenceState, _Prompt] = {}
        self._first_row_seconds = 0.0
        """Seconds per row at the start of the newest prompt."""

    def rows(self, unread: Mapping[SequenceState, int], writing: bool) -> dict[SequenceState, int]:
        """Rows of each prompt in the next pass; prompts without an entry wait.

        unread: number of unread tokens of each prompt, at least one, oldest prompt first. writing: whether
        texts decode in this pass.
        """
        for kv in unread:
            self._prompts.setdefault(kv, _Prompt(self._first_row_seconds))
        shortest_first = sorted(unread, key=unread.__getitem__)
        rooms = {kv: self._room(self._prompts[kv], writing) for kv in unread}
        rows: dict[SequenceState, int] = {}
        share = 1.0
        for kv in shortest_first:
            if unread[kv] > share * rooms[kv]:
                break
            rows[kv] = unread[kv]
            share -= unread[kv] / rooms[kv]
        long = shortest_first[len(rows) :]
        readers = [kv for kv in long if self._prompts[kv].credit_seconds <= 0.0]
        if not (readers or rows or writing):
            readers = long[:1]
        for kv in readers:
            # With short prompts a pass may take half as long again.
            part = max(share, 0.5) / len(readers)
            rows[kv] = max(1, min(unread[kv], int(part * rooms[kv])))
        return rows

    def passed(self, seconds: float, rows: Mapping[SequenceState, int], text_rows: int) -> None:
        """Record a pass: its time, the rows of each prompt, and the rows of all decoding texts."""
        read = sum(rows.values())
        count = read + text_rows
        for kv, prompt in self._prompts.items():
            row_count = rows.get(kv, 0)
            before = prompt.credit_seconds + (LOST_SHARE - text_rows / count) * seconds
            # Time that other prompts take never makes the credit negative.
            after = max(before - (read - row_count) / count * seconds, min(before, 0.0))
            prompt.credit_seconds = max(-MAX_CREDIT_SECONDS, min(MAX_CREDIT_SECONDS, after))
            if row_count:
                self._time(prompt, seconds / count)

    def keep(self, prompts: Container[SequenceState]) -> None:
        """Forget all prompts except these."""
        self._prompts = {kv: prompt for kv, prompt in self._prompts.items() if kv in prompts}

    def _time(self, prompt: _Prompt, row_seconds: float) -> None:
        if prompt.is_timed:
            prompt.row_seconds = (prompt.row_seconds + row_seconds) / 2
        else:
            prompt.row_seconds = self._first_row_seconds = row_seconds
        prompt.is_timed = True

    def _room(self, prompt: _Prompt, writing: bool) -> int:
        """The number of rows in a pass that has only this prompt. writing: whether texts decode in it."""
        limit = self._pass_seconds()
        if not limit:
            return min(UNTIMED_ROWS, self._max_rows) if writing else self._max_rows
        if not prompt.row_seconds:
            return min(UNTIMED_ROWS, self._max_rows)
        return min(self._max_rows, max(MIN_ROWS, int(limit / prompt.row_seconds)))
