"""One layer's gates over recorded inputs, and how much each neuron adds to the layer's output by them.

One layer is in memory at a time: its packed gate and up projections, and the gates of `CHUNK_TOKENS` tokens.

Legend: N tokens, D hidden size, F neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from ondevice.backends import row_sums
from ondevice.backends.base import Float32
from ondevice.backends.cpu import contributions, make_runner
from ondevice.backends.reference import read_rows
from ondevice.kernels import _native
from ondevice.model.records import NeuronRecords, record_chunk
from ondevice.model_config import FeedForwardSpec
from ondevice.units import usable_cores

CHUNK_TOKENS = 64
READ_BYTES = 4 << 20
"""Bytes of a layer's records that are read at a time."""


class LayerGates:
    """One layer's gate and up projections, packed, and the lengths of its neurons' down columns.

    An ungated layer has no up projection: up counts as 1. Gates are those that a cutoff leaves, if the layer
    has one.
    """

    def __init__(self, spec: FeedForwardSpec, source: NeuronRecords) -> None:
        """Reads the layer's records. Raises FlashReadError if they don't match their checksums."""
        self._runner = make_runner(usable_cores())
        self._spec = spec
        self._bias = source.gate_bias()
        neurons, (row, *_, down_row) = source.num_neurons, source.layout.rows
        *offsets, down_at = source.layout.row_offsets
        matrices = [_native.Matrix(neurons, row.cols, row.stored) for _ in offsets]
        self._gate, self._up = matrices[0], matrices[1] if self._spec.gated else None
        self._down_lengths = np.empty(neurons, dtype=np.float32)
        step = max(1, READ_BYTES // source.layout.stride)
        for first in range(0, neurons, step):
            records = source.read(first, min(step, neurons - first))
            for matrix, offset in zip(matrices, offsets, strict=True):
                row0, codes, scales, biases = record_chunk(records, offset, row, first)
                matrix.load_rows(self._runner, row0, codes, scales.view(np.uint8), biases.view(np.uint8))
            down = read_rows(records, down_at, down_row)
            self._down_lengths[first : first + len(down)] = np.linalg.norm(down, axis=1)

    def mean_contributions(self, inputs: NDArray[np.float16]) -> Float32:
        """(F,) mean length of the vector that each neuron adds: |activation(gate) * up| * |down|."""
        sums = np.zeros(self._gate.rows)
        ones = np.ones((CHUNK_TOKENS, self._gate.rows if self._up is None else 0), dtype=np.float32)
        many = repeat(ones) if self._up is None else self._products(self._up, inputs)
        for gates, ups in zip(self._gates(inputs), many, strict=False):
            for gate, up in zip(gates, ups, strict=False):
                contributions(self._runner, gate[None], up, self._spec, gate[None])
            sums += gates.sum(axis=0, dtype=np.float64)
        importance: Float32 = (sums / max(1, len(inputs)) * self._down_lengths).astype(np.float32)
        return importance

    def _gates(self, inputs: NDArray[np.float16]) -> Iterator[Float32]:
        """Gates for `inputs` (N, D), at most (CHUNK_TOKENS, F) at a time."""
        for gates in self._products(self._gate, inputs, self._bias):
            if self._spec.cutoff is not None:
                row_sums.cut_off(gates, self._spec.cutoff)
            yield gates

    def _products(
        self, matrix: _native.Matrix, inputs: NDArray[np.float16], bias: Float32 | None = None
    ) -> Iterator[Float32]:
        """Products of `inputs` (N, D) and `matrix`, at most (CHUNK_TOKENS, F) at a time.

        The runtime's kernels compute them.
        """
        for start in range(0, len(inputs), CHUNK_TOKENS):
            x = inputs[start : start + CHUNK_TOKENS].astype(np.float32)
            products = np.empty((len(x), matrix.rows), dtype=np.float32)
            matrix.forward(self._runner, x, bias, products)
            yield products
