"""`tokenizer.bin`: byte-level BPE as a table, which native code reads without copying it.

`piece_table.py` is for tables of characters.

`convert` writes it for a `tokenizer.json` whose rules the native code implements. It encodes and decodes as
the `tokenizers` library does, in a tenth of the memory.
"""

from __future__ import annotations

import re
import struct
import unicodedata

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
from ondevice.tokenizer.cutting import MAX_FORM_CHARS, MAX_PIECE_CHARS, Piece

HEADER = struct.Struct("<8s9I")
"""Magic, version, splitting, flags, tokens, merged tokens, merges, added tokens, bytes of the added tokens'
texts, bytes of all texts."""
MAGIC = b"bytepair"
CHARACTERS = 5
"""The way of splitting of a table that merges characters."""
COMPOSES, IGNORES_MERGES, PUTS_SPACE = 1, 2, 4
"""Flags of a table."""
SPECIAL, COMPOSED = 1, 2
"""Flags of an added token."""
UNMATCHED = COMPOSED
"""The second flag in a table that merges characters: a text's pieces never become this token by its name."""
NO_TOKEN = (1 << 32) - 1
"""Stands for a byte without a token; it is left out."""
MAX_TOKENS = 1 << 22
MAX_TOKEN_BYTES = 4096
MAX_ADDED_BYTES = 1 << 19
_FILE = "tokenizer.bin"
# Made by tests/tokenizer/unicode_tables.py. To the library these are ordinary characters: nothing moves past
# them, and they are composed with nothing.
_LATER = re.compile(
    "(["
    "\u05c8-\u05c9\u07fd\u0897-\u089f\u08ca-\u08d3\u09fe\u0c3c\u0d3b-\u0d3c\u0eba\u1715"
    "\u1abf-\u1af0\u1df6-\u1dfa\ua82c\U000105c9\U000105d2\U000105da\U000105e4\U00010d24-\U00010d27"
    "\U00010d69-\U00010d6d\U00010eab-\U00010eac\U00010ecb-\U00010ecf\U00010ef0-\U00010efb"
    "\U00010efd-\U00010eff\U00010f46-\U00010f50\U00010f82-\U00010f85\U00011070\U0001133b"
    "\U00011382-\U00011385\U0001138b\U0001138e\U00011390-\U00011391\U000113c2\U000113c5"
    "\U000113c7-\U000113c8\U000113ce-\U000113d0\U0001145e\U00011839-\U0001183a\U00011935\U00011938"
    "\U0001193d-\U0001193e\U00011943\U000119e0\U00011a34\U00011a47\U00011a99\U00011d42"
    "\U00011d44-\U00011d45\U00011d97\U00011f41-\U00011f42\U0001611e\U00016121-\U00016129\U0001612f"
    "\U00016d63\U00016d67-\U00016d6a\U00016ff0-\U00016ff1\U0001d127-\U0001d128\U0001d250-\U0001d252"
    "\U0001d25b-\U0001d25c\U0001d25f\U0001d280-\U0001d281\U0001e08f\U0001e130-\U0001e136\U0001e2ae"
    "\U0001e2ec-\U0001e2ef\U0001e4ec-\U0001e4ef\U0001e5ee-\U0001e5ef\U0001e6e3\U0001e6e6"
    "\U0001e6ee-\U0001e6ef\U0001e6f5"
    "])"
)


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
        special = (self._table.added_tokens(flags) for flags in (SPECIAL, SPECIAL | COMPOSED))
        self._silent = self._ends.union(*special)
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


def merges_characters(start: bytes) -> bool:
    """Whether a table merges characters instead of bytes. start: the first bytes of its file."""
    return len(start) >= HEADER.size and HEADER.unpack_from(start)[2] == CHARACTERS


def table_bytes(start: bytes) -> int:
    """An upper bound of the bytes that reading a table takes in addition to the table's file.

    start: the file's first bytes. The pattern of special tokens' names takes 100 times their length, and each
    name 350 bytes; the tokens of characters take 256 KiB.
    """
    if len(start) < HEADER.size:
        raise BundleError(f"{_FILE} can't be used: it has {len(start)} bytes and ends in its header")
    *_, added, length, _ = (int(number) for number in HEADER.unpack_from(start)[1:])
    most = 4 * MAX_SPECIAL_CHARS
    fixed = 1 << (19 if merges_characters(start) else 18)
    return 110 * min(length, most) + 350 * min(added, most) + fixed


def composed(text: str) -> str:
    """`text` in Unicode's form C, as the `tokenizers` library makes it, whatever Unicode version Python has.

    Characters newer than Unicode 9 aren't reordered.
    """
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return text
    return "".join(unicodedata.normalize("NFC", part) for part in _LATER.split(text))
