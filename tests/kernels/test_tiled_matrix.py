"""Matrices that are stored as tiles: sections of several formats, and the lookup of one row."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.stored_rows import values_of
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout, TiledMatrix
from ondevice.bundle.tiles import lane_rows, tiles_of_lanes, untiled
from ondevice.config import MXFP4, TILE_FORMATS, RowFormat
from ondevice.kernels import _native
from tests.kernels.test_kernels import RUNNERS, TARGETS, normal, on_every_target
from tests.support.sources import quantise_rows, tiles_of

ROW_FORMATS = [
    RowFormat(16),
    MXFP4,
    *(RowFormat(bits, size) for bits in (4, 5, 6, 8) for size in (64, 32)),  # type: ignore[arg-type]
    *(RowFormat(bits, 32, "symmetric") for bits in (4, 5, 6, 8)),  # type: ignore[arg-type]
]
ALL_FORMATS = [*ROW_FORMATS, *TILE_FORMATS]
FIRST = RUNNERS[TARGETS[0], 1]
MIXTURES: dict[str, tuple[tuple[int, RowFormat], ...]] = {
    "Q4_K_M": ((64, TILE_FORMATS[2]), (16, TILE_FORMATS[2]), (16, TILE_FORMATS[4])),
    "rows that fill no tile": (
        (40, RowFormat(8, 32, "symmetric")),
        (23, TILE_FORMATS[0]),
        (1, RowFormat(16)),
    ),
    "every form of inputs": (
        (33, RowFormat(4)),
        (17, RowFormat(4, 32)),
        (200, TILE_FORMATS[1]),
        (5, RowFormat(8)),
        (48, RowFormat(8, 32)),
        (130, RowFormat(16)),
        (16, MXFP4),
    ),
}


def loaded(sections: list[tuple[int, RowFormat]], cols: int, seed: int = 0) -> tuple[_native.Matrix, Float32]:
    """A matrix of random sections, and its values (rows, cols)."""
    matrix, values = _native.Matrix(sections, cols), []
    for index, (rows, stored) in enumerate(sections):
        weight = normal(rows, cols, seed=seed + index)
        tiles = tiles_of(weight, TiledMatrix(rows, RowLayout(cols, *stored)))
        # In pieces, and tile by tile further apart than they are long.
        apart = np.pad(tiles, ((0, 0), (0, 64)))[:, : tiles.shape[1]]
        matrix.load_tiles(index, 0, tiles[:1])
        if len(tiles) > 1:
            matrix.load_tiles(index, 1, apart[1:])
        values.append(quantise_rows(weight, stored)[3])
    return matrix, np.concatenate(values)


def product(
    matrix: _native.Matrix,
    runner: _native.Runner,
    x: Float32,
    bias: Float32 | None = None,
    added: Float32 | None = None,
) -> Float32:
    out = np.full((len(x), matrix.rows), np.nan, dtype=np.float32)
    norm = (np.linspace(0.5, 2, x.shape[1], dtype=np.float32), 1e-5, None, False)
    matrix.forward(runner, x, bias, out, norm, added)
    return out


@pytest.mark.parametrize("tokens", [1, 5, 37])
@pytest.mark.parametrize("sections", MIXTURES.values(), ids=MIXTURES)
def test_a_row_has_the_same_bits_in_any_section(
    sections: tuple[tuple[int, RowFormat], ...], tokens: int
) -> None:
    cols, ends = 512, [0, *accumulate(rows for rows, _ in sections)]
    matrix, _ = loaded([*sections], cols)
    x, bias, added = normal(tokens, cols), normal(ends[-1]), normal(tokens, ends[-1], seed=1)
    together = on_every_target(lambda runner: product(matrix, runner, x, bias, added))
    for index, (rows, stored) in enumerate(sections):
        own = slice(ends[index], ends[index + 1])
        alone = _native.Matrix(rows, cols, stored)
        alone.load_tiles(
            0, 0, tiles_of(normal(rows, cols, seed=index), TiledMatrix(rows, RowLayout(cols, *stored)))
        )
        expected = product(alone, FIRST, x, bias[own], np.ascontiguousarray(added[:, own]))
        assert together[:, own].tobytes() == expected.tobytes()


@pytest.mark.parametrize("stored", ALL_FORMATS)
def test_products_are_those_of_the_values(stored: RowFormat) -> None:
    matrix, values = loaded([(35, stored), (20, RowFormat(8))], 512)
    x = normal(3, 512)
    normed = x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + 1e-5) * np.linspace(0.5, 2, 512)
    expected = normed @ values.T.astype(np.float64)
    # Activations are rounded to 8 bits.
    np.testing.assert_allclose(product(matrix, FIRST, x), expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("stored", ALL_FORMATS)
def test_a_row_that_is_looked_up_has_the_bits_of_its_values(stored: RowFormat) -> None:
    rows, cols = 37, 512 if stored.two_levels else 130
    row = RowLayout(cols, *stored)
    tiles = tiles_of(normal(rows, cols), TiledMatrix(rows, row))
    picks = np.array([0, 36, 5, 5, 15, 16, 31], dtype=np.int32)
    apart = np.pad(tiles[picks // TILE_ROWS], ((0, 0), (0, 96)))

    def run(runner: _native.Runner) -> Float32:
        out = np.empty((len(picks), row.padded_cols), dtype=np.float32)
        _native.dequantize_lanes(runner, stored, apart, picks % TILE_ROWS, cols, out)
        return out

    expected = values_of(untiled(tiles.reshape(-1), TiledMatrix(rows, row)), row)[picks]
    assert np.ascontiguousarray(on_every_target(run)[:, :cols]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("stored", ALL_FORMATS)
def test_rows_move_into_other_tiles(stored: RowFormat) -> None:
    rows, row = 37, RowLayout(512, *stored)
    tiles = tiles_of(normal(rows, 512), TiledMatrix(rows, row))
    by_rows = lane_rows(tiles, row)
    assert tiles_of_lanes(by_rows[:rows], row).tobytes() == tiles.tobytes()
    picks = np.array([36, 2, 3, 20])
    found = untiled(tiles_of_lanes(by_rows[picks], row).reshape(-1), TiledMatrix(len(picks), row))
    whole = untiled(tiles.reshape(-1), TiledMatrix(rows, row))
    for some, every in zip(found[:3], whole[:3], strict=True):
        assert some.tobytes() == np.ascontiguousarray(every[picks]).tobytes()


def test_impossible_arguments_are_refused() -> None:
    matrix = _native.Matrix([(20, RowFormat(4)), (5, RowFormat(8))], 64)
    bytes_4, bytes_8 = 16 * 36, 16 * 68
    for section, first, count, width in [
        (2, 0, 1, bytes_4),
        (-1, 0, 1, bytes_4),
        (0, 1, 2, bytes_4),
        (0, -1, 1, bytes_4),
        (0, 0, 0, bytes_4),
        (0, 1 << 62, 1, bytes_4),
        (1, 0, 1, bytes_4),
        (0, 0, 1, bytes_8),
    ]:
        with pytest.raises(ValueError, match=r"no such section|outside the section|bytes of 16 rows"):
            matrix.load_tiles(section, first, np.zeros((count, width), dtype=np.uint8))
    with pytest.raises(ValueError, match="256"):
        _native.Matrix([(16, RowFormat(4)), (16, TILE_FORMATS[0])], 320)
    for sections in ([], [(0, RowFormat(4))]):
        with pytest.raises(ValueError, match=r"sections|positive"):
            _native.Matrix(sections, 64)
    none = np.zeros((1, 0), dtype=np.uint8)
    with pytest.raises(ValueError, match="loaded as tiles"):
        matrix.load_rows(FIRST, 0, np.zeros((1, 32), dtype=np.uint8), none, none)
    with pytest.raises(ValueError, match="one section"):
        matrix.forward_heads(FIRST, np.zeros((1, 1, 64), np.float32), np.zeros((1, 25), np.float32))
    tile, out = np.zeros((1, bytes_4), dtype=np.uint8), np.zeros((1, 64), dtype=np.float32)
    for lane, columns, into in [(16, 64, out), (-1, 64, out), (0, 128, out), (0, 64, out[:, :32].copy())]:
        with pytest.raises(ValueError, match=r"lanes are|a tile of|out is"):
            _native.dequantize_lanes(FIRST, 4, tile, np.array([lane], np.int32), columns, into)


@pytest.mark.parametrize("stored", ALL_FORMATS)
def test_rows_of_matrices_in_memory_have_the_bits_of_their_values(stored: RowFormat) -> None:
    (first, some), (last, others) = loaded([(48, stored)], 512), loaded([(37, stored)], 512, seed=1)
    values, rows = np.concatenate([some, others]), np.array([0, 47, 48, 84, 15, 16, 16], dtype=np.int32)

    def run(runner: _native.Runner) -> Float32:
        out = np.empty((len(rows), 512), dtype=np.float32)
        assert _native.look_up(runner, [first, last], 48, rows, out)
        return out

    assert on_every_target(run).tobytes() == values[rows].tobytes()
    one = np.zeros((1, 512), np.float32)
    assert not _native.look_up(FIRST, [first, None], 48, np.array([48], np.int32), one)
    assert _native.look_up(FIRST, [first, None], 48, np.array([47], np.int32), one)
    for outside in (-1, 85, 96):
        with pytest.raises(ValueError, match=r"outside the matrices|rows are looked up"):
            _native.look_up(FIRST, [first, last], 48, np.array([outside], np.int32), one)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("stored", ALL_FORMATS)
def test_stacked_matrices_have_the_bits_of_each(stored: RowFormat, tokens: int) -> None:
    matrices = [loaded([(rows, stored)], 512, seed)[0] for seed, rows in enumerate((160, 160, 37))]
    x, norm = normal(tokens, 512), (np.linspace(0.5, 2, 512, dtype=np.float32), 1e-5, None, False)

    def run(runner: _native.Runner) -> Float32:
        out = np.full((tokens, 360), np.nan, dtype=np.float32)
        _native.forward_stacked(runner, matrices, x, out, 2, norm)
        return out

    stacked = on_every_target(run)
    apart = np.concatenate([product(matrix, FIRST, x) for matrix in matrices], axis=1)
    assert stacked[:, 2:359].tobytes() == apart.tobytes()
    assert np.isnan(stacked[:, [0, 1, 359]]).all()


def test_only_matrices_of_one_kind_are_stacked() -> None:
    first, other, short = (
        loaded([section], 512)[0] for section in ((32, RowFormat(4)), (32, RowFormat(8)), (16, RowFormat(4)))
    )
    x, out = normal(1, 512), np.zeros((1, 64), dtype=np.float32)
    for matrices, column in [
        ([], 0),
        ([first, other], 0),
        ([short, first], 0),
        ([first, short, first], 0),
        ([first, first], 1),
        ([first, first], -1),
    ]:
        with pytest.raises(ValueError, match=r"there is a matrix|matrices have|out is"):
            _native.forward_stacked(FIRST, matrices, x, out, column, None)
