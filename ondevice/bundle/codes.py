"""Codes of 2 to 8 bits as rows hold them: without gaps, low bits first, which is MLX's packing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]


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
