"""Several drafters as one: each knows something else of a text, and a pass verifies all their guesses."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.model.kv_cache import KVCache
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.tree import Proposals

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

    def prepare(self, kv: KVCache, most_nodes: int) -> None:
        for member in self.members:
            member.prepare(kv, most_nodes)

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
