"""`tokenizer.model`: sentencepiece's own file, read by sentencepiece's own library."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ondevice.tokenizer.base import (
    SPACE_MARK,
    LeadingSpace,
    LibraryErrors,
    Vocabulary,
    byte_of,
    valid_unicode,
)

_MARKUP_PIECE = re.compile(r"<[^\s<>]*[A-Za-z][^\s<>]*>|\[[^\s\[\]]*[A-Za-z][^\s\[\]]*\]")


class SentencePieceTokenizer(Vocabulary):
    """A `tokenizer.model`: sentencepiece's protobuf, any of its algorithms.

    Special tokens are control pieces, and user-defined pieces that look like markup (`<...>`, `[...]`).
    """

    def __init__(self, data: bytes, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> None:
        import sentencepiece

        super().__init__(bos_id, eos_ids, add_bos)
        self._library = library = sentencepiece.SentencePieceProcessor()
        with LibraryErrors("tokenizer.model"):
            library.LoadFromSerializedProto(data)
            self.vocab_size = library.vocab_size()
            self._unknown: int = library.unk_id()
            ids = range(self.vocab_size)
            self._pieces: list[str] = library.id_to_piece(list(ids))
            control = {i for i in ids if library.is_control(i)}
            marks = [i for i in ids if _MARKUP_PIECE.fullmatch(self._pieces[i]) and i not in control]
            # The library doesn't tell user-defined pieces; they are the ones that score 0 among these.
            user = {i for i in marks if library.get_score(i) == 0.0 and not self._is_byte_or_unknown(i)}
            self._silent = frozenset(control | user) | self._ends
            self.leading_space = self._probe_leading_space()
        self.special_tokens = {self._pieces[i]: i for i in self._silent if i < self.vocab_size}
        names = sorted(self.special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(text) if special else ():
            ids += [*self._encode_plain(text[start : match.start()]), self.special_tokens[match[0]]]
            start = match.end()
        return self._finished(ids + self._encode_plain(text[start:]), add_bos)

    def piece(self, token: int) -> str:
        return self._pieces[token] if 0 <= token < self.vocab_size else ""

    def token_bytes(self, token: int) -> bytes:
        if token in self._silent or not 0 <= token < self.vocab_size:
            return b""
        if token == self._unknown:
            return " ⁇ ".encode()
        piece = self._pieces[token]
        # The library takes its time over every question, and bytes have no other names.
        if piece.startswith("<0x") and self._library.is_byte(token):
            return byte_of(piece)
        return piece.replace(SPACE_MARK, " ").encode()

    def begins_word(self, token: int) -> bool:
        return self.piece(token).startswith(SPACE_MARK)

    def _is_byte_or_unknown(self, token: int) -> bool:
        return bool(self._library.is_byte(token) or self._library.is_unknown(token))

    def _encode_plain(self, text: str) -> list[int]:
        text = valid_unicode(text)
        if not text:
            return []
        with LibraryErrors("tokenizer.model"):
            ids: list[int] = self._library.encode(text)
        if self._silent.isdisjoint(ids):
            return ids
        # The library turns user-defined names into their token whoever wrote them: spell those out.
        return [part for i in ids for part in (self._spell(self._pieces[i]) if i in self._silent else (i,))]

    def _spell(self, piece: str) -> Iterator[int]:
        for character in piece:
            token = self._library.piece_to_id(character)
            if self._library.is_unknown(token):
                yield from (self._library.piece_to_id(f"<0x{byte:02X}>") for byte in character.encode())
            else:
                yield token

    def _probe_leading_space(self) -> LeadingSpace:
        """The model file's rule isn't exposed, so ask: a space piece twice leaves both, one or none."""
        probe = next((i for i, piece in enumerate(self._pieces) if piece.startswith(SPACE_MARK)), None)
        lone = self._library.piece_to_id(SPACE_MARK)
        if self._pieces[lone : lone + 1] == [SPACE_MARK]:
            probe = lone
        if probe is None:
            return "keep"
        rest = self._pieces[probe].replace(SPACE_MARK, " ")
        kept = 2 * len(rest) - len(self._library.decode([probe, probe]))
        return "keep" if kept == 0 else "one" if kept == 1 else "each"
