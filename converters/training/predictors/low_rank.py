"""Low-rank predictors of which feed-forward neurons fire, fitted layer by layer with numpy or MLX.

"LLM in a flash" (arXiv 2312.11514), section 3.1 and appendix B: a layer's predictor has the same input as the
gate, the normed output of the layer's attention, and gives every neuron a score, `up @ (down @ x) + bias`.
These two linear maps are initialised with principal components and trained by `fine_tune.py`. Of the
held-back samples, one part is used to set thresholds, and the other to measure them.

Legend as in `layer_predictor.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.random import Generator

from ondevice.converters.training.predictors.arrays import Array, Arrays
from ondevice.converters.training.predictors.fine_tune import FineTuning
from ondevice.converters.training.predictors.layer_predictor import (
    RECALLS,
    Fired,
    Float32,
    Ids,
    LayerPredictor,
    PredictorTraining,
    Samples,
    active_count,
    bits,
    in_pieces,
)
from ondevice.converters.training.predictors.operating_points import HeldBack, measure, thresholds
from ondevice.errors import CheckpointError, UsageError

OVERSAMPLE, POWER_ITERATIONS = 16, 4
# At this scale the logistic function is nearest to the normal distribution function.
LOGIT_OF_PROBIT = 1.702
HELD_BACK_BLOCK = 128
MIN_BLOCKS = 16
"""Fewest blocks held back: half of them have to show by how much blocks differ."""
MAX_HELD_BACK = 4096
"""Most samples held back: the scores of all may be in memory while thresholds are set."""


def train_layer(
    inputs: Samples,
    fired: Fired,
    gate: Float32,
    ranks: Sequence[int],
    config: PredictorTraining,
    rng: Generator,
    arrays: Arrays,
    shift: Float32 | None = None,
) -> LayerPredictor:
    """One layer's calibrated predictor, of the smallest rank that is good enough (`choose_rank`).

    All ranks are trained together for the trial epochs; then the chosen one is trained alone.

    Args:
        inputs: (N, D) inputs of the layer's gates, see `Samples`.
        fired: (N, F) neurons that fired, see `Fired`.
        gate: (F, D) the layer's gate projection.
        ranks: the ranks to choose from.
        config: how the predictor is fitted.
        rng: generator of the first basis and of the minibatches.
        arrays: the array library to fit with.
        shift: (F,) values added to the gate's products before they are compared with zero; None: nothing is
            added.

    Memory: float32 arrays of (D, D), of the gate, of four times (D + F) * R for every rank R, of a few (B, F)
    of a minibatch and, while it calibrates, of a few (2048, F), and a byte for every gate that fires. There
    is never an array of (N, D), (N, F) or (F, F). With another library than numpy there is a second copy of
    the gate.

    Raises UsageError for shapes or ranks that don't fit, CheckpointError for inputs or gates that aren't
    finite.
    """
    neurons, width = gate.shape
    _check(inputs, fired, gate, ranks)
    trained, held = split(len(inputs), config)
    active = active_count(fired, trained, neurons)
    if active in (0, len(trained) * neurons):
        bias, rank = np.full(neurons, 1 if active else -1, dtype=np.float32), min(ranks)
        nothing = np.zeros((rank, width), np.float32), np.zeros((neurons, rank), np.float32)
        return calibrate(LayerPredictor(*nothing, bias), inputs, fired, held, config.recall)
    predictors = principal_components(inputs, trained, gate, sorted(set(ranks)), rng, arrays, shift)
    tuning = FineTuning(predictors, inputs, fired, gate, trained, active, config, rng, arrays, shift)
    del predictors  # frees the memory of the ranks that are dropped

    def best() -> LayerPredictor:
        candidates = (
            calibrate(predictor, inputs, fired, held, config.recall) for predictor in tuning.predictors
        )
        return choose_rank(list(candidates), config.recall)

    for epoch in range(config.epochs):
        if epoch == config.trial_epochs and len(tuning.predictors) > 1:
            tuning.keep(best().rank)
        tuning.epoch()
    return best()


def split(samples: int, config: PredictorTraining) -> tuple[Ids, HeldBack]:
    """Ascending ids of the samples to train on, and the samples held back.

    Blocks are held back instead of single tokens, because a token is too similar to its neighbours for a
    test. One block out of every 1 / `held_back` or more is drawn at random, so that no place in a text's
    pieces is preferred. The drawn blocks are used alternately for calibrating and for measuring. Raises
    UsageError if there are too few samples.
    """
    every = max(round(1 / config.held_back), -(-samples // MAX_HELD_BACK))
    if samples < MIN_BLOCKS * every:
        least = MIN_BLOCKS * every
        raise UsageError(f"{samples} samples are too few to fit a predictor; give it {least} or more")
    block = min(HELD_BACK_BLOCK, samples // (MIN_BLOCKS * every))
    ids = np.arange(samples, dtype=np.int64)
    group, place = np.divmod(ids // block, every)
    drawn = np.random.default_rng(0).integers(every, size=group[-1] + 1)
    held = place == drawn[group]
    calibrating, measuring = (ids[held & (group % 2 == parity)] for parity in (0, 1))
    return ids[~held], HeldBack(calibrating, measuring, block)


def principal_components(
    inputs: Samples,
    ids: Ids,
    gate: Float32,
    ranks: Sequence[int],
    rng: Generator,
    arrays: Arrays,
    shift: Float32 | None = None,
) -> list[LayerPredictor]:
    """For each rank R, the predictor that is nearest to the gates on the samples `ids`. Scores are log-odds
    of a gate above zero.

    G = X W^T are the centred gates, and V (F, R) their principal directions: V V^T W x approximates the gates
    with the smallest squared error. Since G^T G = W (X^T X) W^T, randomised subspace iteration (arXiv
    0909.4061, algorithm 4.4) needs only the covariance (D, D) of X. The directions of the largest rank begin
    with those of the others. The remaining part of a neuron's gate is treated as normal noise, and the
    neuron's score is divided by the deviation of that noise. shift: as in `train_layer`.
    """
    mean, covariance = _moments(inputs, ids, arrays)
    rows = arrays.load(gate)
    basis = rng.standard_normal((len(gate), min(max(ranks) + OVERSAMPLE, *gate.shape))).astype(np.float32)
    for _ in range(POWER_ITERATIONS):
        basis = np.linalg.qr(arrays.to_numpy(rows @ (covariance @ (rows.T @ arrays.load(basis)))))[0]
    inner = rows.T @ arrays.load(basis)
    values, vectors = np.linalg.eigh(arrays.to_numpy(inner.T @ (covariance @ inner)))
    variance = arrays.to_numpy(arrays.namespace.einsum("fd,fd->f", rows @ covariance, rows))
    predictors = []
    for rank in ranks:
        strongest = np.argsort(values)[::-1][:rank]
        spread = np.sqrt(np.maximum(values[strongest], max(values.max() * 1e-6, 1e-12)))
        directions = basis @ vectors[:, strongest]
        up, down = directions * spread, arrays.to_numpy(arrays.load((directions / spread).T) @ rows)
        left = np.sqrt(np.maximum(variance - np.einsum("fr,fr->f", up, up), variance * np.float32(1e-4)))
        scale = np.float32(LOGIT_OF_PROBIT) / np.maximum(left, np.float32(1e-12))
        bias = gate @ mean - up @ (down @ mean)
        bias = bias if shift is None else bias + shift
        predictors.append(LayerPredictor(np.ascontiguousarray(down), up * scale[:, None], bias * scale))
    return predictors


def calibrate(
    predictor: LayerPredictor, inputs: Samples, fired: Fired, held: HeldBack, recall: float
) -> LayerPredictor:
    """`predictor` with its operating points, and with a bias for which scores above zero reach `recall`.

    Thresholds are set on held.calibrating, as `thresholds` promises; the rates are measured on
    held.measuring. recall: one of RECALLS. Rounding the weights changes scores, so thresholds must be set
    again afterwards, as `store_predictor` in `predictors/train.py` does.
    """
    neurons, ids = len(predictor.bias), held.calibrating
    cuts = thresholds(predictor.scores(inputs[ids]), bits(fired, ids, neurons), held.block)
    shift = np.float32(cuts[RECALLS.index(recall)])
    predictor = replace(predictor, bias=predictor.bias - shift)
    wanted = [(target, threshold - float(shift)) for target, threshold in zip(RECALLS, cuts, strict=True)]
    points = measure(predictor.scores, inputs, fired, held.measuring, neurons, wanted)
    return replace(predictor, points=points)


def choose_rank(candidates: Sequence[LayerPredictor], recall: float, factor: float = 1.15) -> LayerPredictor:
    """The candidate of the lowest rank that selects at most `factor` times as many neurons as the one of the
    highest rank.

    Both are compared at the target `recall`. The candidate may miss no more neurons than the target allows,
    or than the one of the highest rank if that misses more. Each needlessly selected neuron is needlessly
    read from flash, but a rank that is too high takes memory from the neuron cache. Raises UsageError if
    `candidates` is empty.
    """
    if not candidates:
        raise UsageError("no predictor to choose from; train at least one rank")
    ascending = sorted(candidates, key=lambda candidate: candidate.rank)
    largest = ascending[-1].point(recall)
    limit = factor * largest.over_prediction
    # The small addend allows for the rounding of 1 - recall.
    allowed = max(1 - recall + 1e-9, largest.false_negatives)
    for candidate in ascending[:-1]:
        point = candidate.point(recall)
        if point.false_negatives <= allowed and point.over_prediction <= limit:
            return candidate
    return ascending[-1]


def _moments(inputs: Samples, ids: Ids, arrays: Arrays) -> tuple[Float32, Array]:
    """The mean (D,) and the covariance (D, D) of the samples `ids`."""
    width = inputs.shape[1]
    total, covariance = np.zeros(width), arrays.load(np.zeros((width, width), dtype=np.float32))
    for piece in in_pieces(ids):
        total += inputs[piece].sum(axis=0, dtype=np.float64)
    mean = (total / len(ids)).astype(np.float32)
    for piece in in_pieces(ids):
        x = arrays.load(inputs[piece].astype(np.float32) - mean)
        arrays.wait(covariance)
        covariance += x.T @ x
        arrays.begin(covariance)
    return mean, covariance / len(ids)


def _check(inputs: Samples, fired: Fired, gate: Float32, ranks: Sequence[int]) -> None:
    (neurons, width), samples = gate.shape, len(inputs)
    columns = neurons if fired.dtype == np.bool_ else -(-neurons // 8)
    if inputs.shape != (samples, width) or fired.shape != (samples, columns):
        raise UsageError(
            f"inputs {inputs.shape} or what fired {fired.shape} don't fit a gate of {gate.shape}"
        )
    if fired.dtype not in (np.bool_, np.uint8):
        raise UsageError(f"what fired is {fired.dtype}; it must be booleans, or bits packed in uint8")
    if not ranks or not all(1 <= rank <= min(neurons, width) for rank in ranks):
        raise UsageError(f"ranks {list(ranks)} must lie between 1 and {min(neurons, width)}, the gate's own")
    finite = all(np.isfinite(inputs[piece]).all() for piece in in_pieces(np.arange(samples)))
    if not (finite and np.isfinite(gate).all()):
        raise CheckpointError("gates or their inputs hold NaN or infinity; the model is damaged")
