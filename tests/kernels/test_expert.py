"""An expert whose matrices lie whole in its record, against the kernels of matrices and a float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.bundle.tiles import untiled
from ondevice.config import MXFP4, RowFormat
from ondevice.kernels import _native
from ondevice.model_config import Activation
from tests.kernels.test_kernels import (
    RUNNERS,
    TARGETS,
    normal,
    on_every_target,
    packed,
    quantised_activations,
)
from tests.support.expert_records import expert_layout_of, expert_record, native_expert
from tests.support.sources import form, quantise_rows

FORMATS = [
    (RowFormat(4), RowFormat(4)),
    (RowFormat(4, 32), RowFormat(6, 32)),
    (RowFormat(8, 32, "symmetric"), RowFormat(5)),
    (RowFormat(5, 32, "symmetric"), RowFormat(8)),
    (RowFormat(6), RowFormat(4, 32, "symmetric")),
    (MXFP4, MXFP4),
    (MXFP4, RowFormat(4, 32)),
    (RowFormat(16), RowFormat(16)),
]
"""Of gate and up matrices, and of down matrices."""
SHAPES = [(1, 1), (100, 200), (130, 47)]
"""Hidden sizes and numbers of neurons."""
SCALAR = RUNNERS["scalar", 1]


def matrices_of(hidden: int, neurons: int) -> tuple[list[Float32], list[Float32]]:
    """Gate, up and down, and their biases."""
    shapes = [(neurons, hidden), (neurons, hidden), (hidden, neurons)]
    matrices = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return matrices, [normal(len(matrix), seed=9 + at) for at, matrix in enumerate(matrices)]


def composed(
    x: Float32,
    matrices: list[Float32],
    biases: list[Float32] | None,
    stored: list[RowFormat],
    act: Activation,
) -> tuple[Float32, Float32]:
    """The output for x (T, D) by the kernels of matrices, one by one, and the hidden activations (T, F)."""
    products = []
    for at, (matrix, own) in enumerate(zip(matrices[:-1], stored[:-1], strict=True)):
        out = np.empty((len(x), len(matrix)), dtype=np.float32)
        packed(SCALAR, matrix, own)[0].forward(SCALAR, x, None if biases is None else biases[at], out)
        products.append(out.reshape(-1))
    h = np.empty_like(products[0])
    _native.activate(SCALAR, form(act), products[0], products[1] if len(products) == 2 else None, h)
    h, out = h.reshape(len(x), -1), np.empty((len(x), len(matrices[-1])), dtype=np.float32)
    packed(SCALAR, matrices[-1], stored[-1])[0].forward(
        SCALAR, h, None if biases is None else biases[-1], out
    )
    return out, h


@pytest.mark.fast(
    "gated-130-47-*",
    "gated-100-200-rows1-*",
    "ungated-130-47-rows[15]-*",
    "biased-130-47-rows[37]-*",
    "*-1-1-rows0-*",
)
@pytest.mark.parametrize(("rows", "down"), FORMATS)
@pytest.mark.parametrize(("hidden", "neurons"), SHAPES)
@pytest.mark.parametrize("kind", ["gated", "biased", "ungated"])
def test_an_expert_is_the_product_of_its_matrices(
    hidden: int, neurons: int, rows: RowFormat, down: RowFormat, kind: str
) -> None:
    gated, has_bias = kind != "ungated", kind != "gated"
    act: Activation = "silu" if gated else "gelu_tanh"
    matrices, biases = matrices_of(hidden, neurons)
    if not gated:
        del matrices[1], biases[1]
    layout = expert_layout_of(hidden, neurons, rows, down, has_bias, gated)
    stored = [*[rows] * (1 + gated), down]
    for tokens in (1, 2, 13):
        x = normal(tokens, hidden, seed=5)

        def run(runner: _native.Runner, x: Float32 = x) -> Float32:
            record = expert_record(runner, layout, matrices, biases)
            out = np.full(x.shape, np.nan, dtype=np.float32)
            native_expert(layout).forward(runner, x, record.ctypes.data, form(act), out)
            return out

        out = on_every_target(run)
        expected, h = composed(x, matrices, biases if has_bias else None, stored, act)
        assert out.tobytes() == expected.tobytes()
        exact = quantise_rows(matrices[-1], down)[3].astype(np.float64)
        used = h.astype(np.float64) if down.bits == 16 else quantised_activations(h, down)[:, :neurons]
        oracle = used @ exact.T + (biases[-1] if has_bias else 0)
        terms = np.abs(h).astype(np.float64) @ np.abs(matrices[-1]).T + 1
        assert (np.abs(out - oracle) <= 1e-6 * terms).all(), np.max(np.abs(out - oracle) / terms)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    matrices, biases = matrices_of(130, 200)
    layout, x = expert_layout_of(130, 200, RowFormat(4, 32), RowFormat(4, 32)), normal(35, 130, seed=1)
    expert = native_expert(layout)
    for runner in RUNNERS.values():
        record, together = expert_record(runner, layout, matrices, biases), np.empty_like(x)
        expert.forward(runner, x, record.ctypes.data, form("silu"), together)
        for first, last in ((0, 1), (3, 5), (5, 8), (8, 15), (15, 24), (24, 35)):
            apart = np.empty((last - first, 130), dtype=np.float32)
            expert.forward(runner, x[first:last], record.ctypes.data, form("silu"), apart)
            assert apart.tobytes() == together[first:last].tobytes()


@pytest.mark.parametrize("stored", sorted({stored for pair in FORMATS for stored in pair}))
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 64), (35, 130)])
def test_tiles_read_back_are_the_rows(stored: RowFormat, rows: int, cols: int) -> None:
    codes, scales, biases, _ = quantise_rows(normal(rows, cols), stored)
    matrix = TiledMatrix(rows, RowLayout(cols, *stored), has_bias=True)
    for threads in (1, 2):
        part = np.full(matrix.nbytes, 0xA5, dtype=np.uint8)
        added = normal(rows, seed=7)
        part[matrix.rows_bytes :][: 4 * rows] = added.view(np.uint8)
        _native.tile_rows(
            RUNNERS[TARGETS[0], threads],
            stored,
            codes,
            scales.view(np.uint8),
            biases.view(np.uint8),
            part[: matrix.rows_bytes],
        )
        found = untiled(part, matrix)
        assert found.codes.tobytes() == codes.tobytes()
        assert (found.scales.tobytes(), found.biases.tobytes()) == (scales.tobytes(), biases.tobytes())
        assert found.added is not None
        assert found.added.tobytes() == added.tobytes()
        padding = untiled(part, TiledMatrix(matrix.padded_rows, matrix.row))
        assert not any(values[rows:].any() for values in padding[:3])


def test_impossible_records_are_refused() -> None:
    place = (RowFormat(4), 0, None)
    other = (RowFormat(8), 0, None)
    for gate, up, down, says in (
        (place, other, place, "one format"),
        ((RowFormat(4), 32, None), None, place, "multiple of 64"),
        (place, None, (RowFormat(4), 0, 2), "multiple of 4"),
        ((7, 0, None), None, place, "bits must"),
    ):
        with pytest.raises(ValueError, match=says):
            _native.Expert(64, 64, gate, up, down)
    expert = _native.Expert(64, 64, place, place, place)
    x = normal(2, 64)
    with pytest.raises(ValueError, match="a record begins"):
        expert.forward(SCALAR, x, 8, form("silu"), x.copy())
    with pytest.raises(ValueError, match="out is"):
        expert.forward(SCALAR, x, 4096, form("silu"), normal(1, 64))
