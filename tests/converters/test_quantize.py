"""The native quantiser against its definition in numpy, bit for bit, and what quantisation promises."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from ondevice.converters.quantize import (
    QuantizedRows,
    SquaredError,
    Weights,
    dequantize,
    quantize,
    sampled_error,
    to_float32,
)
from ondevice.errors import CheckpointError
from ondevice.kernels import _native
from tests.support.quantize_reference import quantize_reference

BITS = (4, 5, 6, 8, 16)
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module", params=_native.available_targets())
def runner(request: pytest.FixtureRequest) -> _native.Runner:
    return _native.Runner(2, request.param)


def stored(values: np.ndarray, dtype: str) -> Weights:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def awkward_rows(cols: int, seed: int = 0) -> np.ndarray:
    """Rows of every magnitude, and groups that are all zero, of one sign, constant, tiny or sparse."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((35, cols)).astype(np.float32) * np.float32(10) ** rng.uniform(-6, 2, (35, 1))
    rows = rows.astype(np.float32)
    rows[3], rows[4] = 0.0, -0.0
    rows[5], rows[6] = 0.25, -0.25
    rows[7, ::2] = 0.0
    rows[8], rows[9] = np.abs(rows[8]), -np.abs(rows[9])
    rows[10] *= 1e-6
    rows[11], rows[11, 0] = 0.0, -0.0
    rows[12] *= 1e-38
    rows[13, :] = np.where(np.arange(cols) % 2, 3.0, -3.0)
    return rows


def same_bytes(mine: QuantizedRows, theirs: QuantizedRows) -> bool:
    pairs = [(getattr(mine, name), getattr(theirs, name)) for name in ("codes", "scales", "biases")]
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.fast(
    "*-1-float32-*",
    "*-65-*",
    "*-64-bfloat16-*",
    "*-1000-float32-4",
    "scalar-100-float32-*",
)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 5, 64, 65, 100, 192, 1000])
def test_native_bits_are_those_of_the_definition(
    runner: _native.Runner, bits: int, dtype: str, cols: int
) -> None:
    rows = stored(awkward_rows(cols), dtype)
    expected = quantize_reference(rows, bits)
    assert same_bytes(quantize(runner, rows, bits, "t"), expected)
    columns = np.asfortranarray(rows)
    assert same_bytes(quantize(runner, columns, bits, "t"), expected), "a transposed view"
    wide = np.ascontiguousarray(np.concatenate([rows, rows], axis=0).T)
    assert same_bytes(quantize(runner, wide[:, 3:38].T, bits, "t"), quantize_reference(wide[:, 3:38].T, bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_puts_element_2k_in_the_low_nibble(runner: _native.Runner, bits: int) -> None:
    """The oracle and the kernel could share a mistake; these codes are worked out by hand."""
    top = (1 << bits) - 1
    half = (top + 1) // 2
    row = np.zeros((1, 64), dtype=np.float32)
    row[0, :4] = [half, half - 1, 2 - half, 1 - half]
    rows = quantize(runner, row, bits, "t")
    codes = rows.codes[0]
    if bits == 4:
        # The whole range in steps of 1 is exact, and the first start.
        assert (rows.scales[0, 0], rows.biases[0, 0]) == (1.0, 1 - half)
        assert [int(v) for v in (codes[0] & 15, codes[0] >> 4, codes[1] & 15, codes[1] >> 4)] == [
            15,
            14,
            1,
            0,
        ]
    else:
        # The end further from zero is `half`, so it has code 0, and the range has steps of -1.
        assert (rows.scales[0, 0], rows.biases[0, 0]) == (-1.0, half)
        assert [int(v) for v in codes[:4]] == [0, 1, top - 1, top]


@pytest.mark.parametrize("bits", [5, 6])
def test_codes_of_5_and_6_bits_follow_each_other_without_gaps(
    runner: _native.Runner, bits: Literal[5, 6]
) -> None:
    """A row whose range is whole steps of 1 has the codes worked out by hand, low bits first."""
    row = np.zeros((1, 64), dtype=np.float32)
    wanted = [(1 << bits) - 1, 0, 1, 2, 3, 5, 7, 11]
    row[0, :8] = wanted
    rows = quantize(runner, row, bits, "t")
    assert (rows.scales[0, 0], rows.biases[0, 0]) == (1.0, 0.0)
    number = int.from_bytes(rows.codes[0].tobytes(), "little")
    assert rows.codes.shape == (1, 8 * bits)
    assert number == sum(code << bits * i for i, code in enumerate(wanted))


def test_8_bits_come_back_within_half_a_step() -> None:
    """The end nearer to zero may miss by up to a step, which gives zero a code of its own."""
    rows = np.random.default_rng(1).standard_normal((50, 200)).astype(np.float32)
    quantised = quantize_reference(rows, 8)
    errors = np.abs(dequantize(quantised, 8, 200) - rows)
    step = np.repeat(np.abs(quantised.scales.astype(np.float32)), 64, axis=1)[:, :200]
    rounding = 2.0**-10 * np.abs(rows).max()  # of scale and bias to float16, over the range
    assert (errors <= step + rounding).all()
    assert (errors <= 0.5 * step + rounding).mean() > 0.97
    assert 0.2 * step.mean() < errors.mean() < 0.3 * step.mean()


def test_zero_stays_zero_at_8_bits() -> None:
    rows = np.random.default_rng(3).standard_normal((20, 128)).astype(np.float32)
    rows[:, ::3] = 0.0
    back = dequantize(quantize_reference(rows, 8), 8, 128)
    assert np.abs(back[:, ::3]).max() < 2.0**-10 * np.abs(rows).max()


def spanning_the_range(rows: np.ndarray) -> np.ndarray:
    """Groups (N, n) at 4 bits whose codes span the range, zero having a code: what 8 bits do, in float64."""
    w = rows.astype(np.float64)
    low, high = w.min(axis=1, keepdims=True), w.max(axis=1, keepdims=True)
    end, step = np.where(-low > high, low, high), np.where(-low > high, high - low, low - high) / 15
    with np.errstate(all="ignore"):
        zero = np.where(step != 0, np.rint(end / step), 0)
        step = np.where(zero != 0, end / zero, step).astype(np.float16).astype(np.float64)
        end = end.astype(np.float16).astype(np.float64)
        codes = np.clip(np.rint((w - end) / step), 0, 15)
    return end + step * np.where(step != 0, codes, 0)


def group_errors(rows: np.ndarray, back: np.ndarray) -> np.ndarray:
    return np.square(back.astype(np.float64) - rows).sum(axis=1)


@pytest.mark.parametrize("cols", [1, 2, 33, 64])
def test_4_bits_never_miss_by_more_than_codes_that_span_the_range(cols: int) -> None:
    rows = np.concatenate([awkward_rows(cols, seed) for seed in range(8)])
    rows = np.concatenate([rows, np.where(np.random.default_rng(cols).random(rows.shape) < 0.8, 0, rows)])
    back = dequantize(quantize_reference(rows, 4), 4, cols)
    # Errors are summed in float32, which tells apart no squares of less than 1e-45.
    assert (group_errors(rows, back) <= 1.0001 * group_errors(rows, spanning_the_range(rows)) + 1e-40).all()


def test_4_bits_by_least_squares_save_a_fifth_of_the_squared_error() -> None:
    rows = np.random.default_rng(4).standard_normal((2000, 64)).astype(np.float32)
    back = dequantize(quantize_reference(rows, 4), 4, 64)
    assert group_errors(rows, back).sum() < 0.81 * group_errors(rows, spanning_the_range(rows)).sum()


def test_no_other_scale_or_bias_suits_the_codes_better() -> None:
    """Least squares over a group's own codes finds nothing that saves a hundredth of its error."""
    rows = np.random.default_rng(5).standard_normal((300, 64)).astype(np.float32)
    quantised = quantize_reference(rows, 4)
    error = group_errors(rows, dequantize(quantised, 4, 64))
    codes = np.stack([quantised.codes & 15, quantised.codes >> 4], axis=-1).reshape(len(rows), 64)
    best = [
        np.linalg.lstsq(np.stack([q, np.ones(64)], axis=1), w, rcond=None)[1][0]
        for q, w in zip(codes.astype(np.float64), rows.astype(np.float64), strict=True)
    ]
    assert (error >= np.array(best) - 1e-9).all()
    assert error.sum() < 1.002 * sum(best)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_the_largest_float16_values_are_stored(runner: _native.Runner, bits: int) -> None:
    rows = np.random.default_rng(6).uniform(-65504, 65504, (20, 64)).astype(np.float32)
    rows[:, 0], rows[:, 1] = -65504, 65504
    rows[0] = np.where(np.arange(64) % 2, 65504, -65504)
    quantised = quantize(runner, rows, bits, "t")
    assert same_bytes(quantised, quantize_reference(rows, bits))
    back = dequantize(quantised, bits, 64)
    assert np.isfinite(back).all()
    assert np.abs(back - rows).max() < 1.3 * 2 * 65504 / (2**bits - 1)


@pytest.mark.parametrize("bits", BITS)
def test_constant_and_zero_groups_are_exact(bits: int) -> None:
    for value in (0.0, 0.5, -3.0):
        rows = np.full((1, 70), value, dtype=np.float32)
        assert (dequantize(quantize_reference(rows, bits), bits, 70) == value).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dtype", "bad"), [
    ("float32", np.nan), ("float32", np.inf), ("float32", -np.inf), ("float32", 1e6), ("float32", -3e38),
    ("float16", np.nan), ("float16", np.inf), ("bfloat16", np.nan), ("bfloat16", 2e5),
])  # fmt: skip
def test_what_float16_cannot_hold_is_refused_by_name(
    runner: _native.Runner, bits: int, dtype: str, bad: float
) -> None:
    for row, column in ((0, 0), (20, 69), (34, 99)):
        values = np.ones((35, 100), dtype=np.float32)
        values[row, column] = bad
        rows = stored(values, dtype)
        with pytest.raises(CheckpointError, match=r"w\.7 holds NaN, infinity"):
            quantize(runner, rows, bits, "w.7")
        with pytest.raises(CheckpointError, match=r"w\.7 holds NaN, infinity"):
            quantize_reference(rows, bits, "w.7")


def test_bfloat16_is_widened_exactly() -> None:
    values = np.array([[1.0, -2.5, 3.0e38, 1e-40]], dtype=np.float32)
    assert to_float32(stored(values, "bfloat16"))[0, :2].tolist() == [1.0, -2.5]
    assert to_float32(stored(values, "bfloat16"))[0, 2] == pytest.approx(3.0e38, rel=0.01)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_sampled_error_is_the_error(bits: int) -> None:
    rows = np.random.default_rng(2).standard_normal((400, 256)).astype(np.float32)
    quantised = quantize_reference(rows, bits)
    back = dequantize(quantised, bits, 256)
    whole = np.sqrt(np.square(back - rows).sum() / np.square(rows).sum())
    total = SquaredError()
    for start in range(0, 400, 16):
        part = slice(start, start + 16)
        chosen = QuantizedRows(quantised.codes[part], quantised.scales[part], quantised.biases[part])
        total += sampled_error(_native.Runner(1), rows[part], chosen, bits)
    assert total.relative == pytest.approx(whole, rel=0.05)
    assert total.relative == float(f"{total.relative:.3g}")
    assert SquaredError().relative == 0.0
