"""Token Recycling (Luo et al., arXiv 2408.08696): what the model lately said may follow each token.

Logits name candidates that the text didn't take; the next time the same token comes, they are the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.speculation.drafter import Drafter, Sureness
from ondevice.speculation.ranking import largest
from ondevice.speculation.tree import Proposals

CANDIDATES = 8
MATRIX_BYTES = 2_000_000
"""At most, of the matrix, as long as one candidate of every token fits: huge vocabularies keep fewer."""
FIRST_PRIOR, NEXT_PRIOR = 0.4, 0.4
"""How sure the first candidate is at first, and each further one of what the one before it is."""


def candidates(vocab_size: int) -> int:
    """Candidates that are kept for every token."""
    return max(1, min(CANDIDATES, vocab_size - 1, MATRIX_BYTES // (4 * vocab_size)))


def matrix_bytes(vocab_size: int) -> int:
    """Memory of the matrix."""
    return 4 * vocab_size * candidates(vocab_size)


class Recycling(Drafter):
    """For every token, the likeliest that may follow it, as of when it was last at the end of the text."""

    def __init__(self, vocab_size: int) -> None:
        self._next = np.full((vocab_size, candidates(vocab_size)), -1, dtype=np.int32)
        """-1: nothing is known."""
        self._sureness = [Sureness(FIRST_PRIOR * NEXT_PRIOR**rank) for rank in range(self._next.shape[1])]
        self._last = -1

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        self._last = text[-1]

    def add(self, token: int) -> None:
        self._last = token

    def propose(self, path: Sequence[int]) -> Proposals:
        last = path[-1] if path else self._last
        if last < 0 or self._next[last, 0] < 0:
            return []
        return [
            (token, sureness.chance)
            for token, sureness in zip(self._next[last].tolist(), self._sureness, strict=True)
        ]

    def judge(self, token: int) -> None:
        if self._last >= 0 and self._next[self._last, 0] >= 0:
            for candidate, sureness in zip(self._next[self._last].tolist(), self._sureness, strict=True):
                sureness.count(candidate == token)

    def learn(self, token: int, logits: Float32) -> None:
        count = self._next.shape[1]
        self._next[token] = largest(logits, count)[0]
