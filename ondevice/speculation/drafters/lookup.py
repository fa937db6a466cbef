"""Prompt lookup: drafts the token that followed the text's last tokens when they last occurred in it.

Saxena, "Prompt Lookup Decoding" (2023): a text that repeats parts of itself, or of its prompt, contains its
own draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.speculation.drafter import AcceptanceRate, Drafter
from ondevice.speculation.tree import Proposals

MAX_RUN = 4
"""Length of the longest run that is looked up, in tokens."""
PRIORS = (0.15, 0.3, 0.5, 0.7)
"""Prior acceptance rates by the length of the matching run, from 1 to MAX_RUN."""
ENTRY_BYTES = 140
"""Bytes of the index per token and run length: a key of up to MAX_RUN ids, a place, a share of the table.

Measured on texts without repeats: 97, and 136 while the table is moved to one of twice the size."""


def index_bytes(tokens: int) -> int:
    """Most bytes of the index for a text of `tokens` tokens."""
    return tokens * MAX_RUN * ENTRY_BYTES


class Lookup(Drafter):
    """A drafter with an index of the last occurrence of every run of 1 to MAX_RUN tokens in the text."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """Place after the last occurrence of each run of tokens that another token follows."""
        self._acceptance = [AcceptanceRate(prior) for prior in PRIORS]

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        known = len(self._text)
        if text[:known] != self._text:
            self._text = []
            self._ends = {}
            known = 0
        for token in text[known:]:
            self._add(token)

    def observe(self, token: int, logits: Float32 | None) -> None:
        if logits is not None and (match := self._match(())) is not None:
            proposed, length = match
            self._acceptance[length - 1].observe(proposed == token)
        self._add(token)

    def spawn(self) -> Lookup:
        return Lookup()

    def propose(self, path: Sequence[int]) -> Proposals:
        match = self._match(path)
        if match is None:
            return []
        token, length = match
        return [(token, self._acceptance[length - 1].value)]

    def _add(self, token: int) -> None:
        place = len(self._text)
        # The runs that ended here are now followed by a token.
        tail = tuple(self._text[-MAX_RUN:])
        for start in range(len(tail)):
            self._ends[tail[start:]] = place
        self._text.append(token)

    def _match(self, path: Sequence[int]) -> tuple[int, int] | None:
        """The token that followed the longest known run which ends the text and `path`, and the length of
        this run.
        """
        tail = (*self._text[-MAX_RUN:], *path)[-MAX_RUN:]
        for length in range(len(tail), 0, -1):
            place = self._ends.get(tail[-length:])
            if place is not None:
                return self._text[place], length
        return None
