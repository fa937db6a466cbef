"""A second, smaller model drafts (Leviathan et al., arXiv 2211.17192), in the target's own tokens.

It is asked behind the likeliest guess each time, so a draft is a chain where it is sure and a small tree
where it isn't, and ends where what it says is no longer worth a pass of its own (as SVIP, arXiv 2411.18462,
ends drafts by how sure the draft model is).
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.model.kv_cache import KVCache
from ondevice.speculation.draft_context import DraftContext, DraftModel
from ondevice.speculation.drafter import Drafter, IsCancelled
from ondevice.speculation.ranking import Ranking
from ondevice.speculation.tree import Proposals

BRANCHES = 3
"""Guesses behind a node: going back to another one costs a pass over its path."""


class ModelDrafter(Drafter):
    """The second model's likeliest tokens; where tokens are sampled, those that the same noise makes win."""

    def __init__(self, model: DraftModel, vocab_size: int) -> None:
        """model: its vocabulary is the target's. vocab_size: the target's rows, which may be fewer."""
        self._model = model
        self._context = DraftContext(model)
        self._vocab_size = vocab_size
        self._ranking = Ranking(BRANCHES)
        self._cancelled: IsCancelled | None = None
        """Of the draft that grows."""
        self._text: list[int] = []
        self._path: tuple[int, ...] = ()
        """What has been drawn since the draft was begun."""
        self._logits: dict[tuple[int, ...], Float32] = {}
        """Of that draft, behind each path that it was asked behind."""

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        self._text = list(text)
        self._forget()
        self._ranking.begin(sampling)

    def add(self, token: int) -> None:
        self._text.append(token)
        self._path = (*self._path, token)

    def prepare(self, kv: KVCache, most_nodes: int, cancelled: IsCancelled) -> None:
        self._cancelled = cancelled
        self._forget()

    def propose(self, path: Sequence[int]) -> Proposals:
        tokens = [*self._text, *path]
        logits = self._context.logits(tokens, self._cancelled)
        if logits is None:
            return []
        self._logits[tuple(path)] = logits = logits[: self._vocab_size]
        return self._ranking.rank(logits, len(tokens), tokens)

    def judge(self, token: int) -> None:
        logits = self._logits.get(self._path)
        if logits is not None:
            self._ranking.judge(logits, len(self._text), token, self._text)

    def close(self) -> None:
        self._forget()
        self._model.close()

    def _forget(self) -> None:
        self._path = ()
        self._logits.clear()
