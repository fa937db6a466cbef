"""Token Recycling (Luo et al., arXiv 2408.08696): drafts each token's likeliest successors by recent logits.

For each token, the likeliest next tokens are remembered, whichever was drawn, and drafted when the same token
occurs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.speculation.drafter import AcceptanceRate, Drafter
from ondevice.speculation.ranking import largest
from ondevice.speculation.tree import Proposals

MAX_CANDIDATES = 8
"""Maximum candidates kept for a token."""
MATRIX_BYTES = 2_000_000
"""Most bytes of the matrix: large vocabularies keep fewer candidates, but at least one per token."""
FIRST_PRIOR = 0.4
"""Prior acceptance rate of the likeliest candidate."""
NEXT_PRIOR = 0.4
"""Prior acceptance rate of each further candidate, as a share of the previous one's."""


def candidates(vocab_size: int) -> int:
    """Number of candidates that are kept for every token."""
    return max(1, min(MAX_CANDIDATES, vocab_size - 1, MATRIX_BYTES // (4 * vocab_size)))


def matrix_bytes(vocab_size: int) -> int:
    """Bytes of the matrix of candidates."""
    return 4 * vocab_size * candidates(vocab_size)


class Recycling(Drafter):
    """Drafts from a matrix that has each token's likeliest successors at its last occurrence."""

    def __init__(self, vocab_size: int) -> None:
        self._next = np.full((vocab_size, candidates(vocab_size)), -1, dtype=np.int32)
        """(V, candidates) token ids, likeliest first; -1 where nothing is known."""
        ranks = range(self._next.shape[1])
        self._acceptance = [AcceptanceRate(FIRST_PRIOR * NEXT_PRIOR**rank) for rank in ranks]
        self._last = -1

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        self._last = text[-1]

    def observe(self, token: int, logits: Float32 | None) -> None:
        if logits is not None and self._last >= 0:
            known = self._next[self._last]
            if known[0] >= 0:
                for candidate, acceptance in zip(known.tolist(), self._acceptance, strict=True):
                    acceptance.observe(candidate == token)
            known[:] = largest(logits, len(known))[0]
        self._last = token

    def spawn(self) -> Recycling:
        """A drafter with the same matrix. Both learn from both texts."""
        drafter = copy(self)
        drafter._last = -1
        return drafter

    def propose(self, path: Sequence[int]) -> Proposals:
        last = path[-1] if path else self._last
        if last < 0 or self._next[last, 0] < 0:
            return []
        ranked = zip(self._next[last].tolist(), self._acceptance, strict=True)
        return [(token, acceptance.value) for token, acceptance in ranked]
