"""Values of stored rows in plain numpy, for backends that don't multiply a bundle's layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ondevice.backends.base import Bytes, EmbeddingSource, Float16, Float32, Int32, RowChunk
from ondevice.backends.tiled_source import TiledSource
from ondevice.bundle.codes import E2M1, powers, unpack, values_of_table, values_of_two_levels
from ondevice.bundle.layout import TileLayout
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout, TiledMatrix
from ondevice.bundle.tiles import StoredMatrix, in_rows, lane_rows, rows_format, tiles_of_lanes, untiled
from ondevice.config import RowFormat

PIECE_BYTES = 1 << 20
"""Bytes of tiles that become rows, or in which tokens are looked up, at a time; at least one tile."""


class RowsOfTiles:
    """`LinearSource` of the rows of a matrix that is stored as tiles.

    nearest: whether formats that exist only in tiles are converted to `rows_format`.
    """

    def __init__(self, source: TiledSource, nearest: bool = False) -> None:
        self._source = source
        self._row = source.matrix.row
        self._nearest = nearest
        self.rows = source.matrix.rows
        self.cols = self._row.cols
        self.stored = rows_format(self._row.stored) if nearest else self._row.stored
        self.bias: Float32 | None = None

    def chunks(self) -> Iterator[RowChunk]:
        step = max(1, PIECE_BYTES // self._source.matrix.tile_bytes)
        for first, tiles in self._source.chunks():
            for start in range(0, len(tiles), step):
                yield self._rows(first + start, tiles[start : start + step])

    def _rows(self, first: int, tiles: Bytes) -> RowChunk:
        row0 = first * TILE_ROWS
        count = min(len(tiles) * TILE_ROWS, self.rows - row0)
        rows = untiled(np.ascontiguousarray(tiles).reshape(-1), TiledMatrix(count, self._row))
        rows = in_rows(rows, self._row) if self._nearest else rows
        return RowChunk(row0, rows.codes, rows.scales, rows.biases)


def table_rows(table: EmbeddingSource, tokens: Int32) -> Float32:
    """The rows of token ids (T,), dequantised: (T, hidden_size)."""
    layout = table.layout
    if not isinstance(layout, TileLayout):
        return read_rows(table.read(tokens), 0, layout.parts[0][0])
    step, row = tokens_at_once(layout), layout.row
    out = np.empty((len(tokens), row.cols), dtype=np.float32)
    for start in range(0, len(tokens), step):
        piece = tokens[start : start + step]
        out[start : start + step] = _lanes(table.read(piece), piece % TILE_ROWS, row)
    return out


def tokens_at_once(layout: TileLayout) -> int:
    """Number of tokens whose tiles a look-up holds in memory at the same time."""
    return max(1, PIECE_BYTES // layout.stride)


def _lanes(records: Bytes, lanes: Int32, row: RowLayout) -> Float32:
    """Row lanes[i] of the tile that begins record i, dequantised: (n, cols)."""
    tiles = np.ascontiguousarray(records[:, : TILE_ROWS * row.nbytes])
    rows = lane_rows(tiles, row).reshape(len(tiles), TILE_ROWS, -1)[np.arange(len(tiles)), lanes]
    return values_of(untiled(tiles_of_lanes(rows, row).reshape(-1), TiledMatrix(len(rows), row)), row)


def values_of(stored: StoredMatrix, row: RowLayout) -> Float32:
    """The dequantised rows of a matrix: (R, cols)."""
    return dequantize_rows(stored.codes, stored.scales, stored.biases, row.stored, row.cols)


def read_rows(records: Bytes, offset: int, row: RowLayout) -> Float32:
    """The dequantised rows that lie `offset` bytes into each record (n, stride): (n, row.cols)."""
    scales_at = offset + row.codes_bytes
    biases_at = scales_at + row.scales_bytes
    codes = records[:, offset:scales_at]
    scales = np.ascontiguousarray(records[:, scales_at:biases_at]).view(row.scale_type)
    biases = np.ascontiguousarray(records[:, biases_at : biases_at + row.biases_bytes]).view(np.float16)
    return dequantize_rows(codes, scales, biases, row.stored, row.cols)


def dequantize_rows(
    codes: Bytes, scales: Float16 | Bytes, biases: Float16, stored: RowFormat, cols: int
) -> Float32:
    """Stored rows, dequantised as `config.Scales` defines for their format: (n, cols) float32."""
    if stored.bits == 16:
        return np.ascontiguousarray(codes).view(np.float16)[:, :cols].astype(np.float32)
    codes = unpack(np.ascontiguousarray(codes), stored.bits)
    if stored.mxfp4:
        floats: Float32 = E2M1[codes].reshape(*scales.shape, -1) * powers(scales)[:, :, None]
        return floats.reshape(len(codes), -1)[:, :cols]
    if stored.two_levels:
        return values_of_two_levels(codes, scales.view(np.uint8), stored)[:, :cols]
    if stored.scales == "table":
        return values_of_table(codes, scales, stored)[:, :cols]
    groups = codes.reshape(len(codes), -1, stored.group_size).astype(np.float32)
    wide = scales.astype(np.float32)
    offsets = np.float32(-stored.zero) * wide if stored.implied_bias else biases.astype(np.float32)
    values = groups * wide[:, :, None] + offsets[:, :, None]
    return values.reshape(len(codes), -1)[:, :cols]
