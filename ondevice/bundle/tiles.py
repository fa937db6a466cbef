"""Converts matrices between tiles, which the kernels multiply, and rows.

Plain numpy, written from `weights/README.md`: the oracle that the kernels are tested against.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.codes import pack, scales_of_two_levels, unpack, values_of_table, values_of_two_levels
from ondevice.bundle.layout import SliceLayout
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout, TiledMatrix
from ondevice.config import GROUP_SIZE, CodeBits, RowFormat

Bytes = NDArray[np.uint8]
Number = TypeVar("Number", bound=np.generic)
_HALF_COLUMNS = 32
"""Columns of half a block, whose codes are in planes."""
_PLANES: dict[CodeBits, tuple[int, ...]] = {2: (2,), 3: (2, 1), 5: (4, 1), 6: (4, 2)}
"""Bits of each plane of codes, the lowest first. Codes of 4 and 8 bits are words of rows."""


class StoredMatrix(NamedTuple):
    """The rows of a matrix that was stored as tiles: codes (R, bytes), scales and biases (R, G), as in
    quantized rows.

    With two levels of scales, `scales` holds the bytes of headers, (R, n). added: (R,) float32 biases that
    are added to the matrix's products, or None.
    """

    codes: Bytes
    scales: NDArray[np.float16] | Bytes
    biases: NDArray[np.float16]
    added: NDArray[np.float32] | None


def untiled(part: Bytes, matrix: TiledMatrix) -> StoredMatrix:
    """The rows stored in `part`, the tiles (nbytes,) of `matrix` or one part of an expert's record."""
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
    if row.stored.two_levels:
        supers = rows.reshape(tiles, -1, matrix.block_bytes)
        at = TILE_ROWS * row.stored.header_bytes
        blocks = np.ascontiguousarray(supers[:, :, at:]).reshape(tiles, groups, -1)
        headers = _headers(supers[:, :, :at], TILE_ROWS * row.stored.upper_bytes)
        none = np.empty((count, 0), dtype=np.float16)
        return StoredMatrix(_codes(blocks, row.bits)[:count], headers[:count], none, added)
    blocks = rows.reshape(tiles, groups, matrix.block_bytes)
    at = TILE_ROWS * GROUP_SIZE * row.bits // 8
    codes = _codes(blocks[:, :, :at], row.bits)
    affine = np.ascontiguousarray(blocks[:, :, at:]).view(row.scale_type)
    scales = TILE_ROWS * (GROUP_SIZE // row.group_size)
    parts = (affine[:, :, :scales], affine[:, :, scales:])
    pairs = [_by_rows(np.ascontiguousarray(values).reshape(tiles, groups, -1, TILE_ROWS)) for values in parts]
    return StoredMatrix(codes[:count], pairs[0][:count], pairs[1][:count].view(np.float16), added)


def joined_slices(records: Bytes, layout: SliceLayout) -> Bytes:
    """Slices with their planes joined, (n, layout.tiles.stride), from slices as they are on flash, (n,
    stride).
    """
    record = layout.tiles
    joined = np.zeros((len(records), record.stride), dtype=np.uint8)
    places = zip(layout.places, record.matrices, record.part_offsets, strict=True)
    for (high, low), matrix, offset in places:
        tiles = records[:, high : high + matrix.tiles * matrix.high_tile_bytes]
        if low is not None:
            start, count = layout.high_bytes + low, len(records) * matrix.tiles
            lower = records[:, start : start + matrix.tiles * matrix.low_tile_bytes]
            tiles = join_planes(tiles.reshape(count, -1), lower.reshape(count, -1), matrix.row)
        joined[:, offset : offset + matrix.rows_bytes] = tiles.reshape(len(records), -1)
    return joined


def join_planes(high: Bytes, low: Bytes, row: RowLayout) -> Bytes:
    """The tiles (n, tile_bytes) made of their high and low planes, (n, bytes) each."""
    matrix, low_bits = TiledMatrix(TILE_ROWS, row), row.stored.low_bits
    before, upper, after = around_codes(high, matrix, row.bits - low_bits)
    lower = low.reshape(*upper.shape[:3], -1)
    runs = 1 if row.bits in (4, 8) else 2
    parts = []
    for of_high, of_low in zip(np.split(upper, runs, -1), np.split(lower, runs, -1), strict=True):
        parts.append(_join_run(of_high, of_low, row.bits))
    codes = np.concatenate(parts, axis=-1).reshape(*before.shape[:2], -1)
    return np.concatenate([before, codes, after], axis=-1).reshape(len(high), -1)


def lane_rows(tiles: Bytes, row: RowLayout) -> Bytes:
    """The rows (16 n, nbytes) of tiles (n, tile_bytes). The bytes of a row keep the order they have in the
    tiles.
    """
    matrix, count = TiledMatrix(TILE_ROWS, row), len(tiles)
    blocks, at, parts = tiles.reshape(count, -1, matrix.block_bytes), 0, []
    for units, width in matrix.runs:
        size = TILE_ROWS * units * width
        run = blocks[:, :, at : at + size].reshape(count, -1, units, TILE_ROWS, width)
        parts.append(run.transpose(0, 3, 1, 2, 4).reshape(count * TILE_ROWS, -1, units * width))
        at += size
    return np.concatenate(parts, axis=2).reshape(count * TILE_ROWS, -1)


def tiles_of_lanes(rows: Bytes, row: RowLayout) -> Bytes:
    """The tiles (n, tile_bytes) made of rows as `lane_rows` returns them, with zeros after the last row."""
    matrix = TiledMatrix(len(rows), row)
    wide = np.zeros((matrix.padded_rows, row.nbytes), dtype=np.uint8)
    wide[: len(rows)] = rows
    blocks = wide.reshape(matrix.tiles, TILE_ROWS, -1, matrix.block_bytes // TILE_ROWS)
    at, parts = 0, []
    for units, width in matrix.runs:
        run = blocks[:, :, :, at : at + units * width]
        run = run.reshape(matrix.tiles, TILE_ROWS, -1, units, width).transpose(0, 2, 3, 1, 4)
        parts.append(run.reshape(matrix.tiles, run.shape[1], -1))
        at += units * width
    return np.concatenate(parts, axis=2).reshape(matrix.tiles, -1)


def rows_format(stored: RowFormat) -> RowFormat:
    """The format of rows outside tiles that is nearest to `stored`.

    A format that exists only in tiles becomes one with the same codes, and a scale and a bias for each 32, if
    its groups have 32 elements and its codes have no table. Otherwise it becomes float16 values.
    """
    if not stored.tiles_only:
        return stored
    affine = stored.scales == "two_level" and stored.group_size == 32
    return RowFormat(stored.bits, 32) if affine else RowFormat(16)


def in_rows(matrix: StoredMatrix, row: RowLayout) -> StoredMatrix:
    """The rows of a matrix in the format `rows_format(row.stored)`.

    Scales and values are rounded to float16; those beyond its range become infinite.
    """
    stored = row.stored
    if not stored.tiles_only:
        return matrix
    if rows_format(stored).bits != 16:
        scales, minimums = scales_of_two_levels(matrix.scales.view(np.uint8), stored)
        assert minimums is not None
        with np.errstate(over="ignore"):
            return StoredMatrix(
                matrix.codes, scales.astype(np.float16), (-minimums).astype(np.float16), matrix.added
            )
    codes = unpack(np.ascontiguousarray(matrix.codes), row.bits)
    none = np.empty((len(codes), 0), dtype=np.float16)
    if row.stored.two_levels:
        values = values_of_two_levels(codes, matrix.scales.view(np.uint8), row.stored)
    else:
        values = values_of_table(codes, matrix.scales, row.stored)
    with np.errstate(over="ignore"):
        return StoredMatrix(values.astype(np.float16).view(np.uint8), none, none, matrix.added)


def around_codes(tiles: Bytes, matrix: TiledMatrix, bits: int) -> tuple[Bytes, Bytes, Bytes]:
    """The bytes of tiles or planes in three arrays: before the codes of a block, the codes of `bits` bits,
    and after them.

    Their shapes are (n, B, bytes), (n, B, blocks of 64 columns, bytes) and (n, B, bytes) for n tiles of B
    blocks.
    """
    codes = TILE_ROWS * matrix.block_cols * bits // 8
    others = matrix.block_bytes - TILE_ROWS * matrix.block_cols * matrix.row.bits // 8
    blocks = tiles.reshape(len(tiles), -1, codes + others)
    at = others if matrix.row.stored.two_levels else 0
    inner = blocks[:, :, at : at + codes].reshape(*blocks.shape[:2], matrix.block_cols // GROUP_SIZE, -1)
    return blocks[:, :, :at], inner, blocks[:, :, at + codes :]


def _join_run(high: Bytes, low: Bytes, bits: int) -> Bytes:
    """The codes of a block, or of half a block, (..., bytes), joined from its two planes."""
    if bits == 8:
        return np.concatenate([(high & 15) << 4 | low & 15, high & 0xF0 | low >> 4], axis=-1)
    if bits == 6:
        return np.concatenate([low, high], axis=-1)
    above, high = high[..., low.shape[-1] :], high[..., : low.shape[-1]]
    first, second = (high & 0x33) << 2 | low & 0x33, high & 0xCC | low >> 2 & 0x33
    return np.concatenate([first, second, above], axis=-1)


def _by_rows(values: NDArray[Number]) -> NDArray[Number]:
    """The values of rows, (rows, groups * n), from (tiles, groups, n, 16), where 16 rows lie side by side."""
    tiles, groups, count, _ = values.shape
    return values.transpose(0, 3, 1, 2).reshape(tiles * TILE_ROWS, groups * count)


def _headers(headers: Bytes, upper: int) -> Bytes:
    """The headers of rows, (R, bytes), from those of tiles, (tiles, S, bytes). The first `upper` bytes are
    float16 values.
    """
    tiles, supers, _ = headers.shape
    halves = np.ascontiguousarray(headers[:, :, :upper]).reshape(tiles, supers, -1, TILE_ROWS, 2)
    lower = headers[:, :, upper:].reshape(tiles, supers, -1, TILE_ROWS)
    parts = (halves.transpose(0, 3, 1, 2, 4), lower.transpose(0, 3, 1, 2))
    rows = [part.reshape(tiles * TILE_ROWS, supers, -1) for part in parts]
    return np.concatenate(rows, axis=2).reshape(tiles * TILE_ROWS, -1)


def _codes(blocks: Bytes, bits: CodeBits) -> Bytes:
    """The codes of rows, (R, bytes), from the codes of tiles' blocks, (tiles, groups, bytes)."""
    tiles, groups, _ = blocks.shape
    words = np.ascontiguousarray(blocks).view(np.uint32)
    if bits not in _PLANES:
        return np.ascontiguousarray(_by_rows(words.reshape(tiles, groups, -1, TILE_ROWS))).view(np.uint8)
    halves = words.reshape(tiles, groups * 2, bits, TILE_ROWS)
    codes = np.zeros((tiles * TILE_ROWS, groups * 2, _HALF_COLUMNS), dtype=np.uint8)
    below = 0
    for wide in _PLANES[bits]:
        plane = np.ascontiguousarray(_by_rows(halves[:, :, below : below + wide])).view(np.uint8)
        plane = plane.reshape(len(codes), groups * 2, wide, 4)
        for word in range(wide):
            for byte in range(4):
                for place in range(8 // wide):
                    column = _HALF_COLUMNS // wide * word + 8 * (place // 2) + 2 * byte + place % 2
                    code = plane[:, :, word, byte] >> np.uint8(wide * place) & np.uint8((1 << wide) - 1)
                    codes[:, :, column] |= code << np.uint8(below)
        below += wide
    return pack(codes.reshape(len(codes), -1), bits)
