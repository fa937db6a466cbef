"""Self-drafting without reads: the model itself, restricted to the neurons that are in memory.

The draft is a chain. Each token comes from a forward pass over one token that multiplies only neurons in
memory (ideas: Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916, which leave out layers instead). The
chain ends when it becomes unlikely, as in SVIP (arXiv 2411.18462).
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.ranking import Ranking
from ondevice.speculation.tree import Proposals

MAX_CHAIN = 6
"""Maximum draft tokens of the chain."""
MIN_CHANCE = 0.4
"""Smallest chance that the whole chain is right; below it, the chain ends."""


class ResidentDrafter(Drafter):
    """Drafts a chain, with the other candidates for each of its places."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self._ranking = Ranking(tokens=transformer.draft_tokens)
        self._text: list[int] = []
        self._chain: list[int] = []
        self._proposals: list[list[tuple[int, float]]] = []
        """Proposals by depth: those that follow the chain up to that depth."""

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        self._text = list(text)
        self._forget()
        self._ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        self._text.append(token)

    def beside(self) -> ResidentDrafter:
        return ResidentDrafter(self._transformer)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._forget()
        start = kv.length
        chance = 1.0
        last = self._text[-1]
        max_chain = min(max_nodes - 1, MAX_CHAIN, kv.room - start)
        try:
            while len(self._chain) < max_chain and chance >= MIN_CHANCE:
                batch = ForwardBatch([last], resident_only=True)
                output = self._transformer.run(batch, kv, cancelled)
                logits = self._transformer.draft_logits(output.hidden)[0]
                history = [*self._text, *self._chain]
                self._proposals.append(self._ranking.rank(logits, len(history), history))
                last, likeliest = self._proposals[-1][0]
                self._chain.append(last)
                chance *= likeliest
        finally:
            kv.truncate(start)

    def propose(self, path: Sequence[int]) -> Proposals:
        depth = len(path)
        on_chain = depth < len(self._proposals) and list(path) == self._chain[:depth]
        return self._proposals[depth] if on_chain else []

    def _forget(self) -> None:
        self._chain = []
        self._proposals = []
