"""`tokenizer.model`: sentencepiece's file, read by its library."""

from __future__ import annotations

from collections.abc import Iterator

from ondevice.errors import BundleError
from ondevice.tokenizer.base import (
    MAX_TOKEN_CHARS,
    SPACE_MARK,
    byte_of,
    library_errors,
    valid_unicode,
)
from ondevice.tokenizer.pieces import MARKUP_PIECE, PieceVocabulary
from ondevice.tokenizer.sentencepiece_file import read_sentencepiece_file


class SentencePieceTokenizer(PieceVocabulary):
    """The tokenizer of a `tokenizer.model`: sentencepiece's protobuf, with any of its algorithms."""

    def __init__(self, data: bytes, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> None:
        import sentencepiece

        super().__init__(bos_id, eos_ids, add_bos)
        file = read_sentencepiece_file(data)
        self._prefix, self._piece_chars = file.prefix, file.piece_chars
        self.leading_space = file.leading_space
        self._library = library = sentencepiece.SentencePieceProcessor()
        with library_errors("tokenizer.model"):
            library.LoadFromSerializedProto(file.data)
            self.vocab_size = library.vocab_size()
            ids = list(range(self.vocab_size))
            self._pieces: list[str] = library.id_to_piece(ids)
            fills = zip(library.is_unused(ids), library.is_unknown(ids), strict=True)
            self._filling = frozenset(i for i, kinds in enumerate(fills) if any(kinds))
            control = {i for i, steers in enumerate(library.is_control(ids)) if steers}
            marks = [i for i in ids if MARKUP_PIECE.fullmatch(self._pieces[i]) and i not in control]
            # The library doesn't tell which pieces are user-defined; such a piece has score 0.
            user = {i for i in marks if library.get_score(i) == 0.0 and not self._is_byte_or_unknown(i)}
            self._silent = frozenset(control | user) | self._ends
        if any(len(piece) > MAX_TOKEN_CHARS for piece in self._pieces):
            raise BundleError(f"tokenizer.model has a piece of more than {MAX_TOKEN_CHARS} characters")
        self.special_tokens = {self._pieces[i]: i for i in self._silent if i < self.vocab_size}

    def piece(self, token: int) -> str:
        return self._pieces[token] if 0 <= token < self.vocab_size else ""

    def token_id(self, name: str) -> int | None:
        token: int = self._library.piece_to_id(valid_unicode(name))
        return token if self._pieces[token] == name else None

    def token_bytes(self, token: int) -> bytes:
        if token in self._silent or token in self._filling or not 0 <= token < self.vocab_size:
            return b""
        piece = self._pieces[token]
        # A call of the library is slow, so it is made only for names that bytes can have.
        if piece.startswith("<0x") and self._library.is_byte(token):
            return byte_of(piece)
        return piece.replace(SPACE_MARK, " ").encode()

    def _is_byte_or_unknown(self, token: int) -> bool:
        return bool(self._library.is_byte(token) or self._library.is_unknown(token))

    def _is_space(self, character: str) -> bool:
        # A library that strips spaces and puts one before every piece must not strip other white space.
        return character == " " if self.leading_space == "each" else character.isspace()

    def _merged(self, text: str) -> list[int]:
        with library_errors("tokenizer.model"):
            ids: list[int] = self._library.encode(text)
        return ids

    def _spell(self, piece: str) -> Iterator[int]:
        for character in piece:
            token = self._library.piece_to_id(character)
            if self._library.is_unknown(token):
                yield from (self._library.piece_to_id(f"<0x{byte:02X}>") for byte in character.encode())
            else:
                yield token
