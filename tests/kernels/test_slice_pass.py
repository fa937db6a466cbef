"""A feed-forward in slices: the sum of its slices' outputs, in their order, however they come."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ondevice.backends.base import Bytes, Float32
from ondevice.bundle.layout import ExpertLayout
from ondevice.config import RowFormat
from ondevice.kernels import _native
from tests.kernels.test_expert import FORMATS
from tests.kernels.test_kernels import RUNNERS, normal, on_every_target
from tests.support.expert_records import expert_layout_of, expert_record, native_expert
from tests.support.sources import form

SCALAR = RUNNERS["scalar", 1]
HIDDEN, NEURONS, SLICES = 100, 128, 5


def slices_of(layout: ExpertLayout, gated: bool = True) -> list[Bytes]:
    """The records of SLICES slices of random weights."""
    shapes = [(NEURONS, HIDDEN), *([(NEURONS, HIDDEN)] if gated else []), (HIDDEN, NEURONS)]
    return [
        expert_record(
            SCALAR, layout, [normal(*shape, seed=10 * at + i) / 8 for i, shape in enumerate(shapes)], []
        )
        for at in range(SLICES)
    ]


def added_up(layout: ExpertLayout, records: list[Bytes], x: Float32, base: Float32 | None) -> Float32:
    """base plus each slice's output as an expert's, one after another."""
    total = base
    for record in records:
        out = np.empty_like(x)
        native_expert(layout).forward(SCALAR, x, record.ctypes.data, form("silu"), out)
        total = out if total is None else total + out
    assert total is not None
    return total


@pytest.mark.fast("rows[016]-*")
@pytest.mark.parametrize(("rows", "down"), FORMATS)
def test_slices_are_added_in_their_order(rows: RowFormat, down: RowFormat) -> None:
    layout = expert_layout_of(HIDDEN, NEURONS, rows, down)
    records = slices_of(layout)
    for tokens in (1, 3, 40):
        x, base = normal(tokens, HIDDEN, seed=5), normal(tokens, HIDDEN, seed=6)
        for start in (None, base):
            expected = added_up(layout, records, x, start)
            for cuts in ((0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)):

                def run(
                    runner: _native.Runner,
                    x: Float32 = x,
                    start: Float32 | None = start,
                    cuts: tuple[int, ...] = cuts,
                ) -> Float32:
                    out = np.full(x.shape, np.nan, dtype=np.float32)
                    forward = _native.SlicePass(runner, native_expert(layout), x, form("silu"))
                    held = start
                    for first, stop in pairwise(cuts):
                        forward.add(records[first:stop], None, out, held)
                        held = out
                    return out

                assert on_every_target(run).tobytes() == expected.tobytes()


def test_rows_behind_the_exact_ones_keep_what_the_first_slices_gave() -> None:
    layout = expert_layout_of(HIDDEN, NEURONS, RowFormat(4, 32), RowFormat(6, 32))
    records, x = slices_of(layout), normal(7, HIDDEN, seed=5)
    out = np.empty_like(x)
    forward = _native.SlicePass(SCALAR, native_expert(layout), x, form("silu"))
    forward.add(records[:2], None, out)
    forward.add(records[2:], 3, out, out)
    assert out[:3].tobytes() == added_up(layout, records, x[:3], None).tobytes()
    assert out[3:].tobytes() == added_up(layout, records[:2], x[3:], None).tobytes()


def test_gates_have_the_biases_of_their_own_slices() -> None:
    layout = expert_layout_of(HIDDEN, NEURONS, RowFormat(8), RowFormat(8), gated=False)
    records, x, bias = slices_of(layout, gated=False), normal(2, HIDDEN, seed=5), normal(SLICES * NEURONS)
    biased = expert_layout_of(HIDDEN, NEURONS, RowFormat(8), RowFormat(8), has_bias=True, gated=False)
    total: Float32 | None = None
    for at, record in enumerate(records):
        again = _native.allocate(biased.stride)
        for (mine, matrix), theirs in zip(
            zip(biased.part_offsets, biased.matrices, strict=True), layout.part_offsets, strict=True
        ):
            again[mine : mine + matrix.rows_bytes] = record[theirs : theirs + matrix.rows_bytes]
        at_bias = biased.part_offsets[0] + biased.matrices[0].rows_bytes
        again[at_bias : at_bias + 4 * NEURONS] = bias[at * NEURONS :][:NEURONS].view(np.uint8)
        out = np.empty_like(x)
        native_expert(biased).forward(SCALAR, x, again.ctypes.data, form("gelu"), out)
        total = out if total is None else total + out
    for cuts in ((0, 5), (0, 1, 4, 5)):
        forward = _native.SlicePass(SCALAR, native_expert(layout), x, form("gelu"), None, bias)
        found = np.empty_like(x)
        for first, stop in pairwise(cuts):
            forward.add(records[first:stop], None, found, None if first == 0 else found)
        assert total is not None
        assert found.tobytes() == total.tobytes()


def test_nothing_to_add_is_the_base_or_zeros() -> None:
    layout = expert_layout_of(HIDDEN, NEURONS, RowFormat(4), RowFormat(4))
    x, base = normal(2, HIDDEN), normal(2, HIDDEN, seed=1)
    for start, expected in ((None, np.zeros_like(x)), (base, base)):
        out = np.full(x.shape, np.nan, dtype=np.float32)
        _native.SlicePass(SCALAR, native_expert(layout), x, form("silu")).add([], None, out, start)
        assert out.tobytes() == expected.tobytes()


def test_impossible_arguments_are_refused() -> None:
    layout = expert_layout_of(HIDDEN, NEURONS, RowFormat(4), RowFormat(4))
    records, x, out = slices_of(layout), normal(2, HIDDEN), np.empty((2, HIDDEN), np.float32)
    slices = native_expert(layout)

    def begun() -> _native.SlicePass:
        return _native.SlicePass(SCALAR, slices, x, form("silu"))

    for tokens in (0, 3, -1):
        with pytest.raises(ValueError, match="from 1 to those of the pass"):
            begun().add(records, tokens, out)
    with pytest.raises(ValueError, match="its record's bytes"):
        begun().add([records[0][:-8192]], None, out)
    with pytest.raises(ValueError, match="out is"):
        begun().add(records, None, out[:, :-1].copy())
    with pytest.raises(ValueError, match="slices \\* neurons"):
        _native.SlicePass(SCALAR, slices, x, form("silu"), None, normal(NEURONS + 1))
    biased = _native.SlicePass(SCALAR, slices, x, form("silu"), None, normal(2 * NEURONS))
    with pytest.raises(ValueError, match="more slices than biases"):
        biased.add(records, None, out)
    ended = begun()
    native_expert(layout).forward(SCALAR, x, records[0].ctypes.data, form("silu"), out)
    with pytest.raises(ValueError, match="another op has used the runner"):
        ended.add(records, None, out)
