"""Tiles with two levels of scales and with tables: every target gives the bits of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32
from ondevice.bundle.codes import TABLE, group_integers, pack, unpack
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.bundle.tiles import untiled
from ondevice.config import TILE_FORMATS, RowFormat
from ondevice.kernels import _native
from tests.kernels.test_kernels import (
    RUNNERS,
    TARGETS,
    blockwise_int8,
    normal,
    on_every_target,
    quantised_activations,
)
from tests.support.expert_records import expert_layout_of, expert_record, native_expert
from tests.support.sources import form, made_up_rows

TWO_LEVELS = [stored for stored in TILE_FORMATS if stored.two_levels]
SHAPES = [(1, 256), (35, 512), (64, 1280)]
LARGEST = {2: 0xFF, 3: 0x00, 4: 0xFF, 5: 0xFF, 6: 0x80}
"""By bits, the byte of headers with which products are largest: of Q3_K all scales are -32, of Q6_K -128."""
FIRST = RUNNERS[TARGETS[0], 1]


def tiled(runner: _native.Runner, codes: Bytes, scales: NDArray[np.generic], stored: RowFormat) -> Bytes:
    """Rows of codes and scales as tiles, (bytes,)."""
    rows, cols = len(codes), codes.shape[1] * 8 // stored.bits
    tiles = np.full(TiledMatrix(rows, RowLayout(cols, *stored)).rows_bytes, 0xA5, dtype=np.uint8)
    none = np.zeros((rows, 0), dtype=np.uint8)
    _native.tile_rows(runner, stored, codes, scales.view(np.uint8), none, tiles)
    return tiles


def multiplied(
    runner: _native.Runner,
    tiles: Bytes,
    stored: RowFormat,
    rows: int,
    x: Float32,
    bias: Float32 | None = None,
) -> Float32:
    out = np.full((len(x), rows), np.nan, dtype=np.float32)
    _native.testing.multiply_tiles(runner, stored, tiles, x, bias, out)
    return out


def defined(x: Float32, codes: Bytes, headers: Bytes, stored: RowFormat) -> Float32:
    """x (T, C) times rows, step by step as `targets/two_level.cc` says: products fit long doubles."""
    q, count = unpack(codes, stored.bits).astype(np.int64), codes.shape[1] * 8 // stored.bits // 256
    found = headers.reshape(len(codes), count, -1)
    upper = np.ascontiguousarray(found[:, :, : stored.upper_bytes]).view(np.float16).astype(np.float32)
    scales, minimums = group_integers(found[:, :, stored.upper_bytes :], stored)
    values = TABLE[q].astype(np.int64) if "table" in stored.scales else q
    values = values - (stored.zero if stored.scales == "two_level_symmetric" else 0)
    activations, steps = blockwise_int8(x.reshape(len(x), -1, 64))
    whole, size = activations.astype(np.int64), stored.group_size
    total = np.zeros((len(x), len(codes)), dtype=np.float32)
    for block in range(4 * count):
        groups = slice(block % 4 * 64 // size, (block % 4 + 1) * 64 // size)
        inputs = whole[:, block].reshape(len(x), -1, size)
        weights = values[:, 64 * block : 64 * block + 64].reshape(len(codes), -1, size)
        sums = np.einsum("tgi,rgi,rg->tr", inputs, weights, scales[:, block // 4, groups].astype(np.int64))
        step = steps[:, block].astype(np.float32)
        total = fused(upper[:, block // 4, 0] * step, sums, total)
        if minimums is not None:
            sums = np.einsum("tgi,rg->tr", inputs, minimums[:, block // 4, groups].astype(np.int64))
            total = fused(upper[:, block // 4, 1] * -step, sums, total)
    return total


def fused(a: Float32, sums: NDArray[np.int64], acc: Float32) -> Float32:
    """A fused multiply-add with integers that are rounded to float32 first."""
    wide = a.astype(np.longdouble) * sums.astype(np.float32) + acc
    return wide.astype(np.float32)


@pytest.mark.parametrize("stored", TILE_FORMATS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_products_are_those_of_the_values(stored: RowFormat, rows: int, cols: int) -> None:
    codes, scales, _, exact = made_up_rows(rows, RowLayout(cols, *stored))
    bias, x = normal(rows, seed=1), normal(19, cols, seed=2)
    out = on_every_target(lambda it: multiplied(it, tiled(it, codes, scales, stored), stored, rows, x, bias))
    expected = quantised_activations(x, stored) @ exact.T.astype(np.float64) + bias
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5 * np.sqrt(cols))


@pytest.mark.parametrize("stored", TWO_LEVELS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_products_have_the_bits_of_the_definition(stored: RowFormat, rows: int, cols: int) -> None:
    codes, headers, _, _ = made_up_rows(rows, RowLayout(cols, *stored))
    x = normal(9, cols, seed=2)
    found = multiplied(FIRST, tiled(FIRST, codes, headers, stored), stored, rows, x)
    assert found.tobytes() == defined(x, codes, headers, stored).tobytes()


@pytest.mark.parametrize("stored", TWO_LEVELS)
@pytest.mark.parametrize("tokens", range(1, 10))
def test_the_largest_sums_are_exact(stored: RowFormat, tokens: int) -> None:
    """All codes, scales and activations at their limits, and all but one: the first sums to lose bits."""
    rows, cols = 16, 512
    q = np.full((rows, cols), 0 if "symmetric" in stored.scales else (1 << stored.bits) - 1, dtype=np.uint8)
    if "table" in stored.scales:
        q[:] = 0
    q[np.arange(rows), 7 * np.arange(rows)] ^= 1
    headers = np.full((rows, cols // 256, stored.header_bytes), LARGEST[stored.bits], dtype=np.uint8)
    if "table" in stored.scales:
        headers[:] = 0
    headers[:, :, : stored.upper_bytes] = np.ones(stored.upper_bytes // 2, np.float16).view(np.uint8)
    codes, headers = pack(q, stored.bits), headers.reshape(rows, -1)
    signs = np.where(np.arange(tokens)[:, None] % 2, -1, 1).astype(np.float32)
    x = np.repeat(signs, cols, axis=1)
    tiles = tiled(FIRST, codes, headers, stored)
    found = on_every_target(lambda runner: multiplied(runner, tiles, stored, rows, x))
    assert found.tobytes() == defined(x, codes, headers, stored).tobytes()


@pytest.mark.parametrize("stored", TILE_FORMATS)
def test_a_token_has_the_same_bits_in_any_company(stored: RowFormat) -> None:
    codes, scales, _, _ = made_up_rows(50, RowLayout(512, *stored))
    tiles, x = tiled(FIRST, codes, scales, stored), normal(35, 512, seed=1)
    for runner in RUNNERS.values():
        together = multiplied(runner, tiles, stored, 50, x)
        for first, last in ((0, 1), (3, 5), (5, 8), (8, 15), (15, 24), (24, 35)):
            apart = multiplied(runner, tiles, stored, 50, x[first:last])
            assert apart.tobytes() == together[first:last].tobytes()


@pytest.mark.parametrize("stored", TILE_FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 35])
def test_tiles_read_back_are_the_rows(stored: RowFormat, rows: int) -> None:
    codes, scales, _, _ = made_up_rows(rows, RowLayout(512, *stored))
    matrix = TiledMatrix(rows, RowLayout(512, *stored))
    for threads in (1, 2):
        tiles = tiled(RUNNERS[TARGETS[0], threads], codes, scales, stored)
        found = untiled(tiles, matrix)
        assert found.codes.tobytes() == codes.tobytes()
        assert found.scales.tobytes() == scales.tobytes()
        padding = untiled(tiles, TiledMatrix(matrix.padded_rows, matrix.row))
        assert not any(values[rows:].any() for values in padding[:2])


@pytest.mark.parametrize(
    ("rows", "down"),
    [*zip(TILE_FORMATS, reversed(TILE_FORMATS), strict=True), (TILE_FORMATS[0], RowFormat(6))],
)
def test_an_expert_has_a_format_for_its_down_matrix(rows: RowFormat, down: RowFormat) -> None:
    hidden, neurons = 256, 512
    layout = expert_layout_of(hidden, neurons, rows, down, has_bias=True)
    shapes = [(neurons, hidden), (neurons, hidden), (hidden, neurons)]
    matrices = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    biases = [normal(len(matrix), seed=9 + at) for at, matrix in enumerate(matrices)]
    for tokens in (1, 13):
        x = normal(tokens, hidden, seed=5)

        def run(runner: _native.Runner, x: Float32 = x) -> Float32:
            record = expert_record(runner, layout, matrices, biases)
            out = np.full(x.shape, np.nan, dtype=np.float32)
            native_expert(layout).forward(runner, x, record.ctypes.data, form("silu"), out)
            return out

        out = on_every_target(run)
        record = expert_record(FIRST, layout, matrices, biases)
        parts = [
            record[offset : offset + matrix.rows_bytes]
            for offset, matrix in zip(layout.part_offsets, layout.matrices, strict=True)
        ]
        gate, up = (multiplied(FIRST, parts[at], rows, neurons, x, biases[at]) for at in (0, 1))
        h = np.empty_like(gate)
        _native.activate(FIRST, form("silu"), gate.reshape(-1), up.reshape(-1), h.reshape(-1))
        assert out.tobytes() == multiplied(FIRST, parts[2], down, hidden, h, biases[2]).tobytes()


def test_columns_that_scales_do_not_divide_are_refused() -> None:
    stored = TILE_FORMATS[0]
    place = (stored, 0, None)
    with pytest.raises(ValueError, match="multiple of 256"):
        _native.Expert(320, 256, place, None, place)
    with pytest.raises(ValueError, match="multiple of 256"):
        _native.testing.multiply_tiles(
            FIRST, stored, np.zeros(64, np.uint8), normal(1, 64), None, normal(1, 16)
        )
    codes = np.zeros((1, 16), np.uint8)
    with pytest.raises(ValueError, match="multiple of 256"):
        _native.tile_rows(FIRST, stored, codes, codes, codes, codes.reshape(-1))
