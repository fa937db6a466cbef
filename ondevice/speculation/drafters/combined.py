"""Several drafters as one: each knows something else of a text, and a pass verifies all their guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.backends.base import Array, Float32
from ondevice.config import SamplingConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import ForwardOutput, PrunedDraft
from ondevice.speculation.drafter import Drafter, IsCancelled
from ondevice.speculation.tree import Draft, Proposals

MOST_GUESSES = 8
"""Behind a node: what is less likely than so many others never has its turn."""


class Combined(Drafter):
    """The likeliest guesses of all `members`, who are judged each by themselves.

    A token that several guess has the chance of whoever is surest: they see the same text, so they are right
    and wrong together, and what one adds to another's guess is little.
    """

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        for member in self.members:
            member.begin(text, sampling)

    def add(self, token: int) -> None:
        for member in self.members:
            member.add(token)

    def prepare(self, kv: KVCache, most_nodes: int, cancelled: IsCancelled) -> None:
        for member in self.members:
            member.prepare(kv, most_nodes, cancelled)

    @property
    def wants_streams(self) -> bool:
        return any(member.wants_streams for member in self.members)

    def prune(self, draft: Draft, entering: Array, row_share: float) -> PrunedDraft:
        for member in self.members:
            chosen = member.prune(draft, entering, row_share)
            if chosen.streams or len(chosen.tokens) < len(draft):
                return chosen
        return super().prune(draft, entering, row_share)

    def entered(self, found: ForwardOutput, node: int) -> None:
        for member in self.members:
            member.entered(found, node)

    def propose(self, path: Sequence[int]) -> Proposals:
        chances: dict[int, float] = {}
        for member in self.members:
            for token, chance in member.propose(path):
                if chance > chances.get(token, 0.0):
                    chances[token] = chance
        return sorted(chances.items(), key=lambda guess: -guess[1])[:MOST_GUESSES]

    def judge(self, token: int) -> None:
        for member in self.members:
            member.judge(token)

    def learn(self, token: int, logits: Float32) -> None:
        for member in self.members:
            member.learn(token, logits)

    def close(self) -> None:
        for member in self.members:
            member.close()


class WhileReading(Drafter):
    """A drafter that computes, asked only while passes wait for flash: elsewhere it costs what it brings.

    Streams take rows of the upper layers for every token. Where all neurons are in memory, rows are what a
    pass takes its time for; where they are read, they are nearly free.
    """

    def __init__(self, drafter: Drafter, reads: Callable[[], bool]) -> None:
        self._drafter = drafter
        self._reads = reads
        self._asked = False
        """In this pass."""

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        self._drafter.begin(text, sampling)

    def add(self, token: int) -> None:
        self._drafter.add(token)

    def prepare(self, kv: KVCache, most_nodes: int, cancelled: IsCancelled) -> None:
        self._asked = self._reads()
        if self._asked:
            self._drafter.prepare(kv, most_nodes, cancelled)

    def propose(self, path: Sequence[int]) -> Proposals:
        return self._drafter.propose(path) if self._asked else []

    def judge(self, token: int) -> None:
        if self._asked:
            self._drafter.judge(token)

    @property
    def wants_streams(self) -> bool:
        return self._drafter.wants_streams and self._reads()

    def prune(self, draft: Draft, entering: Array, row_share: float) -> PrunedDraft:
        return self._drafter.prune(draft, entering, row_share)

    def entered(self, found: ForwardOutput, node: int) -> None:
        self._drafter.entered(found, node)

    def close(self) -> None:
        self._drafter.close()
