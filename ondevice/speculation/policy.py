"""How large a draft is: expected tokens per second, by what passes of its size have lately taken.

A further node is worth its place while the tokens that it is expected to add outweigh the time that it adds.
Where that is so for no node, decoding is plain, and now and then a small draft finds out whether it still is.
"""

from __future__ import annotations

FIRST_PLAIN, FIRST_DRAFTS, TRIAL_NODES = 4, 2, 4
TRIAL_PASSES = 48
"""Passes without a draft after which one is tried, and passes with drafts after which one goes without."""
TIME_WEIGHT = 0.1
"""Of the newest pass in the running means."""


class TreePolicy:
    """One model's: sessions share what its passes take."""

    def __init__(self, most_nodes: int) -> None:
        """most_nodes: of a draft, its root included: what there is working memory for."""
        self._most_nodes = most_nodes
        self._plain_seconds = 0.0
        self._node_seconds = 0.0
        """What each further node has lately added to a pass."""
        self._plain_passes = self._draft_passes = 0
        self._in_a_row = 0
        """Passes of the same kind, with or without a draft, since the last of the other kind."""
        self._was_draft = False
        self._trial = False
        self._expected = 1.0

    def begin(self) -> int:
        """A draft is about to grow. Returns how many nodes it may have, the root included."""
        self._expected = 1.0
        overdue = self._in_a_row >= TRIAL_PASSES
        self._trial = self._draft_passes < FIRST_DRAFTS or (overdue and not self._was_draft)
        resting = self._plain_passes < FIRST_PLAIN or (overdue and self._was_draft)
        if resting:
            return 1
        return min(TRIAL_NODES, self._most_nodes) if self._trial else self._most_nodes

    def worth(self, nodes: int, chance: float) -> bool:
        """Whether a draft of `nodes` should get another, which is accepted with that chance."""
        if not self._trial:
            seconds = self._plain_seconds + self._node_seconds * (nodes - 1)
            if chance * seconds <= self._expected * self._node_seconds:
                return False
        self._expected += chance
        return True

    def record(self, nodes: int, seconds: float) -> None:
        """A pass over so many nodes took so long, drawing its tokens included."""
        draft = nodes > 1
        self._in_a_row = self._in_a_row + 1 if draft == self._was_draft else 1
        self._was_draft = draft
        if draft:
            added = max(0.0, seconds - self._plain_seconds) / (nodes - 1)
            self._node_seconds = _mean(self._node_seconds, added, self._draft_passes)
            self._draft_passes += 1
        else:
            self._plain_seconds = _mean(self._plain_seconds, seconds, self._plain_passes)
            self._plain_passes += 1


def _mean(mean: float, value: float, count: int) -> float:
    """A running mean after `count` values and one more; the first few count alike."""
    return mean + max(TIME_WEIGHT, 1 / (count + 1)) * (value - mean)
