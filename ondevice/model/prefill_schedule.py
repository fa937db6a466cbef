"""Shares of a forward pass among the prompts that are read: how many rows each has.

A prompt's rows take most of the time of a pass, and the texts that share it wait meanwhile. So short prompts
go first, a pass has the rows that `pass_seconds` hold by the time that rows took lately, and a long prompt is
left out of passes that others need, for a tenth of the time in which it is read at most. This module knows
nothing of models and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from ondevice.model.sequence_state import SequenceState
from ondevice.records import dataclass

UNTIMED_ROWS = 64
"""Rows of prompts beside texts that write where no time decides, and of a pass before any has been timed.

With fewer, prompts took longer; with more, only the others did (docs/serve.md#several-at-once)."""
MIN_ROWS = 32
"""Rows of a pass, if there are that many, however long they take: fewer are read at less than nine tenths of
the speed."""
LOST_SHARE = 0.1
"""Share of the time in which a prompt is read that passes of others may take from it."""
MAX_CREDIT_SECONDS = 5.0
"""Seconds for which a prompt may be left out in a row, once it has been read for ten times as long."""


@dataclass
class _Prompt:
    """A prompt that is read."""

    row_seconds: float
    """Time of a row in its last passes; 0: not known."""
    credit_seconds: float = 0.0
    """Time of passes that may still go by without it."""
    is_timed: bool = False


class PrefillSchedule:
    """Divides passes among the prompts that are read, by the time that passes took.

    It belongs to the thread that runs the passes.
    """

    def __init__(self, most_rows: int, pass_seconds: Callable[[], float]) -> None:
        """most_rows: of a pass. pass_seconds: time that a pass should take at most; 0: no limit."""
        self._most_rows = most_rows
        self._pass_seconds = pass_seconds
        self._prompts: dict[SequenceState, _Prompt] = {}
        self._first_row_seconds = 0.0
        """Time of a row at the beginning of the prompt that began last."""

    def rows(self, unread: Mapping[SequenceState, int], writing: bool) -> dict[SequenceState, int]:
        """Rows of the prompts that the next pass reads; the others wait.

        unread: tokens that each prompt lacks, at least one, in the order in which the prompts came. writing:
        whether texts write in this pass.
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
            # Beside short prompts a pass may take half as long again.
            part = max(share, 0.5) / len(readers)
            rows[kv] = max(1, min(unread[kv], int(part * rooms[kv])))
        return rows

    def passed(self, seconds: float, rows: Mapping[SequenceState, int], text_rows: int) -> None:
        """Note a pass: its time, and the rows of each prompt and of all texts that it had."""
        read = sum(rows.values())
        count = read + text_rows
        for kv, prompt in self._prompts.items():
            row_count = rows.get(kv, 0)
            before = prompt.credit_seconds + (LOST_SHARE - text_rows / count) * seconds
            # What other prompts take never counts against texts that come later.
            after = max(before - (read - row_count) / count * seconds, min(before, 0.0))
            prompt.credit_seconds = max(-MAX_CREDIT_SECONDS, min(MAX_CREDIT_SECONDS, after))
            if row_count:
                self._time(prompt, seconds / count)

    def keep(self, prompts: Container[SequenceState]) -> None:
        """Forget all prompts but these."""
        self._prompts = {kv: prompt for kv, prompt in self._prompts.items() if kv in prompts}

    def _time(self, prompt: _Prompt, row_seconds: float) -> None:
        if prompt.is_timed:
            prompt.row_seconds = (prompt.row_seconds + row_seconds) / 2
        else:
            prompt.row_seconds = self._first_row_seconds = row_seconds
        prompt.is_timed = True

    def _room(self, prompt: _Prompt, writing: bool) -> int:
        """Rows of a pass over this prompt alone."""
        limit = self._pass_seconds()
        if not limit:
            return min(UNTIMED_ROWS, self._most_rows) if writing else self._most_rows
        if not prompt.row_seconds:
            return min(UNTIMED_ROWS, self._most_rows)
        return min(self._most_rows, max(MIN_ROWS, int(limit / prompt.row_seconds)))
