"""Rounding of matrices to 4 to 6 bits with error feedback (GPTQ, arXiv 2210.17323).

Weights that are rounded later make up for the errors of those rounded before: the weights of input j are
moved, before they are rounded, by the errors of earlier inputs, weighted by the inputs' second moments. The
moments are damped as in section 3.3 of the paper, but ten times as much, which gives a lower perplexity on
text of the same kind and of other kinds. Nothing depends on the number of threads: moments are sums of
integers, which are exact in any order, and the kernels have one order of operations.

Memory: `MAX_INPUTS` limits what is in memory at once to about 350 MB. Wider matrices are rounded in blocks of
inputs, between which no error is fed back.

Legend: N tokens, C inputs of a matrix, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.config import RowFormat
from ondevice.converters.checkpoints.base import SourceTensor
from ondevice.converters.quantize import QuantizedRows, RoundedRows, dequantize, to_float32
from ondevice.errors import CheckpointError
from ondevice.kernels import _native

MAX_INPUTS = 4096
"""Inputs that feed errors back to each other, whose moments are in memory together."""
DAMPING = 0.1
"""Share of the inputs' mean energy that is added to every input's, so that their moments can be inverted."""
RANDOM_DAMPING = 1.0
"""The same for the inputs of random tokens, which are only half believed."""
READ_BYTES = 32 << 20
"""Bytes of a matrix's values, in float32, that are read and rounded at a time."""
SLAB_INPUTS = 512
"""Inputs whose products with all that follow them are in memory beside their sums."""
COMPARED_ROWS = 128
"""Rows whose error is measured at a time."""
_TOP = 32767


class Inputs:
    """The inputs of a matrix, (N, C), as 16-bit integers with a scale for each input and chunk of tokens."""

    def __init__(self) -> None:
        self._chunks: list[tuple[NDArray[np.int16], NDArray[np.float64]]] = []

    def add(self, x: Float32) -> None:
        """Append the inputs of a chunk of tokens, (T, C). Raises CheckpointError if one isn't finite."""
        largest = np.abs(x).max(axis=0).astype(np.float64)
        if not np.isfinite(largest).all():
            raise CheckpointError(
                "what the model computes on this text isn't finite: check its weights, or convert without "
                "--text"
            )
        scales = np.where(largest > 0, largest / _TOP, 1.0)
        self._chunks.append((np.rint(x / scales).astype(np.int16), scales))

    @property
    def count(self) -> int:
        """The number C of inputs."""
        return int(self._chunks[0][0].shape[1])

    def energies(self) -> NDArray[np.float64]:
        """The sum of squares of each input, (C,)."""
        total = np.zeros(self.count)
        for codes, scales in self._chunks:
            # Whole numbers below 2^53 are exact in float64, however a library adds them up.
            total += np.square(codes.astype(np.float64)).sum(axis=0) * scales * scales
        return total

    def moments(self, picks: NDArray[np.int64]) -> NDArray[np.float64]:
        """The sums of products of the inputs `picks` (n,) with each other, (n, n)."""
        total = np.zeros((len(picks), len(picks)))
        slabs = [slice(start, start + SLAB_INPUTS) for start in range(0, len(picks), SLAB_INPUTS)]
        for codes, scales in self._chunks:
            wide, scale = codes[:, picks].astype(np.float64), scales[picks]
            for slab in slabs:
                products = wide[:, slab].T @ wide[:, slab.start :]
                products *= scale[slab, None]
                products *= scale[slab.start :]
                total[slab, slab.start :] += products
        for slab in slabs:
            total[slab.stop :, slab] = total[slab, slab.stop :].T
        return total


@dataclass(frozen=True)
class Factor:
    """The matrix `values`, (n, n), by which errors are fed back among the inputs `picks`, (n,), in this
    order.
    """

    picks: NDArray[np.int64]
    values: Float32


def factors(
    runner: _native.Runner, inputs: Inputs, damping: float, by_energy: bool = False
) -> Iterator[Factor]:
    """Yields the factors of all blocks of inputs: in the order of inputs, or with those of the most energy
    first.
    """
    energies = inputs.energies()
    order = np.argsort(-energies, kind="stable") if by_energy else np.arange(inputs.count)
    least = max(damping * float(energies.mean()), 1e-30)
    for start in range(0, inputs.count, MAX_INPUTS):
        picks = order[start : start + MAX_INPUTS]
        moments = inputs.moments(picks)
        moments[np.diag_indices(len(picks))] += least
        values = np.empty(moments.shape, np.float32)
        if not _native.feedback_factor(runner, moments, values):
            raise CheckpointError(
                "the moments of a matrix's inputs can't be inverted; convert without --text"
            )
        yield Factor(picks, values)


def rounded_by_columns(
    runner: _native.Runner,
    sources: Sequence[SourceTensor],
    inputs: Inputs,
    stored: RowFormat,
    damping: float = DAMPING,
) -> dict[str, RoundedRows]:
    """The rounded matrices by name, from matrices (R, C) that share the same inputs.

    stored: a format of 4 to 6 bits with stored biases. Raises CheckpointError for values that can't be
    stored.
    """
    parts: dict[str, list[list[RoundedRows]]] = {source.name: [] for source in sources}
    for factor in factors(runner, inputs, damping):
        columns = slice(int(factor.picks[0]), int(factor.picks[-1]) + 1)
        for source in sources:
            step = max(1, READ_BYTES // (4 * source.shape[1]) // 16) * 16
            blocks = range(0, source.shape[0], step)
            parts[source.name].append(
                [
                    _rounded(
                        runner,
                        to_float32(source.rows(start, min(start + step, source.shape[0])))[:, columns],
                        stored,
                        factor.values,
                        source.name,
                    )
                    for start in blocks
                ]
            )
    return {name: _side_by_side([_stacked(rows) for rows in blocks]) for name, blocks in parts.items()}


def rounded_by_rows(
    runner: _native.Runner,
    source: SourceTensor,
    inputs: Inputs,
    stored: RowFormat,
    damping: float = DAMPING,
) -> RoundedRows:
    """The rounded down projection `source`, (D, C), transposed: a neuron's column is a row with its own
    groups.

    stored: a format of 4 to 6 bits in groups of 64 with stored biases. Inputs with the most energy are
    rounded first. Raises CheckpointError for values that can't be stored.
    """
    width, count = source.shape
    step = max(1, READ_BYTES // (4 * count))
    pieces, order = [], []
    for factor in factors(runner, inputs, damping, by_energy=True):
        down = np.empty((len(factor.picks), width), np.float32)
        for start in range(0, width, step):
            rows = to_float32(source.rows(start, min(start + step, width)))
            down[:, start : start + len(rows)] = rows[:, factor.picks].T
        pieces.append(_rounded(runner, down, stored, factor.values, source.name, by_row=True))
        order.append(factor.picks)
    return _stacked(pieces).taken(np.argsort(np.concatenate(order)))


def _rounded(
    runner: _native.Runner,
    weights: Float32,
    stored: RowFormat,
    factor: Float32,
    name: str,
    by_row: bool = False,
) -> RoundedRows:
    """Weights (R, C), rounded to this format.

    Errors are fed back along columns, or along rows if `by_row`.
    """
    weights = np.ascontiguousarray(weights)
    layout = RowLayout(weights.shape[1], *stored)
    codes = np.empty((len(weights), layout.codes_bytes), np.uint8)
    scales, biases = (np.empty((len(weights), layout.groups), np.uint16) for _ in range(2))
    kernel = _native.round_rows if by_row else _native.round_columns
    done = kernel(runner, weights, stored, factor, codes, scales, biases)
    if not done:
        raise CheckpointError(
            f"{name} holds NaN, infinity, or values beyond float16 (65504); the checkpoint is damaged or was "
            "not saved properly; download it again, or save it again in float32 with finite weights"
        )
    rounded = QuantizedRows(codes, scales.view(np.float16), biases.view(np.float16))
    return RoundedRows(rounded, layout.cols, _squares(rounded, stored, weights))


def _squares(rows: QuantizedRows, stored: RowFormat, weights: Float32) -> NDArray[np.float64]:
    """The squared errors and the squares of rows of weights (R, C), as (R, 2), like in RoundedRows."""
    squares = np.empty((len(weights), 2))
    for start in range(0, len(weights), COMPARED_ROWS):
        part = slice(start, start + COMPARED_ROWS)
        some = QuantizedRows(rows.codes[part], rows.scales[part], rows.biases[part])
        exact = weights[part].astype(np.float64)
        off = dequantize(some, stored, weights.shape[1]) - exact
        squares[part] = np.stack([np.square(off).sum(axis=1), np.square(exact).sum(axis=1)], axis=1)
    return squares


def _stacked(parts: Sequence[RoundedRows]) -> RoundedRows:
    """The rows of all parts, concatenated."""
    return RoundedRows(
        QuantizedRows(
            np.concatenate([part.rows.codes for part in parts]),
            np.concatenate([part.rows.scales for part in parts]),
            np.concatenate([part.rows.biases for part in parts]),
        ),
        parts[0].cols,
        np.concatenate([part.squares for part in parts]),
    )


def _side_by_side(parts: Sequence[RoundedRows]) -> RoundedRows:
    """The columns of all parts, concatenated row by row. All parts except the last must have full groups."""
    return RoundedRows(
        QuantizedRows(
            np.concatenate([part.rows.codes for part in parts], axis=1),
            np.concatenate([part.rows.scales for part in parts], axis=1),
            np.concatenate([part.rows.biases for part in parts], axis=1),
        ),
        sum(part.cols for part in parts),
        np.sum([part.squares for part in parts], axis=0),
    )
