"""How the drafts of one generation fared: counted pass by pass."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.speculation.tree import Draft
from ondevice.stats import DraftStats


class DraftCount:
    """Sums over a generation's passes. Passes without guesses may be told, too."""

    def __init__(self) -> None:
        self._drafts = self._guesses = 0
        self._preparing_seconds = self._growing_seconds = 0.0
        self._guessed: list[int] = []
        self._accepted: list[int] = []
        """By depth, from 1 on; both are as long."""
        self.decision = ""
        """As in `DraftStats`."""

    def spent(self, guesses: int, preparing_seconds: float, growing_seconds: float) -> None:
        """A draft of so many guesses, if any, took so long; looking for guesses takes time without any."""
        self._drafts += guesses > 0
        self._guesses += guesses
        self._preparing_seconds += preparing_seconds
        self._growing_seconds += growing_seconds

    def passed(self, draft: Draft, path: Sequence[int], ended: bool) -> None:
        """Of `draft`, as far as it was verified, the nodes `path` are the text: from the root on.

        ended: the text is over, so that what was guessed behind the path was never judged.
        """
        right = len(path) - 1
        judged = right + (not ended and path[-1] in draft.parents[1:])
        more = [0] * (judged - len(self._guessed))
        self._guessed += more
        self._accepted += more
        for depth in range(judged):
            self._guessed[depth] += 1
            self._accepted[depth] += depth < right

    @property
    def stats(self) -> DraftStats:
        """So far."""
        return DraftStats(
            self._drafts,
            self._guesses,
            tuple(self._guessed),
            tuple(self._accepted),
            self._preparing_seconds,
            self._growing_seconds,
            self.decision,
        )
