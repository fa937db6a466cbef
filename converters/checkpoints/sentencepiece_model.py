"""Writes a sentencepiece model (a protocol buffer message), or adds pieces to one.

Field numbers are those of sentencepiece_model.proto. The resulting tokenizer merges the pair with the highest
score and normalises nothing but spaces.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_BPE = 2


def bpe_model(
    pieces: Sequence[tuple[str, float, int]],
    unk_id: int,
    bos_id: int,
    eos_id: int,
    *,
    adds_space: bool = True,
    strips_spaces: bool = False,
) -> bytes:
    """A serialised ModelProto.

    Args:
        pieces: (text, score, type) by id; spaces in a text are written as U+2581.
        unk_id, bos_id, eos_id: ids of the unknown token and of those at the ends of a text; -1 for none.
        adds_space: whether a space is put before a text.
        strips_spaces: whether spaces at a text's ends are left out, and all but one between words.

    Text that no piece spells falls back to bytes if there are pieces for them.
    """
    trainer = (
        _varint_field(3, _BPE)
        + _varint_field(4, len(pieces))
        + _varint_field(35, int(any(kind == BYTE for _, _, kind in pieces)))  # byte_fallback
        + _varint_field(40, unk_id)
        + _varint_field(41, bos_id)
        + _varint_field(42, eos_id)
        + _varint_field(43, -1)  # pad_id: none
    )
    normalizer = (
        _bytes_field(1, b"identity")
        + _varint_field(3, int(adds_space))  # add_dummy_prefix
        + _varint_field(4, int(strips_spaces))  # remove_extra_whitespaces
        + _varint_field(5, 1)  # escape_whitespaces
    )
    return piece_fields(pieces) + _bytes_field(2, trainer) + _bytes_field(3, normalizer)


def piece_fields(pieces: Sequence[tuple[str, float, int]]) -> bytes:
    """Pieces as fields of a ModelProto. Appended to a model, they become its last pieces."""
    return b"".join(
        _bytes_field(1, _bytes_field(1, text.encode()) + _float_field(2, score) + _varint_field(3, kind))
        for text, score, kind in pieces
    )


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)
