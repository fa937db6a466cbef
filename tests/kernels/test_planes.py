"""Slices in two planes: a product has the bits of that of their tiles."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.base import Bytes, Float32
from ondevice.bundle.layout import ExpertLayout, SliceLayout
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.bundle.tiles import join_planes, joined_slices
from ondevice.config import MXFP4, TILE_FORMATS, RowFormat
from ondevice.kernels import _native
from tests.kernels.test_kernels import RUNNERS, normal, on_every_target
from tests.support.planes import in_planes, split_planes
from tests.support.sources import form

ONE_LEVEL = [
    RowFormat(4),
    RowFormat(4, 32),
    RowFormat(4, 32, "symmetric"),
    RowFormat(5, 32, "symmetric"),
    RowFormat(5),
    RowFormat(6, 32),
    RowFormat(8, 32, "symmetric"),
    MXFP4,
]
DIVIDED = [stored for stored in (*ONE_LEVEL, *TILE_FORMATS) if stored.low_bits]
WHOLE = [RowFormat(16), *(stored for stored in TILE_FORMATS if not stored.low_bits)]
PAIRS = [*zip(DIVIDED, reversed(DIVIDED), strict=True), *((stored, DIVIDED[0]) for stored in WHOLE)]
HIDDEN, NEURONS, SLICES = 256, 512, 3


def slice_layout(rows: RowFormat, down: RowFormat) -> SliceLayout:
    by_rows = TiledMatrix(NEURONS, RowLayout(HIDDEN, *rows))
    return SliceLayout(ExpertLayout((by_rows, by_rows, TiledMatrix(HIDDEN, RowLayout(NEURONS, *down)))))


def native(layout: SliceLayout) -> _native.Expert:
    gate, up, down = layout.tiles.places
    return _native.Expert(HIDDEN, NEURONS, gate, up, down, layout.places)


def random_slices(layout: SliceLayout) -> list[Bytes]:
    """Records of tiles (stride,) whose codes are random bytes."""
    random = np.random.default_rng(7)
    slices = random.integers(0, 256, (SLICES, layout.tiles.stride), dtype=np.uint8)
    for start, stop in layout.tiles.padding:
        slices[:, start:stop] = 0
    for halves in layout.tiles.halves:
        for at in range(halves.start, halves.start + halves.step * halves.times, halves.step or 1):
            scales = slices[:, at : at + halves.stop - halves.start]
            if halves.mxfp4:
                scales[:] = random.integers(120, 130, scales.shape)
            else:
                values = random.uniform(-0.01, 0.01, (SLICES, scales.shape[1] // 2)).astype(np.float16)
                scales[:] = values.view(np.uint8)
            if not halves.step:
                break
    return list(slices)


def planes_of(record: Bytes, layout: SliceLayout) -> tuple[Bytes, Bytes]:
    high, low = np.split(in_planes(record, layout), [layout.high_bytes])
    return high, low


@pytest.mark.parametrize("stored", DIVIDED)
def test_tiles_are_divided_and_joined_byte_for_byte(stored: RowFormat) -> None:
    layout = slice_layout(stored, stored)
    records = random_slices(layout)
    matrix = layout.tiles.matrices[0]
    tiles = records[0][: matrix.rows_bytes].reshape(matrix.tiles, -1)
    high, low = (
        np.empty((matrix.tiles, n), np.uint8) for n in (matrix.high_tile_bytes, matrix.low_tile_bytes)
    )
    _native.split_tiles(stored, tiles, high, low)
    expected = split_planes(tiles, matrix.row)
    assert high.tobytes() == expected[0].tobytes()
    assert low.tobytes() == expected[1].tobytes()
    assert join_planes(high, low, matrix.row).tobytes() == tiles.tobytes()

    stored_slices = np.stack([in_planes(record, layout) for record in records])
    assert joined_slices(stored_slices, layout).tobytes() == np.stack(records).tobytes()
    for runner in RUNNERS.values():
        whole = np.zeros(layout.tiles.stride, dtype=np.uint8)
        native(layout).join(runner, *planes_of(records[1], layout), whole)
        assert whole.tobytes() == records[1].tobytes()


@pytest.mark.parametrize(("rows", "down"), PAIRS)
def test_a_product_of_planes_has_the_bits_of_tiles(rows: RowFormat, down: RowFormat) -> None:
    layout = slice_layout(rows, down)
    records = random_slices(layout)
    planes = [planes_of(record, layout) for record in records]
    for tokens in (1, 3, 40):
        x = normal(tokens, HIDDEN, seed=5)

        def run(runner: _native.Runner, in_tiles: int, x: Float32 = x) -> Float32:
            out = np.full(x.shape, np.nan, dtype=np.float32)
            forward = _native.SlicePass(runner, native(layout), x, form("silu"))
            forward.add(records[:in_tiles], None, out)
            forward.add_planes(planes[in_tiles:], None, out, out)
            return out

        expected = on_every_target(lambda runner: run(runner, SLICES))
        for in_tiles in (0, 1):
            assert on_every_target(lambda runner, n=in_tiles: run(runner, n)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("stored", DIVIDED)
def test_without_low_planes_low_bits_are_their_mean(stored: RowFormat) -> None:
    layout = slice_layout(stored, stored)
    matrices, (high_at, *_) = layout.tiles.matrices, zip(*layout.places, strict=True)
    slices = [planes_of(record, layout)[0] for record in random_slices(layout)[:1]]
    x = normal(3, HIDDEN, seed=5)

    def plane(index: int) -> Bytes:
        matrix = matrices[index]
        size = matrix.tiles * matrix.high_tile_bytes
        return slices[0][high_at[index] : high_at[index] + size].reshape(matrix.tiles, -1)

    def of_high(index: int, x: Float32) -> Float32:
        def run(runner: _native.Runner) -> Float32:
            out = np.full((len(x), matrices[index].rows), np.nan, np.float32)
            _native.testing.multiply_high(runner, stored, plane(index).reshape(-1), x, out)
            return out

        return on_every_target(run)

    def of_tiles(tiles: Bytes) -> Float32:
        out = np.empty((len(x), NEURONS), np.float32)
        _native.testing.multiply_tiles(RUNNERS["scalar", 1], stored, tiles.reshape(-1), x, None, out)
        return out

    def joined(low_bits: int) -> Bytes:
        matrix, every = matrices[0], 0x55 if stored.low_bits == 2 else 0x11
        low = np.full((matrix.tiles, matrix.low_tile_bytes), low_bits * every, np.uint8)
        return join_planes(plane(0), low, matrix.row)

    gates, ups = of_high(0, x), of_high(1, x)
    mean = np.mean([of_tiles(joined(low)) for low in range(1 << stored.low_bits)], axis=0)
    # The mean of a table's entries is rounded to a byte.
    tolerance = 5e-3 if "table" in stored.scales or stored.mxfp4 else 2e-6
    assert np.abs(gates - mean).max() < tolerance * np.abs(mean).max()
    for tokens in (1, 2):
        assert of_high(0, x[:tokens]).tobytes() == gates[:tokens].tobytes()

    def run(runner: _native.Runner) -> Float32:
        out = np.full(x.shape, np.nan, dtype=np.float32)
        _native.SlicePass(runner, native(layout), x, form("silu")).add_planes([(slices[0], None)], None, out)
        return out

    hidden = (gates * (0.5 + 0.5 * np.tanh(gates / 2)) * ups).astype(np.float32)
    outputs = of_high(2, hidden)
    assert np.abs(on_every_target(run) - outputs).max() < 1e-2 * np.abs(outputs).max()


def test_impossible_planes_are_refused() -> None:
    layout = slice_layout(RowFormat(4), RowFormat(4))
    record = random_slices(layout)[0]
    high, low = planes_of(record, layout)
    x, out = normal(1, HIDDEN), np.empty((1, HIDDEN), np.float32)

    def begun() -> _native.SlicePass:
        return _native.SlicePass(RUNNERS["scalar", 1], native(layout), x, form("silu"))

    for planes in ((high[:-4096], low), (high, low[:-4096])):
        with pytest.raises(ValueError, match="its record's bytes"):
            begun().add_planes([planes], None, out)
    gate, up, down = layout.tiles.places
    without = _native.Expert(HIDDEN, NEURONS, gate, up, down)
    with pytest.raises(ValueError, match="its record's bytes"):
        _native.SlicePass(RUNNERS["scalar", 1], without, x, form("silu")).add_planes([(high, low)], None, out)
    with pytest.raises(ValueError, match="has a low plane where"):
        _native.Expert(HIDDEN, NEURONS, gate, up, down, [(0, None)] * 3)
    with pytest.raises(ValueError, match="gate, up and down"):
        _native.Expert(HIDDEN, NEURONS, gate, up, down, layout.places[:2])
    tiles = np.zeros((1, 2048), np.uint8)
    with pytest.raises(ValueError, match="aren't divided"):
        _native.split_tiles(RowFormat(2, 16, "two_level"), tiles, tiles, tiles)
