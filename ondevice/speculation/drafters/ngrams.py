"""Drafts continuations of the text's last tokens from a datastore on flash.

"REST" (arXiv 2311.08252), and the second level of "Hierarchy Drafting" (arXiv 2502.05609): the continuations
of the last one to three tokens, as a tree, ranked by frequency. One lookup serves a whole draft.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from itertools import pairwise

from ondevice.backends.base import Float32
from ondevice.bundle.ngrams import MAX_CONTEXT
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState
from ondevice.speculation.datastore import Continuations, Datastore
from ondevice.speculation.drafter import AcceptanceRate, Drafter
from ondevice.speculation.drafters.combined import MAX_PROPOSALS
from ondevice.speculation.tree import Proposals

SHARES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.8)
"""Bounds of the bins of a token's share of a context's continuations."""
BY_CONTEXT = (0.3, 0.6, 0.8)
"""Prior acceptance rates of a token that always followed its context, by the context's tokens."""
CHEAP_LOOKUP_SHARE = 0.05
"""Largest share of the time that `auto` spends on lookups.

Measured, a datastore of similar text brings `auto` a fifth more tokens per forward pass (docs/benchmarks.md).
"""
RETRY_DRAFTS = 64
"""Drafts without a lookup after which one measures its time anew."""
EMA_WEIGHT = 0.1
"""EMA weight of the newest lookup's time, and of the newest time between two drafts."""


class NgramDrafter(Drafter):
    """Drafts from a datastore, with an acceptance rate for each length of context and each share of
    continuations.
    """

    def __init__(self, store: Datastore, most_share: float = math.inf) -> None:
        """store: owned by this object, and closed with it. most_share: the largest share of the time that
        lookups may take.
        """
        self._store = store
        self._most_share = most_share
        self._lookup_seconds = self._draft_seconds = 0.0
        """Mean seconds of a lookup, and from one draft to the next."""
        self._drafted_at = 0.0
        """Time at which the last draft began; 0 for none in this text."""
        self._skipped = 0
        """Drafts since the last lookup."""
        self._tail: list[int] = []
        """The text's last tokens."""
        self._path: tuple[int, ...] = ()
        """Tokens that were drawn since the last lookup."""
        self._continuations: list[Continuations] = []
        """Results of the last lookup, longest context first."""
        bounds = (0.0, *SHARES, 1.0)
        middles = [(low + high) / 2 for low, high in pairwise(bounds)]
        self._acceptance = [[AcceptanceRate(rate * middle) for middle in middles] for rate in BY_CONTEXT]

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        self._tail = text[-MAX_CONTEXT:]
        self._drafted_at = 0.0
        self._forget()

    def observe(self, token: int, logits: Float32 | None) -> None:
        if logits is not None:
            for candidate, rate in self._ranked(self._path):
                rate.observe(candidate == token)
        self._tail = [*self._tail, token][-MAX_CONTEXT:]
        self._path = (*self._path, token)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._forget()
        started = time.perf_counter()
        if self._drafted_at:
            self._draft_seconds = _mean(self._draft_seconds, started - self._drafted_at)
        self._drafted_at = started
        self._skipped += 1
        if self.is_cheap or self._skipped > RETRY_DRAFTS:
            self._continuations = self._store.lookup(self._tail)
            self._lookup_seconds = _mean(self._lookup_seconds, time.perf_counter() - started)
            self._skipped = 0

    @property
    def is_cheap(self) -> bool:
        """Whether lookups take no more than `most_share` of the time."""
        return not self._draft_seconds or self._lookup_seconds <= self._most_share * self._draft_seconds

    def spawn(self) -> NgramDrafter:
        """A drafter with the same datastore and acceptance rates. Both learn from both texts."""
        drafter = copy(self)
        drafter._tail = []
        drafter._forget()
        return drafter

    def propose(self, path: Sequence[int]) -> Proposals:
        ranked = [(token, rate.value) for token, rate in self._ranked(path)]
        return sorted(ranked, key=lambda proposal: -proposal[1])[:MAX_PROPOSALS]

    def close(self) -> None:
        self._store.close()

    def _forget(self) -> None:
        self._path = ()
        self._continuations = []

    def _ranked(self, path: Sequence[int]) -> list[tuple[int, AcceptanceRate]]:
        """Tokens that follow a context and `path`, each with the best acceptance rate of all contexts that it
        follows.
        """
        best: dict[int, AcceptanceRate] = {}
        for continuations in self._continuations:
            rest = continuations.after(path)
            if rest is None:
                continue
            rates = self._acceptance[min(rest.length, MAX_CONTEXT) - 1]
            tokens, counts, total = rest.next_tokens()
            for token, count in zip(tokens, counts, strict=True):
                # +1: a token that came once of once isn't certain.
                rate = rates[sum(count / (total + 1) >= bound for bound in SHARES)]
                if token not in best or rate.value > best[token].value:
                    best[token] = rate
        return list(best.items())


def _mean(mean: float, value: float) -> float:
    """The moving mean after `value`. A mean of 0 stands for no value yet."""
    return mean + EMA_WEIGHT * (value - mean) if mean else value
