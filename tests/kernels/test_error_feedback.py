"""Rounding with error feedback against its definition in numpy, bit for bit, on every target."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.bundle.codes import pack
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.config import RowFormat
from ondevice.converters.quantize import QuantizedRows, dequantize, quantize
from ondevice.kernels import _native
from tests.support.quantize_reference import quantize_reference

RUNNERS = [(threads, target) for target in _native.available_targets() for threads in (1, 3)]


def moments(count: int, seed: int = 0) -> np.ndarray:
    """Second moments of `count` inputs that depend on each other."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3 * count, count)) @ rng.standard_normal((count, count))
    return x.T @ x / len(x) + 0.1 * np.eye(count)


def factor_of(h: np.ndarray, runner: _native.Runner | None = None) -> np.ndarray:
    found = np.empty(h.shape, np.float32)
    assert _native.feedback_factor(runner or _native.Runner(1), h.copy(), found)
    return found


def rounded(
    w: np.ndarray, factor: np.ndarray, runner: _native.Runner, by_row: bool, size: int = 64, bits: int = 4
) -> QuantizedRows:
    layout = RowLayout(w.shape[1], bits, size)
    codes = np.empty((len(w), layout.codes_bytes), np.uint8)
    scales, biases = np.empty((2, len(w), layout.groups), np.uint16)
    kernel = _native.round_rows if by_row else _native.round_columns
    assert kernel(runner, w, RowFormat(bits, size), factor, codes, scales, biases)
    return QuantizedRows(codes, scales.view(np.float16), biases.view(np.float16))


def columns_reference(w: np.ndarray, factor: np.ndarray, size: int, bits: int) -> QuantizedRows:
    """The definition of `round_columns`: each line is one float32 operation, column after column."""
    now, parts, top = w.copy(), [], np.float32(2**bits - 1)
    for start in range(0, -(-w.shape[1] // 64) * 64, size):
        stop = min(start + size, w.shape[1])
        if start >= stop:
            nothing = np.zeros((len(w), 1), np.float16)
            empty = np.zeros((len(w), size * bits // 8), np.uint8)
            parts.append(QuantizedRows(empty, nothing, nothing))
            continue
        fit = quantize_reference(now[:, start:stop], bits)
        scale, bias = fit.scales[:, 0].astype(np.float32), fit.biases[:, 0].astype(np.float32)
        codes = np.zeros((len(w), size), np.uint8)
        inverse = np.where(scale != 0, np.float32(1) / np.where(scale != 0, scale, 1), np.float32(0))
        for column in range(start, stop):
            q = np.rint(np.clip((now[:, column] - bias) * inverse, np.float32(0), top))
            codes[:, column - start] = q
            error = w[:, column] - (scale * q + bias)
            now[:, column + 1 :] += error[:, None] * factor[column, column + 1 :]
        parts.append(QuantizedRows(pack(codes, bits), fit.scales, fit.biases))
    return QuantizedRows(
        *(np.concatenate([getattr(p, name) for p in parts], axis=1) for name in ("codes", "scales", "biases"))
    )


def rows_reference(w: np.ndarray, factor: np.ndarray, bits: int) -> QuantizedRows:
    """The definition of `round_rows`: a row is rounded by itself, then all rows after it take its error."""
    now, parts = w.copy(), []
    for row in range(len(w)):
        parts.append(quantize_reference(now[row : row + 1], bits))
        error = w[row] - dequantize(parts[-1], bits, w.shape[1])[0]
        now[row + 1 :] += factor[row, row + 1 :, None] * error
    return QuantizedRows(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("codes", "scales", "biases"))
    )


@pytest.mark.parametrize("count", [1, 64, 200])
def test_the_factor_is_that_of_the_moments(count: int) -> None:
    h = moments(count)
    found = factor_of(h)
    assert not np.tril(found).any()
    unit = found.astype(np.float64) + np.eye(count)
    middle = np.linalg.solve(unit, np.linalg.solve(unit, h).T)
    assert np.abs(middle - np.diag(np.diag(middle))).max() < 1e-5 * np.abs(h).max()
    for threads, target in RUNNERS:
        assert np.array_equal(factor_of(h, _native.Runner(threads, target)), found)


def test_moments_without_a_factor_are_told() -> None:
    for bad in (-np.eye(3), np.full((2, 2), np.nan), np.ones((70, 70)) - 2 * np.eye(70)):
        assert not _native.feedback_factor(_native.Runner(1), bad, np.empty(bad.shape, np.float32))


@pytest.mark.fast("False-*-20-130", "True-64-4-18-64", "True-64-5-20-130", "True-64-6-3-200", "*-1-1")
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (18, 64), (20, 130), (3, 200)])
@pytest.mark.parametrize(
    ("by_row", "size", "bits"),
    [
        (False, 64, 4),
        (False, 32, 4),
        (True, 64, 4),
        (False, 64, 5),
        (False, 32, 6),
        (True, 64, 5),
        (True, 64, 6),
    ],
)
def test_rounding_is_its_definition_on_every_target(
    rows: int, cols: int, by_row: bool, size: int, bits: int
) -> None:
    w = np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32)
    w[0, 0] = 0.0
    factor = factor_of(moments(rows if by_row else cols))
    expected = rows_reference(w, factor, bits) if by_row else columns_reference(w, factor, size, bits)
    for threads, target in RUNNERS:
        found = rounded(w, factor, _native.Runner(threads, target), by_row, size, bits)
        for name in ("codes", "scales", "biases"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), (name, threads, target)


@pytest.mark.parametrize("by_row", [False, True])
def test_many_rows_and_columns_have_the_same_bits_on_every_target(by_row: bool) -> None:
    w = np.random.default_rng(9).standard_normal((150, 1100)).astype(np.float32)
    factor = factor_of(moments(150 if by_row else 1100))
    first = rounded(w, factor, _native.Runner(1, "scalar"), by_row)
    for threads, target in RUNNERS:
        found = rounded(w, factor, _native.Runner(threads, target), by_row)
        assert np.array_equal(found.codes, first.codes)
        assert np.array_equal(found.scales, first.scales)


@pytest.mark.parametrize("by_row", [False, True])
def test_the_product_is_off_by_less_than_with_least_squares(by_row: bool) -> None:
    w = np.random.default_rng(4).standard_normal((96, 192)).astype(np.float32)
    h = moments(96 if by_row else 192)
    plain = quantize(_native.Runner(1), w, 4, "w")
    losses = []
    for found in (rounded(w, factor_of(h), _native.Runner(1), by_row), plain):
        off = dequantize(found, 4, 192) - w
        losses.append(np.trace(off.T @ h @ off if by_row else off @ h @ off.T))
    assert losses[0] < 0.7 * losses[1]


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_values_that_float16_lacks_are_told(by_row: bool, bad: float) -> None:
    w = np.zeros((20, 70), np.float32)
    w[19, 69] = bad
    factor = np.zeros((20, 20) if by_row else (70, 70), np.float32)
    out = np.empty((20, 64), np.uint8), np.empty((20, 2), np.uint16), np.empty((20, 2), np.uint16)
    kernel = _native.round_rows if by_row else _native.round_columns
    assert not kernel(_native.Runner(2), w, 4, factor, *out)
    with pytest.raises(ValueError, match="4 to 6 bits"):
        kernel(_native.Runner(2), w, 8, factor, *out)
    with pytest.raises(ValueError, match="factor"):
        kernel(_native.Runner(2), w, 4, factor[1:], *out)
