"""The two planes of slices in plain numpy, after `weights/README.md` alone."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Bytes
from ondevice.bundle.layout import SliceLayout
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout, TiledMatrix
from ondevice.bundle.tiles import around_codes


def in_planes(record: Bytes, layout: SliceLayout) -> Bytes:
    """(stride,) the slice as it lies on flash, of its record of tiles."""
    out = np.zeros(layout.stride, dtype=np.uint8)
    matrices = zip(layout.places, layout.tiles.matrices, layout.tiles.part_offsets, strict=True)
    for (high, low), matrix, offset in matrices:
        tiles = record[offset : offset + matrix.rows_bytes]
        if low is None:
            out[high : high + len(tiles)] = tiles
            continue
        planes = split_planes(tiles.reshape(matrix.tiles, -1), matrix.row)
        for start, plane in zip((high, layout.high_bytes + low), planes, strict=True):
            out[start : start + plane.size] = plane.reshape(-1)
    return out


def split_planes(tiles: Bytes, row: RowLayout) -> tuple[Bytes, Bytes]:
    """High and low planes, (n, bytes) each, of tiles (n, tile_bytes) whose codes are divided."""
    before, codes, behind = around_codes(tiles, TiledMatrix(TILE_ROWS, row), row.bits)
    halves = np.split(codes, 1 if row.bits in (4, 8) else 2, axis=-1)
    high, low = zip(*(_split_codes(half, row.bits) for half in halves), strict=True)
    upper = np.concatenate(high, axis=-1).reshape(*before.shape[:2], -1)
    whole = np.concatenate([before, upper, behind], axis=-1)
    return whole.reshape(len(tiles), -1), np.concatenate(low, axis=-1).reshape(len(tiles), -1)


def _split_codes(codes: Bytes, bits: int) -> tuple[Bytes, Bytes]:
    """The high and the low plane of a block's codes, or of half a block's, (..., bytes)."""
    if bits == 8:
        first, second = np.split(codes, 2, axis=-1)
        return first >> 4 | second & 0xF0, first & 15 | (second & 15) << 4
    four = codes.shape[-1] * 4 // bits
    nibbles, above = codes[..., :four], codes[..., four:]
    if bits == 6:
        return above, nibbles
    first, second = np.split(nibbles, 2, axis=-1)
    high, low = first >> 2 & 0x33 | second & 0xCC, first & 0x33 | (second & 0x33) << 2
    return np.concatenate([high, above], axis=-1), low
