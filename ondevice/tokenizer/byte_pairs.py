"""`tokenizer.bin`: byte-level BPE as a table that native code reads where it lies in memory.

`convert` makes it of a `tokenizer.json` whose rules the native code has. It encodes and decodes as the
`tokenizers` library does, and takes a tenth of its memory.
"""

from __future__ import annotations

import struct

from ondevice.errors import BundleError
from ondevice.kernels import _native
from ondevice.tokenizer.base import (
    MAX_SPECIAL_CHARS,
    LeadingSpace,
    Vocabulary,
    byte_letters,
    library_errors,
    valid_unicode,
)
from ondevice.tokenizer.composing import composed
from ondevice.tokenizer.cutting import MAX_FORM_CHARS, MAX_PIECE_CHARS, Piece

HEADER = struct.Struct("<8s9I")
"""Magic, version, splitting, flags, tokens, merged tokens, merges, added tokens, bytes of the added tokens'
texts, bytes of all texts."""
MAGIC = b"bytepair"
COMPOSES, WHOLE_TOKENS = 1, 2
"""Flags of a table."""
SPECIAL, COMPOSED = 1, 2
"""Flags of an added token."""
NO_TOKEN = (1 << 32) - 1
"""Stands for a byte that has no token, and so is left out."""
MAX_TOKENS = 1 << 22
MAX_TOKEN_BYTES = 4096
_FILE = "tokenizer.bin"


class BytePairTokenizer(Vocabulary):
    """The tokenizer of a `tokenizer.bin`."""

    leading_space: LeadingSpace = "keep"
    _piece_chars = MAX_PIECE_CHARS

    def __init__(self, data: bytes, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> None:
        super().__init__(bos_id, eos_ids, add_bos)
        with library_errors(_FILE):
            self._table = _native.BytePairs(data, sorted(self._ends))
        self.vocab_size = self._table.size
        self._letters = byte_letters()
        self._alphabet = {letter: byte for byte, letter in enumerate(self._letters)}
        self._silent = frozenset({*self._table.special_tokens, *self._ends})
        self.special_tokens = {name: token for token in self._silent if (name := self.piece(token))}

    def piece(self, token: int) -> str:
        if not 0 <= token < self.vocab_size:
            return ""
        text = self._table.token_bytes(token)
        if self._table.is_added(token):
            return text.decode("utf-8", "replace")
        return "".join(self._letters[byte] for byte in text)

    def token_id(self, name: str) -> int | None:
        name = valid_unicode(name)
        token = self._table.added_token(name.encode())
        if token < 0 and self._alphabet.keys() >= set(name):
            token = self._table.merged_token(bytes(self._alphabet[letter] for letter in name))
        return token if token >= 0 else None

    def token_bytes(self, token: int) -> bytes:
        return (
            b""
            if token in self._silent or not 0 <= token < self.vocab_size
            else self._table.token_bytes(token)
        )

    def begins_word(self, token: int) -> bool:
        return self.token_bytes(token).startswith(b" ")

    def _fits(self, text: str) -> bool:
        return not self._table.composes or text.isascii() or len(composed(text)) <= MAX_FORM_CHARS

    def _encode_piece(self, piece: Piece, special: bool) -> list[int]:
        text = valid_unicode(piece.text)
        if not self._table.composes or composed(text) == text:
            return self._table.encode(text, special)
        ids: list[int] = []
        for token, stretch in self._table.cut(text, special):
            ids += [token] if token >= 0 else self._table.encode(composed(stretch), special, composed=True)
        return ids


def table_bytes(start: bytes) -> int:
    """Upper bound of the bytes that reading a table takes, the file aside. start: the file's first bytes.

    A pattern that finds special tokens' names takes 100 times their length, and each name 250 bytes.
    """
    if len(start) < HEADER.size:
        raise BundleError(f"{_FILE} can't be used: it has {len(start)} bytes and ends in its header")
    *_, added, length, _ = (int(number) for number in HEADER.unpack_from(start)[1:])
    most = 4 * MAX_SPECIAL_CHARS
    return 110 * min(length, most) + 250 * min(added, most) + (1 << 18)
