"""What every drafter is, and how often its guesses have lately been right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ondevice.backends.base import Float32
from ondevice.speculation.tree import Proposals

SURENESS_DECAY = 0.97
"""Of what is known about a kind of guess, per guess of its kind."""


class Drafter(Protocol):
    """Guesses tokens behind a text, which it is told as it grows."""

    def begin(self, text: list[int]) -> None:
        """From here on the text is `text`, token ids: the last one's continuation, or another."""
        ...

    def add(self, token: int) -> None:
        """`token` came behind the text."""
        ...

    def propose(self, path: Sequence[int]) -> Proposals:
        """What may follow the text and the guesses `path` behind it, likeliest first."""
        ...

    def judge(self, token: int) -> None:
        """`token` follows the text: learn how good `propose(())` was."""
        ...

    def learn(self, token: int, logits: Float32) -> None:
        """logits (V,): what the model says may follow `token`, at the end of the text."""
        ...


class Sureness:
    """How often guesses of one kind are right: a decayed mean that begins with `prior`."""

    def __init__(self, prior: float) -> None:
        self.chance = prior

    def count(self, right: bool) -> None:
        self.chance += (1 - SURENESS_DECAY) * (right - self.chance)
