"""Row-column bundling: turns rows read from a checkpoint into the bytes of a bundle's files.

A neuron's record holds its gate row, its up row if there is one, and its *column* of the down projection
("LLM in a flash", arXiv 2312.11514, section 3.2), so that one read gets a complete neuron.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.file_layouts import file_layout
from ondevice.bundle.layout import (
    ExpertLayout,
    RecordLayout,
    SliceLayout,
    TileLayout,
)
from ondevice.bundle.matrix_layout import TILE_ROWS, TiledMatrix, padded
from ondevice.config import QuantConfig, RowFormat
from ondevice.converters.fidelity import Fidelity, joined, measure
from ondevice.converters.quantize import (
    EncodedColumns,
    QuantizedRows,
    RoundedRows,
    SourceCodes,
    Weights,
    quantize,
    quantize_encoded,
    store_codes,
)
from ondevice.converters.reading import Block
from ondevice.kernels import _native
from ondevice.model_config import ModelConfig


@dataclass(frozen=True)
class Chunk:
    """The next bytes of a bundle file: records (n, stride), bytes (n,) of experts or slices, or elements of a
    resident tensor (full tiles if it is a matrix).

    source_bytes: number of checkpoint bytes that it was made from. fidelity: how storing changed the weights,
    by kind; empty at 16 bits. last: whether these are the last records of a file.
    """

    file: str
    tensor: str
    data: NDArray[np.generic]
    source_bytes: int = 0
    fidelity: Mapping[str, Fidelity] = field(default_factory=dict)
    last: bool = False


def pack(
    blocks: Generator[Block, None, None], config: ModelConfig, quant: QuantConfig, runner: _native.Runner
) -> Generator[Chunk, None, None]:
    """Yields the blocks as chunks of the bundle's files, in order. Weights are quantised, unless the
    checkpoint's codes are kept.

    Raises CheckpointError if a value can't be stored.
    """
    layouts: dict[str, RecordLayout | TileLayout | ExpertLayout | SliceLayout | None] = {}
    at = 0  # bytes of an expert's record that are packed
    matrices: list[NDArray[np.uint8]] = []  # tiles of a slice whose matrices aren't all there
    with closing(blocks):
        for block in blocks:
            first = block.rows[0]
            if block.file not in layouts:
                layouts[block.file] = file_layout(block.file, config, quant).record
            layout = layouts[block.file]
            if isinstance(layout, ExpertLayout):
                chunk = _expert_chunk(runner, block, layout, at)
                at = (at + chunk.data.nbytes) % layout.stride
                yield chunk
                continue
            if isinstance(layout, SliceLayout):
                matrix = layout.tiles.matrices[len(matrices)]
                matrix_tiles, fidelity = _slice_tiles(runner, block, matrix)
                matrices.append(matrix_tiles)
                record = np.empty(0, dtype=np.uint8)
                if len(matrices) == len(layout.tiles.matrices):
                    record, matrices = _in_planes(matrices, layout), []
                yield Chunk(block.file, block.tensor, record, block.nbytes, fidelity, block.last)
                continue
            if isinstance(first, np.ndarray) and first.ndim == 1:
                yield Chunk(block.file, block.tensor, first, block.nbytes)
                continue
            rows = [
                _stored(runner, weights, stored, name)
                for name, weights, stored in zip(block.sources, block.rows, block.formats, strict=True)
            ]
            data: NDArray[np.generic]
            if isinstance(layout, RecordLayout):
                data = pack_records(rows, layout)
            else:
                tiles = _tiles(runner, rows[0], block.formats[0])
                if layout is not None:
                    data = np.pad(tiles, ((0, 0), (0, layout.stride - tiles.shape[1])))
                else:
                    data = tiles.view(np.float16) if block.formats[0].bits == 16 else tiles
            fidelity = _fidelity(runner, block, rows)
            yield Chunk(block.file, block.tensor, data, block.nbytes, fidelity, block.last)


def pack_records(rows: Sequence[QuantizedRows], layout: RecordLayout) -> NDArray[np.uint8]:
    """Records (n, stride) of quantised rows, given in the order of `layout`'s parts; padding is zero."""
    records = np.zeros((len(rows[0].codes), layout.stride), dtype=np.uint8)
    remaining = iter(rows)
    for part, offset in zip(layout.parts, layout.part_offsets, strict=True):
        for _ in part:
            row = next(remaining)
            for values in (row.codes, row.scales.view(np.uint8), row.biases.view(np.uint8)):
                records[:, offset : offset + values.shape[1]] = values
                offset += values.shape[1]
    return records


def _expert_chunk(runner: _native.Runner, block: Block, layout: ExpertLayout, at: int) -> Chunk:
    """A part of an expert's record, which begins at byte `at`: rows of one matrix, or all biases of its
    products.

    The end of a matrix's part is followed by its padding.
    """
    source = block.rows[0]
    fidelity: dict[str, Fidelity] = {}
    if isinstance(source, np.ndarray) and source.ndim == 1:
        data = np.zeros(4 * padded(len(source), TILE_ROWS), dtype=np.uint8)
        data[: source.nbytes] = source.view(np.uint8)
    else:
        stored = block.formats[0]
        rows = _stored(runner, source, stored, block.sources[0])
        fidelity = _fidelity(runner, block, [rows])
        data = _tiles(runner, rows, stored).reshape(-1)
    end = at + data.nbytes
    padding = sum(stop - start for start, stop in layout.padding if start == end)
    data = np.concatenate([data, np.zeros(padding, dtype=np.uint8)]) if padding else data
    return Chunk(block.file, block.tensor, data, block.nbytes, fidelity, block.last)


def _slice_tiles(
    runner: _native.Runner, block: Block, matrix: TiledMatrix
) -> tuple[NDArray[np.uint8], Mapping[str, Fidelity]]:
    """The tiles (nbytes,) of one matrix of a slice, zero-padded to a full slice, and their fidelity."""
    stored = block.formats[0]
    rows = _stored(runner, block.rows[0], stored, block.sources[0])
    sizes = matrix.row.codes_bytes, matrix.row.scales_bytes, matrix.row.biases_bytes
    codes, scales, biases = (
        np.pad(values, ((0, 0), (0, size - values.shape[1])))
        for values, size in zip(_parts(rows), sizes, strict=True)
    )
    data = np.zeros(matrix.nbytes, dtype=np.uint8)
    tiles = data[: padded(len(rows.codes), TILE_ROWS) * matrix.row.nbytes]
    _native.tile_rows(runner, stored, codes, scales, biases, tiles)
    return data, _fidelity(runner, block, [rows])


def _in_planes(matrices: Sequence[NDArray[np.uint8]], layout: SliceLayout) -> NDArray[np.uint8]:
    """The record (stride,) of a slice, made from the tiles (nbytes,) of its matrices."""
    record = np.zeros(layout.stride, dtype=np.uint8)
    for data, (high, low), matrix in zip(matrices, layout.places, layout.tiles.matrices, strict=True):
        of_high = record[high : high + matrix.tiles * matrix.high_tile_bytes]
        if low is None:
            of_high[:] = data
            continue
        start = layout.high_bytes + low
        of_low = record[start : start + matrix.tiles * matrix.low_tile_bytes]
        planes = (it.reshape(matrix.tiles, -1) for it in (data, of_high, of_low))
        _native.split_tiles(matrix.row.stored, *planes)
    return record


def _parts(rows: QuantizedRows) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Bytes of codes, scales and biases, each (R, n)."""
    codes, scales, biases = (np.ascontiguousarray(part).view(np.uint8) for part in vars(rows).values())
    return codes, scales, biases


def _tiles(runner: _native.Runner, rows: QuantizedRows, stored: RowFormat) -> NDArray[np.uint8]:
    """The tiles (n, bytes of 16 rows) of rows, zero-padded to a multiple of 16 rows."""
    parts = _parts(rows)
    row_bytes = sum(values.shape[1] for values in parts)
    data = np.empty(padded(len(rows.codes), TILE_ROWS) * row_bytes, dtype=np.uint8)
    _native.tile_rows(runner, stored, *parts, data)
    return data.reshape(-1, TILE_ROWS * row_bytes)


def _stored(
    runner: _native.Runner,
    source: Weights | SourceCodes | RoundedRows | EncodedColumns,
    stored: RowFormat,
    name: str,
) -> QuantizedRows:
    if isinstance(source, RoundedRows):
        return source.rows
    if isinstance(source, SourceCodes):
        return store_codes(source, stored, name)
    if isinstance(source, np.ndarray):
        return quantize(runner, source, stored, name)
    return quantize_encoded(runner, source, stored, name)


def _fidelity(runner: _native.Runner, block: Block, rows: Sequence[QuantizedRows]) -> dict[str, Fidelity]:
    """How storing a block changed its weights, by kind of matrix. Empty at 16 bits, where it isn't worth
    measuring.
    """
    kinds: dict[str, Fidelity] = {}
    for kind, source, quantised, stored in zip(block.kinds, block.rows, rows, block.formats, strict=True):
        if stored.bits != 16:
            kinds = joined(kinds, {kind: measure(runner, source, quantised, stored)})
    return kinds
