"""`tokenizer.bin` for sentencepiece's BPE: a table of pairs of characters instead of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ondevice.kernels import _native
from ondevice.tokenizer.base import SPACE_MARK, byte_of, library_errors, valid_unicode
from ondevice.tokenizer.byte_pairs import HEADER, PUTS_SPACE, SPECIAL, UNMATCHED
from ondevice.tokenizer.cutting import MAX_PIECE_CHARS
from ondevice.tokenizer.pieces import PieceVocabulary

_MARK = SPACE_MARK.encode()


class PieceTableTokenizer(PieceVocabulary):
    """The tokenizer of a `tokenizer.bin` of characters. It encodes as the `sentencepiece` library does."""

    _piece_chars = MAX_PIECE_CHARS

    def __init__(self, data: bytes, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> None:
        super().__init__(bos_id, eos_ids, add_bos)
        with library_errors("tokenizer.bin"):
            self._table = _native.BytePairs(data, [])
        puts_space = HEADER.unpack_from(data)[3] & PUTS_SPACE
        self.leading_space, self._prefix = ("one", SPACE_MARK) if puts_space else ("keep", "")
        self.vocab_size = self._table.size
        special = (self._table.added_tokens(flags) for flags in (SPECIAL, SPECIAL | UNMATCHED))
        self._silent = self._ends.union(*special)
        self._filling = frozenset(self._table.added_tokens(UNMATCHED))
        self.special_tokens = {name: token for token in self._silent if (name := self.piece(token))}

    def piece(self, token: int) -> str:
        if not 0 <= token < self.vocab_size:
            return ""
        return self._table.token_bytes(token).decode("utf-8", "replace")

    def token_id(self, name: str) -> int | None:
        text = valid_unicode(name).encode()
        token = max(self._table.added_token(text), self._table.merged_token(text))
        return token if token >= 0 else None

    def token_bytes(self, token: int) -> bytes:
        if token in self._silent or token in self._filling or not 0 <= token < self.vocab_size:
            return b""
        text = self._table.token_bytes(token)
        if text.startswith(b"<0x") and (byte := byte_of(text.decode("utf-8", "replace"))):
            return byte
        return text.replace(_MARK, b" ")

    def _merged(self, text: str) -> list[int]:
        return self._table.encode(text.replace(" ", SPACE_MARK), special=True)

    def _spell(self, piece: str) -> Iterator[int]:
        for character in piece:
            yield from self._table.encode(character, special=False)
