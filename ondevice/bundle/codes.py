"""Codes of 2 to 8 bits in rows, packed without gaps and low bits first, as MLX packs them; and their scales.

MXFP4 is defined in OCP Microscaling Formats 1.0, 5.3.3 and 5.4.1: codes are small floats, and scales are
powers of two. Legend: R rows, C columns, S super groups of 256 columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.config import GROUP_SIZE, SUPER_SIZE, RowFormat

Codes = NDArray[np.uint8]
Float32 = NDArray[np.float32]

E2M1: Float32 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), np.float32)
"""Value of each code of MXFP4, in units of its group's scale."""
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""Value of each code with the scales `table` and `two_level_table`, in units of its group's scale."""
MAX_POWER, E8M0_NAN = 252, 255
"""Scale bytes of MXFP4: the largest with which every code is a finite float32, and that of NaN."""


def powers(scales: NDArray[np.generic]) -> Float32:
    """The values of MXFP4's scale bytes: 2^(s - 127), infinite for E8M0_NAN."""
    values: Float32 = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return values


def unpack(packed: Codes, bits: int) -> Codes:
    """Codes (R, C) of packed rows (R, C * bits / 8), with 8 codes in `bits` bytes. C is a multiple of 8."""
    if bits == 8:
        return packed
    rows = len(packed)
    if bits == 4:
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)
    octets = packed.reshape(rows, -1, bits)
    words = np.zeros(octets.shape[:2], dtype=np.uint64)
    for byte in range(bits):
        words |= octets[:, :, byte].astype(np.uint64) << np.uint64(8 * byte)
    codes = np.empty((*octets.shape[:2], 8), dtype=np.uint8)
    for place in range(8):
        codes[:, :, place] = (words >> np.uint64(bits * place)).astype(np.uint8)
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(rows, -1)


def pack(codes: Codes, bits: int) -> Codes:
    """Packed rows (R, C * bits / 8) of codes (R, C) below 2^bits. C is a multiple of 8."""
    if bits == 8:
        return codes
    rows = len(codes)
    if bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    octets = codes.reshape(rows, -1, 8).astype(np.uint64)
    words = np.zeros(octets.shape[:2], dtype=np.uint64)
    for place in range(8):
        words |= octets[:, :, place] << np.uint64(bits * place)
    packed = np.empty((*words.shape, bits), dtype=np.uint8)
    for byte in range(bits):
        packed[:, :, byte] = (words >> np.uint64(8 * byte)).astype(np.uint8)
    return packed.reshape(rows, -1)


def values_of_table(codes: Codes, scales: NDArray[np.generic], stored: RowFormat) -> Float32:
    """The values (R, C) of codes (R, C), one code in a byte, for the scale kind `table`. scales: (R, G)
    float16 or float32.
    """
    groups = TABLE[codes].astype(np.float32).reshape(len(codes), -1, stored.group_size)
    return (groups * scales.astype(np.float32)[:, :, None]).reshape(codes.shape)


def values_of_two_levels(codes: Codes, headers: Codes, stored: RowFormat) -> Float32:
    """The values (R, C) of codes (R, C), one code in a byte, with two levels of scales. headers: (R, S *
    header_bytes).

    Every product is exact. In the format `two_level` the difference of two products is rounded to float32.
    """
    scales, minimums = scales_of_two_levels(headers, stored)
    groups = codes.reshape(len(codes), -1, stored.group_size)
    if stored.scales == "two_level_table":
        values = TABLE[groups].astype(np.float32)
    else:
        zero = 0 if minimums is not None else stored.zero
        values = groups.astype(np.float32) - np.float32(zero)
    values *= scales[:, :, None]
    if minimums is not None:
        values -= minimums[:, :, None]
    return values.reshape(codes.shape)


def scales_of_two_levels(headers: Codes, stored: RowFormat) -> tuple[Float32, Float32 | None]:
    """The exact scales d * s and minimums dmin * m, (R, G) each, from headers (R, S * header_bytes).

    Minimums are None except in the format `two_level`.
    """
    by_super = np.ascontiguousarray(headers).reshape(len(headers), -1, stored.header_bytes)
    upper = np.ascontiguousarray(by_super[:, :, : stored.upper_bytes]).view(np.float16).astype(np.float32)
    scales, minimums = group_integers(by_super[:, :, stored.upper_bytes :], stored)
    of_groups = (upper[:, :, :1] * scales).reshape(len(headers), -1)
    return of_groups, None if minimums is None else (upper[:, :, 1:] * minimums).reshape(len(headers), -1)


def group_integers(lower: Codes, stored: RowFormat) -> tuple[NDArray[np.int8], NDArray[np.int8] | None]:
    """Integer scales and minimums, (R, S, groups) each, from the last bytes of headers, (R, S, bytes).

    Minimums are None except in the format `two_level`.
    """
    rows, count, nbytes = lower.shape
    blocks = SUPER_SIZE // GROUP_SIZE
    each = lower.reshape(rows, count, blocks, nbytes // blocks)
    if each.shape[3] == 3:
        # Six bits of four numbers; the fourth one's are the high bits of the others' bytes.
        high = each >> np.uint8(6)
        fourth = high[..., :1] | high[..., 1:2] << np.uint8(2) | high[..., 2:] << np.uint8(4)
        each = np.concatenate([each & np.uint8(63), fourth], axis=3)
        if stored.scales == "two_level":
            scales, minimums = (each[..., at::2].reshape(rows, count, -1).view(np.int8) for at in (0, 1))
            return scales, minimums
    flat = each.reshape(rows, count, -1)
    if stored.scales == "two_level":
        return (flat & np.uint8(15)).astype(np.int8), (flat >> np.uint8(4)).astype(np.int8)
    if stored.bits == 6:
        return flat.view(np.int8), None
    return (flat & np.uint8(63)).astype(np.int8) - np.int8(32), None
