"""Codes of 2 to 8 bits as rows hold them: without gaps, low bits first, which is MLX's packing.

MXFP4 is that of OCP Microscaling Formats 1.0, 5.3.3 and 5.4.1: float codes and powers of two as scales.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Float32 = NDArray[np.float32]

E2M1: Float32 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), np.float32)
"""What each code of MXFP4 means, in units of its group's scale."""
MAX_POWER, E8M0_NAN = 252, 255
"""Scale bytes of MXFP4: the largest with which every code is a finite float32, and the one of no number."""


def powers(scales: NDArray[np.generic]) -> Float32:
    """What scale bytes of MXFP4 mean: 2^(s - 127), which is infinite for E8M0_NAN."""
    values: Float32 = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return values


def unpack(packed: Codes, bits: int) -> Codes:
    """Codes (R, C) of packed rows (R, C * bits / 8): 8 codes lie in `bits` bytes. C is a multiple of 8."""
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
    """The rows that `unpack` takes, of codes (R, C) below 2^bits. C is a multiple of 8."""
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
