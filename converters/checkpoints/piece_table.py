"""Makes `tokenizer.bin`, the table of byte pairs, from a `tokenizer.model` whose rules the native tokenizer
implements.

sentencepiece merges those neighbours whose joined text is the piece with the highest score. So every way to
join a piece from two others is a merge, and its rank is that of the piece's score.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.checkpoints.byte_pair_table import packed_table
from ondevice.converters.checkpoints.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from ondevice.tokenizer import MAX_TOKENIZER_BYTES
from ondevice.tokenizer.base import byte_of
from ondevice.tokenizer.byte_pairs import CHARACTERS, PUTS_SPACE, SPECIAL, UNMATCHED
from ondevice.tokenizer.pieces import MARKUP_PIECE
from ondevice.tokenizer.sentencepiece_file import read_pieces, read_sentencepiece_file

_FLAGS = {USER_DEFINED: 0, CONTROL: SPECIAL | UNMATCHED, UNKNOWN: UNMATCHED, UNUSED: UNMATCHED}
"""Flags of pieces of these types, unless they look like markup."""


def piece_table(data: bytes) -> bytes | None:
    """The bytes of the table; None if it can't express everything in the file.

    data: a `tokenizer.model` that the library has loaded. Raises BundleError if it is damaged.
    """
    file = read_sentencepiece_file(data)
    pieces = list(read_pieces(data)) if file.merges else []
    ids = {text: token for token, (text, _, _) in enumerate(pieces)}
    if len(ids) < len(pieces) or not pieces or any(_is_odd(*piece) for piece in pieces):
        return None
    rows = _merges(pieces, ids)
    bytes_alone = {byte_of(text): token for token, (text, _, kind) in enumerate(pieces) if kind == BYTE}
    if rows is None or len(bytes_alone) != 256:
        return None
    scores = np.array([score for _, score, _ in pieces], "<f4").view("<i4")
    # Numbers in the order of the scores; to the library, -0 is below 0.
    ordered = np.where(scores < 0, scores ^ 0x7FFFFFFF, scores)
    ranks = np.unique(~ordered[rows[:, 2]], return_inverse=True)[1].astype(np.uint32)
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    return packed_table(
        CHARACTERS,
        PUTS_SPACE * bool(file.prefix),
        [text.encode() for text, _, _ in pieces],
        bytes_alone=[bytes_alone[bytes([byte])] for byte in range(256)],
        listed=[token for token, (_, _, kind) in enumerate(pieces) if kind in (NORMAL, BYTE)],
        merges=np.column_stack([rows, ranks])[order],
        added=[(token, flags) for token, piece in enumerate(pieces) if (flags := _flags(*piece)) is not None],
    )


def _is_odd(text: str, score: float, kind: int) -> bool:
    """Whether the table can't hold a piece, or the library treats the piece in a way that the table can't
    express.
    """
    return (
        kind not in (NORMAL, BYTE, *_FLAGS)
        or not math.isfinite(score)
        or (len(text) < 2 and kind not in (NORMAL, USER_DEFINED))
        or (kind != BYTE and bool(byte_of(text)))
    )


def _flags(text: str, score: float, kind: int) -> int | None:
    """The flags of a piece as an added token; None for a piece that is only made by merging."""
    # The library's tokenizer takes such a piece for user-defined, whatever its type is.
    if score == 0 and kind in (NORMAL, USER_DEFINED, UNUSED) and MARKUP_PIECE.fullmatch(text):
        return SPECIAL | (0 if kind == USER_DEFINED else UNMATCHED)
    return _FLAGS.get(kind)


def _merges(pieces: list[tuple[str, float, int]], ids: dict[str, int]) -> NDArray[np.uint32] | None:
    """The merges as rows of two tokens and the token that they make.

    None if a merge needs a character that isn't a piece, or makes a piece that the library splits again, or
    if there are more merges than a table can hold.
    """
    symbols = {character: -1 for character in set().union(*ids) - ids.keys()}
    symbols |= {text: token for token, (text, _, kind) in enumerate(pieces) if kind == NORMAL}
    rows = array("I")
    for token, (text, _, kind) in enumerate(pieces):
        for at in range(1, len(text)) if kind in (NORMAL, UNUSED) else ():
            left, right = symbols.get(text[:at]), symbols.get(text[at:])
            if left is None or right is None:
                continue
            if left < 0 or right < 0 or kind == UNUSED:
                return None
            rows.extend((left, right, token))
        if 4 * len(rows) > MAX_TOKENIZER_BYTES["byte_pairs"]:
            return None
    return np.array(rows, np.uint32).reshape(-1, 3)
