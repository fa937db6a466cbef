"""Thresholds for a finished bundle: how large a gate must be for its neuron to count, layer by layer.

The format is in `ondevice/bundle/thresholds.py`. The model runs dense, and the inputs of every layer's gates
are recorded on disk, 2 bytes a value. Then one layer at a time is in memory: its packed gate and up
projections, 8 MB of histograms and the gates of `CHUNK_TOKENS` tokens. At 7B shape that is 70 MB of memory,
and 262 KB of disk a token.

Legend: N tokens, D hidden size, F neurons of a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.backends import row_sums
from ondevice.backends.base import Float32
from ondevice.backends.cpu import contributions, make_runner
from ondevice.backends.reference import read_rows
from ondevice.bundle.layout import tensors_layout
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import NO_THRESHOLDS, weights_digest
from ondevice.bundle.thresholds import (
    THRESHOLDS_SIDECAR,
    ThresholdPoint,
    Thresholds,
    threshold_tensors,
    thresholds_text,
)
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.config import TRAIN_TOKENS
from ondevice.converters.training.activations import record_inputs, temporarily_recorded
from ondevice.converters.training.sidecars import (
    MEASURED_SHARE,
    check_feed_forwards,
    held_out,
    save_sidecar,
    write_tensors,
)
from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files
from ondevice.model.records import NeuronRecords, record_chunk
from ondevice.model_config import FeedForwardSpec
from ondevice.units import usable_cores

TARGETS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CHUNK_TOKENS = 64
READ_BYTES = 4 << 20
"""Bytes of a layer's records that are read at a time."""
BUCKET_BITS = 12
"""Low bits of a float32 that its bucket ignores: a bucket is 1/2048 of its values wide."""
BUCKETS = 1 << (31 - BUCKET_BITS)


log = logging.getLogger(__name__)


class Inputs(Protocol):
    """Inputs (N, D) of a layer's gates, of which a slice of rows is in memory at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> NDArray[np.float16]: ...


@dataclass(frozen=True)
class ThresholdOptions:
    """How thresholds are calibrated.

    tokens: most tokens of the text to use. measured_share: share of the text's pieces that measure and don't
    calibrate. targets: shares of neurons to leave out, ascending.
    """

    tokens: int = TRAIN_TOKENS
    measured_share: float = MEASURED_SHARE
    targets: tuple[float, ...] = TARGETS


@dataclass(frozen=True)
class LayerThresholds:
    """One layer's thresholds. importance: (F,). thresholds and skipped, the share left out: per target."""

    importance: Float32
    thresholds: tuple[float, ...]
    skipped: tuple[float, ...]


def calibrate_thresholds(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    output: Path,
    options: ThresholdOptions,
    on_progress: OnProgress = ignore_progress,
) -> Thresholds:
    """Set thresholds for `bundle` on pieces of token ids and write them to the folder `output`.

    The last `measured_share` of the pieces only measure. The caller adds what thresholds cost in quality. The
    files of an earlier calibration in `output` are replaced. Raises what `check` raises, and OndeviceError if
    the disk has no room.
    """
    measured = sum(len(piece) for piece in check(bundle, pieces, options))
    total = sum(len(piece) for piece in pieces)
    calibrated, layers = total - measured, bundle.config.num_layers
    found = []
    with (
        temporarily_recorded(record_inputs, bundle, pieces, on_progress) as activations,
        FlashReader(bundle_files(bundle)) as reader,
    ):
        for layer in range(layers):
            on_progress(0.5 + 0.5 * layer / layers, f"layer {layer + 1} of {layers}")
            spec = bundle.config.layers[layer].feed_forward
            gates = LayerGates(spec, NeuronRecords(bundle, reader, layer))
            inputs = activations.inputs(layer)
            importance = gates.importance(inputs[:calibrated])
            found.append(gates.thresholds(importance, inputs, calibrated, options.targets))
            log.info("layer %d: %s", layer, " ".join(f"{value:.4g}" for value in found[-1].thresholds))
    thresholds = write_thresholds(bundle, found, output, options.targets, calibrated, measured)
    on_progress(1.0, "written")
    return thresholds


def check(
    bundle: Bundle, pieces: Sequence[Sequence[int]], options: ThresholdOptions
) -> Sequence[Sequence[int]]:
    """The pieces that measure and don't calibrate: the last ones, at least one and never all.

    Raises UnsupportedModelError for a model whose gates have a threshold of their own, unless it has experts,
    and for one with experts that are matrices; UsageError if the text is too short.
    """
    if bundle.config.expert_layers:
        raise UnsupportedModelError(f"{bundle.name} can't have thresholds: {NO_THRESHOLDS}")
    if bundle.config.zeros_gates and bundle.config.experts is None:
        raise UnsupportedModelError(
            f"{bundle.name} has {bundle.config.activation} gates, whose threshold is zero: --sparsity exact "
            "leaves out what counts for nothing and keeps the text; thresholds are for silu and gelu"
        )
    check_feed_forwards(bundle)
    return held_out(pieces, options.measured_share)


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

    def thresholds(
        self, importance: Float32, inputs: NDArray[np.float16], calibrated: int, targets: Sequence[float]
    ) -> LayerThresholds:
        """Set thresholds on the first `calibrated` inputs, and measure on the others what they leave out.

        Args:
            importance: (F,) result of `importance` for the inputs that calibrate. All ones make one gate
                threshold for the whole layer.
            inputs: (N, D) inputs of the layer's gates.
            calibrated: number of inputs that calibrate.
            targets: shares of neurons to leave out, ascending.

        Raises BundleError if products aren't finite.
        """
        counted, measured = (
            self.histogram(values, importance) for values in (inputs[:calibrated], inputs[calibrated:])
        )
        return layer_thresholds(importance, counted, measured, targets)

    def importance(self, inputs: Inputs) -> Float32:
        """(F,) length of the vector that a neuron adds at an activated gate of 1: rms(up) * |down|.

        Leaving out the neurons of smallest |act(gate)| * importance costs the least expected squared error,
        if gate and up are independent and the neurons' columns orthogonal.
        """
        if self._up is None:
            return self._down_lengths
        squares = np.zeros(self._up.rows)
        for up in self._products(self._up, inputs):
            squares += np.einsum("tf,tf->f", up, up, dtype=np.float64)
        importance: Float32 = (np.sqrt(squares / max(1, len(inputs))) * self._down_lengths).astype(np.float32)
        return importance

    def mean_contributions(self, inputs: NDArray[np.float16]) -> Float32:
        """(F,) mean length of the vector that each neuron adds: |activation(gate) * up| * |down|."""
        sums = np.zeros(self._gate.rows)
        ones = np.ones((CHUNK_TOKENS, self._gate.rows if self._up is None else 0), dtype=np.float32)
        many = repeat(ones) if self._up is None else self._products(self._up, inputs)
        for gates, ups in zip(self._gates(inputs), many, strict=False):
            for gate, up in zip(gates, ups, strict=False):
                contributions(self._runner, gate[None], up, self._spec, gate[None])
            sums += gates.sum(axis=0, dtype=np.float64)
        found: Float32 = (sums / max(1, len(inputs)) * self._down_lengths).astype(np.float32)
        return found

    def histogram(self, inputs: Inputs, importance: Float32) -> NDArray[np.int64]:
        """(BUCKETS,) number of neurons' contributions in each bucket."""
        counts = np.zeros(BUCKETS, dtype=np.int64)
        for gates in self._gates(inputs):
            contributions(self._runner, gates, importance, self._spec, gates)
            counts += np.bincount(bucket_of(gates), minlength=BUCKETS)
        return counts

    def _gates(self, inputs: Inputs) -> Iterator[Float32]:
        """Gates for `inputs` (N, D), at most (CHUNK_TOKENS, F) at a time."""
        for gates in self._products(self._gate, inputs, self._bias):
            if self._spec.cutoff is not None:
                row_sums.cut_off(gates, self._spec.cutoff)
            yield gates

    def _products(
        self, matrix: _native.Matrix, inputs: Inputs, bias: Float32 | None = None
    ) -> Iterator[Float32]:
        """Products of `inputs` (N, D) and `matrix`, at most (CHUNK_TOKENS, F) at a time.

        The runtime's kernels compute them.
        """
        for start in range(0, len(inputs), CHUNK_TOKENS):
            x = inputs[start : start + CHUNK_TOKENS].astype(np.float32)
            products = np.empty((len(x), matrix.rows), dtype=np.float32)
            matrix.forward(self._runner, x, bias, products)
            yield products


def layer_thresholds(
    importance: Float32,
    counted: NDArray[np.int64],
    measured: NDArray[np.int64],
    targets: Sequence[float],
) -> LayerThresholds:
    """A layer's thresholds by what its neurons add. importance: (F,).

    counted, measured: (BUCKETS,) of the text that calibrates, and of that which measures. Raises BundleError
    if products aren't finite.
    """
    buckets = [quantile_bucket(counted, target) for target in targets]
    thresholds = [bucket_end(bucket) for bucket in buckets]
    if not np.isfinite(thresholds).all():
        raise BundleError("a layer's gates aren't finite: its weights are not a usable model's")
    skipped = (float(measured[: bucket + 1].sum() / measured.sum()) for bucket in buckets)
    return LayerThresholds(importance, tuple(thresholds), tuple(skipped))


def bucket_of(values: Float32) -> NDArray[np.uint32]:
    """(n,) buckets of values, all zero or more: the leading bits of such floats sort as the floats do."""
    return values.reshape(-1).view(np.uint32) >> np.uint32(BUCKET_BITS)


def bucket_end(bucket: int) -> float:
    """The largest value of a bucket."""
    return float(np.uint32(((bucket + 1) << BUCKET_BITS) - 1).view(np.float32))


def quantile_bucket(counts: NDArray[np.int64], share: float) -> int:
    """The first bucket at or below which lies at least `share` of all counted values."""
    return int(np.searchsorted(np.cumsum(counts), share * counts.sum()))


def write_thresholds(
    bundle: Bundle,
    layers: Sequence[LayerThresholds],
    output: Path,
    targets: Sequence[float],
    calibrated: int,
    measured: int,
) -> Thresholds:
    """Write both files, the JSON file last."""
    arrays = (layer.importance.astype("<f4") for layer in layers)
    layout = tensors_layout(threshold_tensors(bundle.config))
    sha256, crcs = write_tensors(THRESHOLDS_SIDECAR, layout, arrays, output)
    thresholds = Thresholds(
        model=weights_digest(bundle.manifest),
        calibrated_tokens=calibrated,
        measured_tokens=measured,
        perplexity=None,
        points=tuple(
            ThresholdPoint(
                sparsity=target,
                thresholds=tuple(layer.thresholds[index] for layer in layers),
                skipped=tuple(layer.skipped[index] for layer in layers),
                perplexity=None,
                agreement=None,
            )
            for index, target in enumerate(targets)
        ),
        sha256=sha256,
        crcs=crcs,
    )
    save_thresholds(thresholds, output)
    return thresholds


def save_thresholds(thresholds: Thresholds, folder: Path) -> None:
    """Write `thresholds.json` durably. This is the last step: it makes the thresholds part of the bundle."""
    save_sidecar(THRESHOLDS_SIDECAR, thresholds_text(thresholds), folder)
