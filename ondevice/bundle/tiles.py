"""Matrices that are stored as the kernels multiply them, back to rows as a bundle stores them elsewhere.

Plain numpy, after `weights/README.md` alone: what the kernels make of such a matrix is tested against it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.codes import pack, unpack
from ondevice.bundle.layout import TILE_ROWS, TiledMatrix
from ondevice.config import GROUP_SIZE

Bytes = NDArray[np.uint8]
Number = TypeVar("Number", bound=np.generic)
_HALF_COLUMNS = 32
"""Columns of half a block of 5 or 6 bits."""


class StoredMatrix(NamedTuple):
    """Rows as a bundle stores them: codes (R, bytes), scales and biases (R, G), as in quantised rows.

    added: (R,) float32 biases of the matrix's products, or None.
    """

    codes: Bytes
    scales: NDArray[np.float16] | Bytes
    biases: NDArray[np.float16]
    added: NDArray[np.float32] | None


def untiled(part: Bytes, matrix: TiledMatrix) -> StoredMatrix:
    """The rows of one part (nbytes,) of an expert's record, which holds `matrix`."""
    count, row = matrix.rows, matrix.row
    added = None
    if matrix.has_bias:
        at = matrix.rows_bytes
        added = part[at : at + 4 * count].view(np.float32).copy()
    rows = np.ascontiguousarray(part[: matrix.rows_bytes])
    if row.bits == 16:
        none = np.empty((count, 0), dtype=np.float16)
        return StoredMatrix(rows.reshape(-1, row.nbytes)[:count], none, none, added)
    tiles, groups = matrix.padded_rows // TILE_ROWS, row.padded_cols // GROUP_SIZE
    blocks = rows.reshape(tiles, groups, matrix.block_bytes)
    at = TILE_ROWS * GROUP_SIZE * row.bits // 8
    codes = _codes(blocks[:, :, :at], row.bits)
    affine = np.ascontiguousarray(blocks[:, :, at:]).view(row.scale_type)
    scales = TILE_ROWS * (GROUP_SIZE // row.group_size)
    parts = (affine[:, :, :scales], affine[:, :, scales:])
    found = [_by_rows(np.ascontiguousarray(values).reshape(tiles, groups, -1, TILE_ROWS)) for values in parts]
    return StoredMatrix(codes[:count], found[0][:count], found[1][:count].view(np.float16), added)


def _by_rows(values: NDArray[Number]) -> NDArray[Number]:
    """(tiles, groups, n, 16) values of 16 rows side by side -> (rows, groups * n)."""
    tiles, groups, count, _ = values.shape
    return values.transpose(0, 3, 1, 2).reshape(tiles * TILE_ROWS, groups * count)


def _codes(blocks: Bytes, bits: int) -> Bytes:
    """Rows (R, bytes) of the codes (tiles, groups, bytes) of blocks."""
    tiles, groups, _ = blocks.shape
    if bits in (4, 8):
        words = np.ascontiguousarray(blocks).view(np.uint32).reshape(tiles, groups, -1, TILE_ROWS)
        return np.ascontiguousarray(_by_rows(words)).view(np.uint8)
    more = bits - 4
    halves = np.ascontiguousarray(blocks).view(np.uint32).reshape(tiles, groups * 2, bits, TILE_ROWS)
    low = unpack(np.ascontiguousarray(_by_rows(halves[:, :, :4])).view(np.uint8), 4)
    words = np.ascontiguousarray(_by_rows(halves[:, :, 4:])).view(np.uint8)
    high = np.zeros((len(low), groups * 2, _HALF_COLUMNS), dtype=np.uint8)
    words = words.reshape(len(low), groups * 2, more, 4)
    for word in range(more):
        for byte in range(4):
            for place in range(8 // more):
                column = _HALF_COLUMNS // more * word + 8 * (place // 2) + 2 * byte + place % 2
                code = words[:, :, word, byte] >> np.uint8(more * place)
                high[:, :, column] = code & np.uint8((1 << more) - 1)
    return pack(low | high.reshape(low.shape) << np.uint8(4), bits)
