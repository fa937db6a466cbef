"""An expert's record of float matrices, as a bundle stores experts whose layout is `matrices`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import Bytes, Float32
from ondevice.bundle.layout import ExpertLayout
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.config import RowFormat
from ondevice.kernels import _native
from tests.support.sources import quantise_rows


def expert_layout_of(
    hidden: int, neurons: int, rows: RowFormat, down: RowFormat, has_bias: bool = False, gated: bool = True
) -> ExpertLayout:
    by_rows = TiledMatrix(neurons, RowLayout(hidden, *rows), has_bias)
    return ExpertLayout((*(by_rows,) * (1 + gated), TiledMatrix(hidden, RowLayout(neurons, *down), has_bias)))


def expert_record(
    runner: _native.Runner, layout: ExpertLayout, matrices: Sequence[Float32], biases: Sequence[Float32]
) -> Bytes:
    """(stride,) the record of gate (F, D), up (F, D) if there is one, down (D, F), on a page boundary."""
    record = _native.allocate(layout.stride)
    for part, (place, matrix) in enumerate(zip(layout.part_offsets, layout.matrices, strict=True)):
        tiles = record[place : place + matrix.rows_bytes]
        codes, scales, own, _ = quantise_rows(matrices[part], matrix.row.stored)
        _native.tile_rows(runner, matrix.row.stored, codes, scales.view(np.uint8), own.view(np.uint8), tiles)
        if matrix.has_bias:
            end = place + matrix.rows_bytes
            record[end : end + 4 * matrix.rows] = biases[part].view(np.uint8)
    return record


def native_expert(layout: ExpertLayout) -> _native.Expert:
    gate, *up, down = layout.places
    hidden, neurons = layout.matrices[-1].rows, layout.matrices[0].rows
    return _native.Expert(hidden, neurons, gate, up[0] if up else None, down)
