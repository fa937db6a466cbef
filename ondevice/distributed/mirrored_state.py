"""States of sequences, of which other ranks hold parts, and the log of changes that these must repeat.

No change needs a separate trip: changes are sent with the next pass, in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from ondevice.backends.kv_arrays import KVArrays
from ondevice.backends.kv_layout import KVLayout
from ondevice.distributed.messages import MAX_CHANGES, Change
from ondevice.model.layer_range import Allocate, Release
from ondevice.model.sequence_state import SequenceState


class ChangeLog:
    """The changes that other ranks have yet to make, and the numbers of sequences.

    flush: called when the log has as many changes as a message holds; it must `take` them.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._changes: list[Change] = []
        self._numbers = count()
        self._flush = flush

    def number(self) -> int:
        """The number of a new sequence."""
        return next(self._numbers)

    def add(self, change: Change) -> None:
        if self._changes and self._changes[-1] == change and change.kind == "cut":
            return
        self._changes.append(change)
        if len(self._changes) == MAX_CHANGES:
            self._flush()

    def take(self) -> tuple[Change, ...]:
        """All changes, in order. They are removed from the log."""
        changes, self._changes = tuple(self._changes), []
        return changes


class MirroredState(SequenceState):
    """A sequence's state that logs when it is truncated or copied. Tokens that passes add aren't logged."""

    def __init__(
        self,
        log: ChangeLog,
        layout: KVLayout,
        allocate: Allocate,
        release: Release,
        arrays: KVArrays | None = None,
    ) -> None:
        super().__init__(layout, allocate, release, arrays)
        self.number = log.number()
        self._log = log

    def mark_prompt(self, n_tokens: int) -> None:
        super().mark_prompt(n_tokens)
        if self.states is not None:
            self._log.add(Change("mark", self.number, n_tokens))

    def truncate(self, n_tokens: int) -> None:
        super().truncate(n_tokens)
        # A model with recurrent layers may have kept fewer.
        self._log.add(Change("cut", self.number, self.length))

    def kept(self, start: int, path: Sequence[int]) -> None:
        """Record that only the nodes of `path` will be kept of the tree stored from position `start` on."""
        self._log.add(Change("keep", self.number, start, tuple(path)))

    def _empty(self) -> MirroredState:
        return MirroredState(self._log, self.layout, self._allocate, self._release)

    def _copy_to(self, copy: SequenceState, n_tokens: int) -> None:
        # Other ranks copy all of theirs.
        super()._copy_to(copy, self.length)
        assert isinstance(copy, MirroredState)
        self._log.add(Change("fork", self.number, copy.number))
        if n_tokens < copy.length:
            copy.truncate(n_tokens)
