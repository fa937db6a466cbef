"""Self-drafting that reads no neurons: the model itself, restricted to those that are in memory.

A chain of guesses, each of which a pass over one token gives that multiplies what happens to be held (ideas:
Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916, which leave out layers instead). It ends where it
has become unsure, as in SVIP (arXiv 2411.18462).
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.config import SamplingConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafter import Drafter, IsCancelled
from ondevice.speculation.ranking import Ranking
from ondevice.speculation.tree import Proposals

MOST_GUESSES = 6
LEAST_CHANCE = 0.4
"""That all guesses so far are right: below it the chain ends."""


class ResidentDrafter(Drafter):
    """A chain behind the text, and what else each of its places may hold."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self._ranking = Ranking()
        self._text: list[int] = []
        self._chain: list[int] = []
        self._guesses: list[list[tuple[int, float]]] = []

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        self._text, self._chain, self._guesses = list(text), [], []
        self._ranking.begin(sampling)

    def add(self, token: int) -> None:
        self._text.append(token)

    def prepare(self, kv: KVCache, most_nodes: int, cancelled: IsCancelled) -> None:
        self._chain, self._guesses = [], []
        start, chance, last = kv.length, 1.0, self._text[-1]
        most = min(most_nodes - 1, MOST_GUESSES, kv.room - start)
        try:
            while len(self._chain) < most and chance >= LEAST_CHANCE:
                batch = ForwardBatch([last], resident_only=True)
                found = self._transformer.run(batch, kv, cancelled)
                logits = self._transformer.checked_logits(found.hidden)[0]
                history = [*self._text, *self._chain]
                self._guesses.append(self._ranking.rank(logits, len(history), history))
                last, likely = self._guesses[-1][0]
                self._chain.append(last)
                chance *= likely
        finally:
            kv.truncate(start)

    def propose(self, path: Sequence[int]) -> Proposals:
        depth = len(path)
        on_chain = depth < len(self._guesses) and list(path) == self._chain[:depth]
        return self._guesses[depth] if on_chain else []
