"""The ways of rounding that a benchmark compares: each is the least by the measure that it is meant for."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Float32
from ondevice.converters.quantize import dequantize
from tests.benchmarks.lib.rounding import (
    Float64,
    Format,
    least_squares,
    rows_with_feedback,
    to_range,
    with_feedback,
)
from tests.support.quantize_reference import quantize_reference

ROWS, COLS = 48, 128


def inputs(cols: int) -> Float64:
    """Second moments (cols, cols) of inputs that differ in energy and go together."""
    random = np.random.default_rng(2)
    mixed = random.standard_normal((600, 12)) @ random.standard_normal((12, cols))
    x = (mixed + 0.5 * random.standard_normal((600, cols))) * np.exp(0.7 * random.standard_normal(cols))
    return x.T @ x / len(x)


def weights(rows: int, cols: int) -> Float32:
    return np.random.default_rng(3).standard_normal((rows, cols)).astype(np.float32)


def output_error(off: Float32, moments: Float64) -> float:
    """Mean square of what errors `off` (R, C) change in the outputs of inputs with these moments."""
    return float(np.einsum("rc,cd,rd->", off, moments, off))


def test_each_way_is_the_better_by_its_own_measure() -> None:
    weight, moments = weights(ROWS, COLS), inputs(COLS)
    ranged, least = to_range(weight) - weight, least_squares(weight) - weight
    fed = with_feedback(weight, moments) - weight
    assert np.square(least).sum() < 0.85 * np.square(ranged).sum()
    assert output_error(fed, moments) < 0.5 * output_error(least, moments)
    finer = [np.square(least_squares(weight, form) - weight).sum() for form in (Format(4, 32), Format(5))]
    assert finer[1] < finer[0] < np.square(least).sum()


def test_a_down_projection_is_fed_back_over_its_rows() -> None:
    weight, moments = weights(COLS, ROWS), inputs(COLS)
    least, fed = least_squares(weight) - weight, rows_with_feedback(weight, moments) - weight
    assert output_error(fed.T, moments) < 0.5 * output_error(least.T, moments)


def test_least_squares_is_what_the_converter_does() -> None:
    weight = weights(ROWS, COLS + 20)
    stored = dequantize(quantize_reference(weight, 4), 4, COLS + 20)
    off = [float(np.square(found - weight).sum()) for found in (least_squares(weight), stored)]
    assert abs(off[0] / off[1] - 1) < 1e-3


def test_values_are_those_of_sixteen_codes_a_group() -> None:
    weight = weights(ROWS, COLS)
    down = rows_with_feedback(weight, inputs(ROWS))
    for rounded in (to_range(weight), least_squares(weight), with_feedback(weight, inputs(COLS)), down):
        for group in rounded.reshape(-1, 64):
            values = np.unique(group)
            assert len(values) <= 16
            steps = np.diff(values) / np.diff(values).min()
            np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
