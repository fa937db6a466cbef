"""The rules of sentencepiece's vocabularies: spaces are marks, some bytes are pieces, some pieces are silent.

Merging is done by the library (`sentencepiece_model.py`) or with a table (`piece_table.py`).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator

from ondevice.tokenizer.base import SPACE_MARK, Vocabulary, valid_unicode
from ondevice.tokenizer.cutting import Piece

MARKUP_PIECE = re.compile(r"<[^\s<>]*[A-Za-z][^\s<>]*>|\[[^\s\[\]]*[A-Za-z][^\s\[\]]*\]")


class PieceVocabulary(Vocabulary):
    """The base class of tokenizers that follow sentencepiece's rules.

    Special tokens (`_silent`) are control pieces, and user-defined pieces that look like markup (`<...>`,
    `[...]`). The unknown piece and unused ones (`_filling`) add nothing to a text.
    """

    _silent: frozenset[int]
    _filling: frozenset[int]
    _prefix: str
    """What stands before a text."""

    def begins_word(self, token: int) -> bool:
        return self.piece(token).startswith(SPACE_MARK)

    def _fits(self, text: str) -> bool:
        return True

    def _encode_piece(self, piece: Piece, special: bool) -> list[int]:
        text, first = piece.text, piece.first
        ids: list[int] = []
        start = 0
        for match in self.special_pattern.finditer(text) if special else ():
            ids += [*self._encode_plain(text[start : match.start()], first), self.special_tokens[match[0]]]
            start, first = match.end(), True
        return ids + self._encode_plain(text[start:], first)

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        """The ids of text without special tokens. first: whether it begins a text, so that it gets the
        prefix.
        """
        text = valid_unicode(text)
        if not text:
            return []
        ids = self._merged(self._prefix + text if first else text)
        if self._silent.isdisjoint(ids):
            return ids
        # User-defined names always become their token, so they are spelt out as text.
        return [part for i in ids for part in (self._spell(self.piece(i)) if i in self._silent else (i,))]

    @abstractmethod
    def _merged(self, text: str) -> list[int]:
        """Ids of a valid text, with user-defined pieces and without control pieces."""

    @abstractmethod
    def _spell(self, piece: str) -> Iterator[int]:
        """Yields the tokens that stand for the characters of a piece, one by one."""
