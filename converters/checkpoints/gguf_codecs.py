"""Decodes GGUF's quantised types: blocks of bytes become float32 values.

A row of a matrix is stored in blocks of 32 or 256 values, each with separate scales. Legend: n blocks; q code
of a value; d, m float16 scale and offset of a block; sc, mn integer scales and offsets of its groups.
Products are rounded to float32 in the order of the formulas, as in the format's reference code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.codes import TABLE
from ondevice.config import MXFP4, RowFormat
from ondevice.config import TILE_FORMATS as FORMATS_OF_TILES

Bytes: TypeAlias = NDArray[np.uint8]
Float32: TypeAlias = NDArray[np.float32]
Decoder: TypeAlias = Callable[[Bytes, Float32], None]
"""A function that fills (n, values of a block) float32 from (n, bytes of a block)."""

_FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Twice the values of 4-bit floating point (E2M1), by code."""
_CHUNK_VALUES = 1 << 15
"""Values decoded at a time: few enough that the arrays of all steps stay in the second-level cache."""


def decode(kind: str, blocks: Bytes, out: Float32) -> None:
    """Decode contiguous blocks (n, bytes of a block) of the type `kind` into `out` (n, values of a block)."""
    decoder = DECODERS[kind]
    step = max(1, _CHUNK_VALUES // out.shape[1])
    # Scales of damaged files may be infinite or NaN. Whoever uses the values checks them.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            decoder(blocks[start : start + step], out[start : start + step])


def _half(blocks: Bytes, offset: int) -> Float32:
    """The float16 numbers at byte `offset` of every block, as float32: (n, 1)."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """The 4-bit codes in B bytes of each block: (n, 2B). Each `group` bytes give first their low nibbles,
    then their high ones.
    """
    stretches = packed.reshape(len(packed), -1, 1, group)
    codes = np.empty((len(packed), stretches.shape[1], 2, group), dtype=np.uint8)
    np.bitwise_and(stretches, 15, out=codes[:, :, :1])
    np.right_shift(stretches, 4, out=codes[:, :, 1:])
    return codes.reshape(len(packed), -1)


def _pairs_of_bits(packed: Bytes, stretch: int) -> Bytes:
    """The 2-bit codes in B bytes of each block: (n, 4B). Each `stretch` bytes give first their lowest two
    bits, then the next two.
    """
    stretches = packed.reshape(len(packed), -1, 1, stretch)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    codes: Bytes = (stretches >> shifts) & np.uint8(3)
    return codes.reshape(len(packed), -1)


def _bits(packed: Bytes, stretch: int) -> Bytes:
    """The bits in B bytes of each block: (n, 8B). Each `stretch` bytes give first their lowest bits."""
    stretches = packed.reshape(len(packed), -1, 1, stretch)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
    bits: Bytes = (stretches >> shifts) & np.uint8(1)
    return bits.reshape(len(packed), -1)


def _scale(codes: Bytes | NDArray[np.int8], scales: Float32, out: Float32) -> None:
    """Set out = scales * codes. scales: (n, G), for G groups of equal length in each block."""
    groups = out.reshape(len(out), scales.shape[1], -1)
    groups[...] = codes.reshape(groups.shape)
    groups *= scales[:, :, None]


def _shift(offsets: Float32, out: Float32) -> None:
    """Add offsets (n, G) to the groups of `out`, in place."""
    groups = out.reshape(len(out), offsets.shape[1], -1)
    groups += offsets[:, :, None]


def _signed(codes: Bytes, zero: int) -> NDArray[np.int8]:
    """codes - zero, computed in place."""
    np.subtract(codes, np.uint8(zero), out=codes)
    return codes.view(np.int8)


def _q4_0(blocks: Bytes, out: Float32) -> None:
    """Decode Q4_0: d (q - 8). Bytes of a block: d, 16 of nibbles."""
    _scale(_signed(_nibbles(blocks[:, 2:], 16), 8), _half(blocks, 0), out)


def _q4_1(blocks: Bytes, out: Float32) -> None:
    """Decode Q4_1: d q + m. Bytes of a block: d, m, 16 of nibbles."""
    _scale(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), out)
    _shift(_half(blocks, 2), out)


def _q5_0(blocks: Bytes, out: Float32) -> None:
    """Decode Q5_0: d (q - 16). Bytes of a block: d, 4 of fifth bits, 16 of nibbles."""
    _scale(_signed(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16), _half(blocks, 0), out)


def _q5_1(blocks: Bytes, out: Float32) -> None:
    """Decode Q5_1: d q + m. Bytes of a block: d, m, 4 of fifth bits, 16 of nibbles."""
    _scale(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), out)
    _shift(_half(blocks, 2), out)


def _five_bits(fifth: Bytes, nibbles: Bytes) -> Bytes:
    codes = _nibbles(nibbles, 16)
    codes |= np.unpackbits(np.ascontiguousarray(fifth), axis=1, bitorder="little") << np.uint8(4)
    return codes


def _q8_0(blocks: Bytes, out: Float32) -> None:
    """Decode Q8_0: d q. Bytes of a block: d, 32 signed."""
    _scale(blocks[:, 2:].view(np.int8), _half(blocks, 0), out)


def _q2_k(blocks: Bytes, out: Float32) -> None:
    """Decode Q2_K: d sc q - m mn, 16 groups. Bytes of a block: 16 of sc (low nibble) and mn, 64 of codes, d,
    m.
    """
    both = blocks[:, :16]
    _scale(_pairs_of_bits(blocks[:, 16:80], 32), _half(blocks, 80) * (both & 15), out)
    _shift(-(_half(blocks, 82) * (both >> 4)), out)


def _q3_k(blocks: Bytes, out: Float32) -> None:
    """Decode Q3_K: d (sc - 32) (q - 4), 16 groups. Bytes of a block: 32 of third bits, 64 of codes, 12 of sc,
    d.
    """
    codes = _pairs_of_bits(blocks[:, 32:96], 32)
    codes |= _bits(blocks[:, :32], 32) << np.uint8(2)
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8], 8) | _pairs_of_bits(packed[:, 8:], 4) << np.uint8(4)
    _scale(_signed(codes, 4), _half(blocks, 108) * _signed(scales, 32), out)


def _q4_k(blocks: Bytes, out: Float32) -> None:
    """Decode Q4_K: d sc q - m mn, 8 groups. Bytes of a block: d, m, 12 of sc and mn, 128 of nibbles."""
    scales, offsets = _six_bit_scales(blocks)
    _scale(_nibbles(blocks[:, 16:], 32), scales, out)
    _shift(offsets, out)


def _q5_k(blocks: Bytes, out: Float32) -> None:
    """Decode Q5_K: d sc q - m mn, 8 groups. Bytes of a block: d, m, 12 of sc and mn, 32 of fifth bits, 128 of
    nibbles.
    """
    scales, offsets = _six_bit_scales(blocks)
    codes = _nibbles(blocks[:, 48:], 32)
    codes |= _bits(blocks[:, 16:48], 32) << np.uint8(4)
    _scale(codes, scales, out)
    _shift(offsets, out)


def _six_bit_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """The products d sc and -(m mn), (n, 8) each.

    The first four sc and mn are 6 bits of a byte; the upper two bits of these bytes belong to the last four.
    """
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * offsets)


def _q6_k(blocks: Bytes, out: Float32) -> None:
    """Decode Q6_K: d sc (q - 32), 16 groups. Bytes of a block: 128 of nibbles, 64 of pairs of high bits, 16
    of signed sc, d.
    """
    codes = _nibbles(blocks[:, :128], 64)
    codes |= _pairs_of_bits(blocks[:, 128:192], 32) << np.uint8(4)
    _scale(_signed(codes, 32), _half(blocks, 208) * blocks[:, 192:208].view(np.int8), out)


def _iq4_nl(blocks: Bytes, out: Float32) -> None:
    """Decode IQ4_NL: d table[q]. Bytes of a block: d, 16 of nibbles."""
    _scale(TABLE[_nibbles(blocks[:, 2:], 16)], _half(blocks, 0), out)


def _iq4_xs(blocks: Bytes, out: Float32) -> None:
    """Decode IQ4_XS: d (sc - 32) table[q], 8 groups. Bytes of a block: d, 2 of sc's high bits, 4 of its
    nibbles, 128 of nibbles.
    """
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(len(blocks), 8)
    scales = low | _pairs_of_bits(blocks[:, 2:4], 1) << np.uint8(4)
    codes = TABLE[_nibbles(blocks[:, 8:], 16)]
    _scale(codes, _half(blocks, 0) * _signed(scales, 32), out)


def _mxfp4(blocks: Bytes, out: Float32) -> None:
    """Decode MXFP4: 2^(e - 128) table[q], with a table of twice the values. Bytes of a block: e, 16 of
    nibbles.
    """
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    _scale(_FP4_VALUES[_nibbles(blocks[:, 1:], 16)], scales, out)


DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Decoders by type name. Values of other types can't be decoded."""


CODE_FORMATS: dict[str, RowFormat] = {
    "Q4_0": RowFormat(4, 32, "symmetric"),
    "Q4_1": RowFormat(4, 32),
    "Q4_K": RowFormat(4, 32),
    "Q5_0": RowFormat(5, 32, "symmetric"),
    "Q5_1": RowFormat(5, 32),
    "Q5_K": RowFormat(5, 32),
    "Q8_0": RowFormat(8, 32, "symmetric"),
    "MXFP4": MXFP4,
}
"""The narrowest row format that holds a type's codes; types without one are rounded."""

TILE_FORMATS: dict[str, RowFormat] = dict(
    zip(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"), FORMATS_OF_TILES, strict=True)
)
"""The tile format that holds a type's values exactly, where no row format does."""
