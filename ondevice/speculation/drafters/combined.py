"""Several drafters as one: each knows something else of a text, and a pass verifies what all propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import ForwardOutput, Prune
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.tree import Draft, Proposals

MAX_PROPOSALS = 8
"""Maximum draft tokens behind a node: a less likely one never has its turn."""


class Combined(Drafter):
    """The likeliest draft tokens of all `members`, each of which is judged by itself.

    A token that several propose has the highest of their chances. They see the same text, so they are right
    and wrong together, and one's proposal says little beside another's.
    """

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        for member in self.members:
            member.begin(text, sampling)

    def observe(self, token: int, logits: Float32 | None) -> None:
        for member in self.members:
            member.observe(token, logits)

    def end_pass(self, output: ForwardOutput, node: int) -> None:
        for member in self.members:
            member.end_pass(output, node)

    def prepare(self, kv: KVCache, max_nodes: int, cancelled: IsCancelled) -> None:
        for member in self.members:
            member.prepare(kv, max_nodes, cancelled)

    def propose(self, path: Sequence[int]) -> Proposals:
        chances: dict[int, float] = {}
        for member in self.members:
            for token, chance in member.propose(path):
                if chance > chances.get(token, 0.0):
                    chances[token] = chance
        return sorted(chances.items(), key=lambda proposal: -proposal[1])[:MAX_PROPOSALS]

    def pruner(self, draft: Draft, row_share: float) -> Prune | None:
        """The first member's that has one: a single drafter uses the streams."""
        pruners = (member.pruner(draft, row_share) for member in self.members)
        return next((pruner for pruner in pruners if pruner is not None), None)

    def close(self) -> None:
        for member in self.members:
            member.close()


class WhileReading(Drafter):
    """A drafter that is asked only while passes wait for flash.

    Streams add rows to the upper layers for every token. Where all neurons are in memory, a pass takes its
    time for rows and streams cost what they bring. Where neurons are read, rows are nearly free.
    """

    def __init__(self, drafter: Drafter, reads: Callable[[], bool]) -> None:
        """reads: whether passes wait for flash now."""
        self._drafter = drafter
        self._reads = reads
        self._asked = False
        """Whether the newest draft grew from it."""

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        self._drafter.begin(text, sampling)

    def observe(self, token: int, logits: Float32 | None) -> None:
        self._drafter.observe(token, logits if self._asked else None)

    def end_pass(self, output: ForwardOutput, node: int) -> None:
        self._drafter.end_pass(output, node)

    def prepare(self, kv: KVCache, max_nodes: int, cancelled: IsCancelled) -> None:
        self._asked = self._reads()
        if self._asked:
            self._drafter.prepare(kv, max_nodes, cancelled)

    def propose(self, path: Sequence[int]) -> Proposals:
        return self._drafter.propose(path) if self._asked else []

    def pruner(self, draft: Draft, row_share: float) -> Prune | None:
        return self._drafter.pruner(draft, row_share) if self._reads() else None

    def close(self) -> None:
        self._drafter.close()
