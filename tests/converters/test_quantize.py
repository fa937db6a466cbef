"""The native quantiser against its definition in numpy, bit for bit, and what quantisation promises."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.converters.quantize import (
    QuantizedRows,
    SquaredError,
    Weights,
    dequantize,
    quantize,
    quantize_reference,
    sampled_error,
    to_float32,
)
from ondevice.errors import CheckpointError
from ondevice.kernels import _native

BITS = (4, 8, 16)
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
    # The end further from zero is `half`, so it has code 0, and the range has steps of -1.
    assert (rows.scales[0, 0], rows.biases[0, 0]) == (-1.0, half)
    codes = rows.codes[0]
    values = [codes[0] & 15, codes[0] >> 4, codes[1] & 15, codes[1] >> 4] if bits == 4 else codes[:4]
    assert [int(v) for v in values] == [0, 1, top - 1, top]


@pytest.mark.parametrize("bits", [4, 8])
def test_values_come_back_within_half_a_step(bits: int) -> None:
    """The end nearer to zero may miss by up to a step, which gives zero a code of its own."""
    rows = np.random.default_rng(1).standard_normal((50, 200)).astype(np.float32)
    quantised = quantize_reference(rows, bits)
    errors = np.abs(dequantize(quantised, bits, 200) - rows)
    step = np.repeat(np.abs(quantised.scales.astype(np.float32)), 64, axis=1)[:, :200]
    rounding = 2.0**-10 * np.abs(rows).max()  # of scale and bias to float16, over the range
    assert (errors <= step + rounding).all()
    assert (errors <= 0.5 * step + rounding).mean() > 0.97
    assert 0.2 * step.mean() < errors.mean() < 0.3 * step.mean()


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_stays_zero(bits: int) -> None:
    rows = np.random.default_rng(3).standard_normal((20, 128)).astype(np.float32)
    rows[:, ::3] = 0.0
    back = dequantize(quantize_reference(rows, bits), bits, 128)
    assert np.abs(back[:, ::3]).max() < 2.0**-10 * np.abs(rows).max()


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


@pytest.mark.parametrize("bits", [4, 8])
def test_sampled_error_is_the_error(bits: int) -> None:
    rows = np.random.default_rng(2).standard_normal((400, 256)).astype(np.float32)
    quantised = quantize_reference(rows, bits)
    back = dequantize(quantised, bits, 256)
    whole = np.sqrt(np.square(back - rows).sum() / np.square(rows).sum())
    total = SquaredError()
    for start in range(0, 400, 16):
        part = slice(start, start + 16)
        chosen = QuantizedRows(quantised.codes[part], quantised.scales[part], quantised.biases[part])
        total += sampled_error(rows[part], chosen, bits)
    assert total.relative == pytest.approx(whole, rel=0.05)
    assert total.relative == float(f"{total.relative:.3g}")
    assert SquaredError().relative == 0.0
