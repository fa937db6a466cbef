"""Groups of 32, implied biases, MXFP4: every target gives the same bits, near those of a float64 oracle."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.reference import dequantize_rows
from ondevice.bundle.codes import E2M1, MAX_POWER, pack, unpack
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.config import MXFP4, TILE_FORMATS, Bits, RowFormat, Scales
from ondevice.converters.quantize import quantize
from ondevice.kernels import _native
from tests.kernels.test_gathered import Layer
from tests.kernels.test_kernels import (
    RUNNERS,
    TARGETS,
    normal,
    on_every_target,
    packed,
    quantised_activations,
)
from tests.support.quantize_reference import quantize_reference
from tests.support.sources import form, quantise_rows

BITS: tuple[Bits, ...] = get_args(Bits)[:-1]
ONE_LEVEL: tuple[Scales, ...] = ("affine", "symmetric")
FORMATS = [RowFormat(bits, 32, scales) for bits in BITS for scales in ONE_LEVEL]
FORMATS += [RowFormat(5), RowFormat(6), MXFP4]


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 64), (35, 96), (130, 200)])
def test_a_product_in_every_row_format_matches_float64(stored: RowFormat, rows: int, cols: int) -> None:
    weight, bias, x = normal(rows, cols), normal(rows, seed=1), normal(19, cols, seed=2)

    def run(runner: _native.Runner) -> Float32:
        out = np.full((19, rows), np.nan, dtype=np.float32)
        packed(runner, weight, stored)[0].forward(runner, x, bias, out)
        return out

    out = on_every_target(run)
    exact = packed(RUNNERS[TARGETS[0], 1], weight, stored)[1]
    used = quantised_activations(x, stored)[:, :cols]
    np.testing.assert_allclose(out, used @ exact.T + bias, rtol=1e-5, atol=2e-5 * np.sqrt(cols))


@pytest.mark.parametrize("stored", FORMATS)
def test_a_token_has_the_same_bits_in_any_company(stored: RowFormat) -> None:
    weight, x = normal(50, 200), normal(35, 200, seed=1)
    for runner in RUNNERS.values():
        matrix, _ = packed(runner, weight, stored)
        together = np.empty((35, 50), dtype=np.float32)
        matrix.forward(runner, x, None, together)
        for first, last in ((0, 1), (3, 5), (5, 8), (8, 15), (15, 24), (24, 35)):
            apart = np.empty((last - first, 50), dtype=np.float32)
            matrix.forward(runner, x[first:last], None, apart)
            assert apart.tobytes() == together[first:last].tobytes()


@pytest.mark.fast("[1479]-*")
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("tokens", range(1, 10))
def test_the_largest_products_of_all_columns_add_up(stored: RowFormat, tokens: int) -> None:
    rows, cols, top = 16, 128, (1 << stored.bits) - 1
    codes = np.full((rows, cols * stored.bits // 8), 255, dtype=np.uint8)
    ones = np.ones((rows, cols // stored.group_size), dtype=np.float16).view(np.uint8)
    if stored.mxfp4:
        ones = np.full((rows, cols // 32), 127, dtype=np.uint8)
    signs = np.where(np.arange(tokens)[:, None] % 2, -1, 1).astype(np.float32)

    def run(runner: _native.Runner) -> Float32:
        matrix, out = _native.Matrix(rows, cols, stored), np.empty((tokens, rows), dtype=np.float32)
        matrix.load_rows(runner, 0, codes, ones, np.zeros_like(ones))
        matrix.forward(runner, np.repeat(signs, cols, axis=1), None, out)
        return out

    value = -6 if stored.mxfp4 else top - stored.zero if stored.implied_bias else top
    np.testing.assert_allclose(on_every_target(run), np.tile(signs * value * cols, rows), rtol=1e-6)


@pytest.mark.fast("5-100-200-*", "1-576-321-stored[17]", "1-1-1-stored[05]")
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize(("hidden", "neurons"), [(1, 1), (100, 200), (576, 321)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_neurons_that_fire_give_the_dense_bits(
    stored: RowFormat, hidden: int, neurons: int, tokens: int
) -> None:
    layer, x = Layer.of(hidden, neurons, stored), normal(tokens, hidden, seed=3)
    act = form("relu")
    dense = on_every_target(lambda runner: layer.dense(runner, x, act))
    assert on_every_target(lambda runner: layer.gathered(runner, x, act)).tobytes() == dense.tobytes()


@pytest.mark.parametrize("stored", FORMATS)
def test_rows_read_back_are_the_values(stored: RowFormat) -> None:
    codes, scales, biases, exact = quantise_rows(normal(5, 130), stored)
    rows = np.concatenate([codes, scales.view(np.uint8), biases.view(np.uint8)], axis=1)
    assert rows.shape[1] == RowLayout(130, *stored).nbytes

    def run(runner: _native.Runner) -> Float32:
        out = np.empty((5, 192), dtype=np.float32)
        _native.dequantize_rows(runner, stored, rows, 130, out)
        return out

    np.testing.assert_allclose(on_every_target(run)[:, :130], exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("cols", [1, 32, 96, 130])
def test_rounding_in_groups_of_32_is_that_of_the_definition(bits: Bits, cols: int) -> None:
    rows, stored = normal(17, cols), RowFormat(bits, 32)
    expected = quantize_reference(rows, stored)
    for runner in RUNNERS.values():
        found = quantize(runner, rows, stored, "t")
        for one, other in zip(vars(found).values(), vars(expected).values(), strict=True):
            assert one.tobytes() == other.tobytes()


def test_impossible_formats_are_refused() -> None:
    impossible = [(4, 48, "affine"), (16, 32, "affine"), (4, 64, "symmetric"), (7, 32, "affine")]
    impossible += [(8, 32, "mxfp4"), (4, 64, "mxfp4"), (4, 32, "unknown"), (3, 32, "two_level")]
    says = r"bits must|groups have|biases are|MXFP4 has|no kind|other bits|tiles alone"
    for stored in impossible:
        with pytest.raises(ValueError, match=says):
            _native.Matrix(16, 256, stored)
    rows, out = np.zeros((1, 600), dtype=np.uint8), np.zeros((1, 256), dtype=np.float32)
    for stored in TILE_FORMATS:
        with pytest.raises(ValueError, match=says):
            _native.dequantize_rows(RUNNERS[TARGETS[0], 1], stored, rows, 256, out)


EXTREMES = np.array([0, 1, 2, 126, 127, 128, 200, MAX_POWER], dtype=np.uint8)


def test_mxfp4_rows_mean_what_the_standard_says() -> None:
    scales = np.repeat(EXTREMES, 2).reshape(1, -1)
    codes = np.tile(pack(np.arange(32, dtype=np.uint8).reshape(1, -1) % 16, 4), (1, scales.shape[1]))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.tile(np.concatenate([values, -values]), 2)
    expected = np.concatenate([values * 2.0 ** (int(scale) - 127) for scale in scales[0]])

    def run(runner: _native.Runner) -> Float32:
        out = np.empty((1, expected.size), dtype=np.float32)
        _native.dequantize_rows(runner, MXFP4, np.concatenate([codes, scales], axis=1), expected.size, out)
        return out

    found = on_every_target(run)
    np.testing.assert_array_equal(found[0].astype(np.float64), expected)
    assert np.isfinite(found).all()
    none = np.zeros((1, 0), dtype=np.float16)
    assert dequantize_rows(codes, scales, none, MXFP4, expected.size).tobytes() == found.tobytes()


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("scale", EXTREMES)
def test_mxfp4_scales_of_any_size(scale: int, tokens: int) -> None:
    """Products of the smallest and largest scales: rounded once where they are subnormal."""
    rng = np.random.default_rng(int(scale))
    codes = rng.integers(0, 256, (16, 32), dtype=np.uint8)
    scales = np.full((16, 2), scale, dtype=np.uint8)
    x = normal(tokens, 64) * np.float32(1e-3 if scale > 200 else 1)

    def run(runner: _native.Runner) -> Float32:
        matrix, out = _native.Matrix(16, 64, MXFP4), np.empty((tokens, 16), dtype=np.float32)
        matrix.load_rows(runner, 0, codes, scales, scales[:, :0])
        matrix.forward(runner, x, None, out)
        return out

    exact = E2M1[unpack(codes, 4)].astype(np.float64) * 2.0 ** (float(scale) - 127)
    expected = quantised_activations(x, MXFP4) @ exact.T
    # Two sums of a few thousand products of a half, whose scale is rounded to a multiple of 2^-149.
    atol = 8192 * 2.0**-149 + 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(on_every_target(run), expected, rtol=1e-6, atol=atol)
