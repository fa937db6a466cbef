"""Predictors for a finished bundle: record activations, fit each layer, quantise, calibrate, write the files.

The maths is in `low_rank.py`, the format in `ondevice/bundle/predictors.py`. Memory: what `train_layer` needs
for one layer, and all quantised predictors. The recorded activations are on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.bundle.file_layouts import tensors_layout
from ondevice.bundle.matrix_layout import RowLayout, padded
from ondevice.bundle.predictors import (
    PREDICTORS_SIDECAR,
    OperatingPoint,
    Predictors,
    predictor_tensors,
    predictors_text,
)
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import NO_PREDICTORS, weights_digest
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.config import GROUP_SIZE, TRAIN_TOKENS, Bits
from ondevice.converters.quantize import QuantizedRows, quantize
from ondevice.converters.training import neuron_order
from ondevice.converters.training.activations import (
    Activations,
    gate_rows,
    gate_shift,
    temporarily_recorded,
)
from ondevice.converters.training.hotness import firing_frequencies, write_hotness
from ondevice.converters.training.predictors.arrays import Arrays, TrainingBackend, arrays_of
from ondevice.converters.training.predictors.layer_predictor import (
    RECALLS,
    Fired,
    LayerPoint,
    LayerPredictor,
    PredictorTraining,
    Samples,
    bits,
)
from ondevice.converters.training.predictors.low_rank import split, train_layer
from ondevice.converters.training.predictors.operating_points import HeldBack, measure, thresholds
from ondevice.converters.training.sidecars import (
    MEASURED_SHARE,
    check_feed_forwards,
    held_out,
    save_sidecar,
    write_tensors,
)
from ondevice.errors import UnsupportedModelError
from ondevice.kernels import _native
from ondevice.model_config import ZEROING_NAMES
from ondevice.units import usable_cores

SCORED_TOKENS = 256
"""Tokens whose scores are computed together."""
MAX_SHARE_OF_GATE = 0.5
"""Largest size of a predictor, as a share of the gates that it stands for: a larger one saves too little."""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PredictorOptions:
    """How a bundle's predictors are made.

    Args:
        tokens: most tokens of the text to use.
        measured_share: share of the text's pieces that are used only for measuring, and not for training or
            calibrating.
        ranks: the ranks that each layer's is chosen from, multiples of 64. Ranks whose predictor exceeds
            MAX_SHARE_OF_GATE are left out.
        bits: bits of the stored matrices. Half the bits and twice the rank select less at equal recall.
        seed: seed of all random numbers.
        training: how a layer's predictor is fitted.
    """

    tokens: int = TRAIN_TOKENS
    measured_share: float = MEASURED_SHARE
    ranks: tuple[int, ...] = (64, 128, 192, 256, 384, 512)
    bits: Literal[4, 8, 16] = 4
    seed: int = 0
    training: PredictorTraining = field(default_factory=PredictorTraining)


@dataclass(frozen=True)
class StoredPredictor:
    """One layer's predictor in the form that the file stores."""

    bits: Literal[4, 8, 16]
    down: QuantizedRows
    up: QuantizedRows
    bias: Float32
    points: tuple[LayerPoint, ...]

    @property
    def rank(self) -> int:
        return len(self.down.codes)


def train_predictors(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    output: Path,
    options: PredictorOptions,
    on_progress: OnProgress = ignore_progress,
    *,
    backend: TrainingBackend,
    order: bool,
) -> Predictors:
    """Fit predictors to `bundle` and write them to the folder `output`.

    The last `measured_share` of the pieces isn't used for training or calibrating: all rates are measured on
    it. How often each neuron fires on the other pieces, and how often each token occurs there, is written
    too. The caller adds the loss of quality. The files of an earlier training in `output` are replaced.

    Args:
        bundle: the bundle.
        pieces: token ids of the text.
        output: the folder of the bundle, or of a copy of it.
        options: how predictors are made.
        on_progress: gets the share done and what is being done.
        backend: the backend that runs the model and fits the predictors. Thresholds are set on the scores
            that the runtime's kernels compute from the stored matrices, so predictors mean the same with
            every backend. ImportError for `mlx` if MLX is missing.
        order: whether to sort the neurons of the bundle in `output` first, in the order that the text
            suggests, unless they have been ordered before.

    Raises what `check` and `order_neurons` raise, and OndeviceError if the disk has no room.
    """
    held_back = check(bundle, pieces, options)
    measured = sum(len(piece) for piece in held_back)
    total = sum(len(piece) for piece in pieces)
    trained, layers = total - measured, bundle.config.num_layers
    order = order and bundle.manifest.provenance.ordered_tokens is None
    if order:
        neuron_order.check(Bundle.open(output))
    with temporarily_recorded(bundle, pieces, on_progress, backend=backend) as activations:
        started = 0.5
        if order:
            # The recording is valid for the ordered bundle too, which differs only in rounding.
            bundle = neuron_order.order_neurons(
                Bundle.open(output),
                activations,
                trained,
                lambda done, what: on_progress(0.5 + 0.1 * done, what),
            )
            started = 0.6
        frequencies = firing_frequencies(activations, bundle.config, trained)
        write_hotness(bundle, frequencies, trained, output)
        stored, arrays = [], arrays_of(backend)
        for layer in range(layers):
            on_progress(started + (1 - started) * layer / layers, f"layer {layer + 1} of {layers}")
            stored.append(fit_layer(bundle, activations, layer, trained, options, arrays))
    predictors = write_predictors(bundle, stored, output, trained, measured)
    on_progress(1.0, "written")
    return predictors


def check(
    bundle: Bundle, pieces: Sequence[Sequence[int]], options: PredictorOptions
) -> Sequence[Sequence[int]]:
    """The pieces used only for measuring: the last ones, at least one and never all.

    Raises UnsupportedModelError for a model whose gates are hardly ever zero, UsageError if the text is too
    short.
    """
    if bundle.config.cut_off_layers:
        raise UnsupportedModelError(f"{bundle.name} needs no predictors: {NO_PREDICTORS} (--sparsity exact)")
    if not bundle.config.zeros_gates:
        raise UnsupportedModelError(
            f"{bundle.name} has {bundle.config.activation} gates, which are hardly ever exactly zero: "
            f"there is nothing to predict; it takes {ZEROING_NAMES}"
        )
    check_feed_forwards(bundle)
    return held_out(pieces, options.measured_share)


def save_predictors(predictors: Predictors, folder: Path) -> None:
    """Write `predictors.json` durably. This must be the last step, because it makes the predictors part of
    the bundle.
    """
    save_sidecar(PREDICTORS_SIDECAR, predictors_text(predictors), folder)


def fit_layer(
    bundle: Bundle,
    activations: Activations,
    layer: int,
    trained: int,
    options: PredictorOptions,
    arrays: Arrays,
) -> StoredPredictor:
    """The stored predictor of a layer, with the smallest rank that is good enough (`choose_rank`).

    Of the first `trained` recorded tokens, some are held back for thresholds; the others are used for
    training. The later tokens are used for measuring. Its rates are those of the stored, quantised matrices.
    """
    gate, shift = gate_rows(bundle, layer), gate_shift(bundle, layer)
    inputs, fired = activations.inputs(layer), activations.fired(layer)
    rng = np.random.default_rng([options.seed, layer])
    ranks = rank_options(options, len(gate), gate.shape[1], bundle.quant.bits)
    samples = inputs[:trained], fired[:trained]
    chosen = train_layer(*samples, gate, ranks, options.training, rng, arrays, shift)
    _, held = split(trained, options.training)
    # Samples that judged ranks may calibrate now, since other samples measure from here on.
    calibrating = np.union1d(held.calibrating, held.measuring)
    held = HeldBack(calibrating, np.arange(trained, len(inputs)), held.block)
    return store_predictor(chosen, inputs, fired, held, options.bits)


def rank_options(options: PredictorOptions, neurons: int, width: int, gate_bits: Bits) -> list[int]:
    """The ranks to choose from: all whose predictor is within MAX_SHARE_OF_GATE; if none is, GROUP_SIZE.

    gate_bits: bits of the stored gate (neurons, width).
    """
    most = MAX_SHARE_OF_GATE * neurons * RowLayout(width, gate_bits).nbytes
    down = RowLayout(width, options.bits).nbytes
    ranks = [
        rank for rank in options.ranks if rank * down + neurons * RowLayout(rank, options.bits).nbytes <= most
    ]
    return sorted({min(rank, neurons, width) for rank in ranks or [GROUP_SIZE]})


def store_predictor(
    predictor: LayerPredictor, inputs: Samples, fired: Fired, held: HeldBack, stored_bits: Literal[4, 8, 16]
) -> StoredPredictor:
    """Quantise a layer's predictor, set its thresholds on some samples and measure them on others.

    Args:
        predictor: the layer's predictor.
        inputs: (N, D), see `Samples`.
        fired: see `Fired`.
        held: the samples to calibrate and to measure; none of them trained the predictor.
        stored_bits: bits of the stored matrices.

    The runtime's kernels compute the scores.
    """
    runner = _native.Runner(usable_cores(), "auto")
    (neurons, _), width = predictor.up.shape, predictor.down.shape[1]
    rank = padded(predictor.rank, GROUP_SIZE)
    matrices = _padded(predictor.down, rank, width), _padded(predictor.up, neurons, rank)
    down, up = (quantize(runner, matrix, stored_bits, "a predictor") for matrix in matrices)
    first, second = _matrix(runner, down, width, stored_bits), _matrix(runner, up, rank, stored_bits)

    def scores(x: Samples) -> Float32:
        return _scores(runner, first, second, predictor.bias, x)

    ids = held.calibrating
    cuts = thresholds(scores(inputs[ids]), bits(fired, ids, neurons), held.block)
    wanted = list(zip(RECALLS, cuts, strict=True))
    points = measure(scores, inputs, fired, held.measuring, neurons, wanted)
    log.info("rank %d: %s", rank, ", ".join(f"{100 * point.selected:.1f} %" for point in points))
    return StoredPredictor(stored_bits, down, up, predictor.bias, points)


def _scores(
    runner: _native.Runner,
    down: _native.Matrix,
    up: _native.Matrix,
    bias: Float32,
    inputs: Samples,
) -> Float32:
    """The scores (T, F) of inputs (T, D), as the runtime's kernels compute them."""
    scores = np.empty((len(inputs), up.rows), dtype=np.float32)
    for start in range(0, len(inputs), SCORED_TOKENS):
        x = inputs[start : start + SCORED_TOKENS].astype(np.float32)
        hidden = np.empty((len(x), down.rows), dtype=np.float32)
        down.forward(runner, x, None, hidden)
        up.forward(runner, hidden, bias, scores[start : start + len(x)])
    return scores


def _matrix(runner: _native.Runner, rows: QuantizedRows, cols: int, bits: int) -> _native.Matrix:
    matrix = _native.Matrix(len(rows.codes), cols, bits)
    matrix.load_rows(runner, 0, rows.codes, rows.scales.view(np.uint8), rows.biases.view(np.uint8))
    return matrix


def _padded(matrix: Float32, rows: int, cols: int) -> Float32:
    """`matrix` padded with zeros to (rows, cols), because stored ranks are multiples of GROUP_SIZE."""
    return np.pad(matrix, ((0, rows - len(matrix)), (0, cols - matrix.shape[1])))


def write_predictors(
    bundle: Bundle, stored: Sequence[StoredPredictor], output: Path, trained: int, measured: int
) -> Predictors:
    """Write both files, the JSON file last."""
    ranks = tuple(layer.rank for layer in stored)
    bits = stored[0].bits
    tensors = predictor_tensors(bundle.config, bits, ranks)
    sha256, crcs = write_tensors(PREDICTORS_SIDECAR, tensors_layout(tensors), stored_arrays(stored), output)
    predictors = Predictors(
        model=weights_digest(bundle.manifest),
        bits=bits,
        ranks=ranks,
        trained_tokens=trained,
        measured_tokens=measured,
        perplexity=None,
        points=tuple(
            _summed_point(points) for points in zip(*(layer.points for layer in stored), strict=True)
        ),
        sha256=sha256,
        crcs=crcs,
    )
    save_predictors(predictors, output)
    return predictors


def stored_arrays(stored: Sequence[StoredPredictor]) -> Iterator[NDArray[np.generic]]:
    """Yields each tensor in its stored form, in the order of `predictor_tensors`."""
    for layer in stored:
        for rows in (layer.down, layer.up):
            affine = () if layer.bits == 16 else (rows.scales, rows.biases)
            yield from (rows.codes, *affine)
        yield layer.bias.astype("<f4")


def _summed_point(layers: Sequence[LayerPoint]) -> OperatingPoint:
    return OperatingPoint(
        recall=layers[0].recall,
        offsets=tuple(-float(layer.threshold) for layer in layers),
        false_negatives=tuple(float(layer.false_negatives) for layer in layers),
        false_positives=tuple(float(layer.false_positives) for layer in layers),
        selected=tuple(float(layer.selected) for layer in layers),
        perplexity=None,
        agreement=None,
    )
