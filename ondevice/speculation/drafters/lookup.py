"""Prompt lookup: what followed the text's last tokens when they last occurred in it.

Saxena, "Prompt Lookup Decoding" (2023): a text that quotes itself, or its prompt, is a draft of itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.config import SamplingConfig
from ondevice.speculation.drafter import Drafter, Sureness
from ondevice.speculation.tree import Proposals

LONGEST = 4
PRIORS = (0.15, 0.3, 0.5, 0.7)
"""By how many tokens agree, from one to LONGEST: how sure a guess is at first."""
ENTRY_BYTES = 200
"""Of the index, per token and length: a key of up to LONGEST ids, a place, their share of the table."""


def index_bytes(tokens: int) -> int:
    """Memory of the index of a text of so many tokens, at most."""
    return tokens * LONGEST * ENTRY_BYTES


class Lookup(Drafter):
    """Where in the text every run of 1 to LONGEST tokens last occurred."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """Run of tokens -> the place behind where it last occurred, if a token is known there."""
        self._sureness = [Sureness(prior) for prior in PRIORS]

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        known = len(self._text)
        if text[:known] != self._text:
            self._text, self._ends, known = [], {}, 0
        for token in text[known:]:
            self.add(token)

    def add(self, token: int) -> None:
        place = len(self._text)
        # The runs that end here: now there is a token behind them.
        tail = tuple(self._text[-LONGEST:])
        for start in range(len(tail)):
            self._ends[tail[start:]] = place
        self._text.append(token)

    def propose(self, path: Sequence[int]) -> Proposals:
        found = self._found(path)
        return [] if found is None else [(found[0], self._sureness[found[1] - 1].chance)]

    def judge(self, token: int) -> None:
        found = self._found(())
        if found is not None:
            self._sureness[found[1] - 1].count(found[0] == token)

    def _found(self, path: Sequence[int]) -> tuple[int, int] | None:
        """The token behind the longest run that the text and `path` end with, and the run's length."""
        tail = (*self._text[-LONGEST:], *path)[-LONGEST:]
        for length in range(len(tail), 0, -1):
            place = self._ends.get(tail[-length:])
            if place is not None:
                return self._text[place], length
        return None
