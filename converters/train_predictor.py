"""Low-rank predictors of which feed-forward neurons fire, fitted layer by layer with numpy alone.

"LLM in a flash" (arXiv 2312.11514), section 3.1 and appendix B: a layer's predictor sees what the gate sees,
the normed output of the layer's attention, and gives every neuron a score, `up @ (down @ x) + bias`. Two
plain linear maps; the paper's balanced loss is not spelled out, ours is in `fine_tune`.

Legend: N samples (tokens), D model width, F neurons, R rank, B samples of a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ondevice.errors import CheckpointError, UsageError

Float32: TypeAlias = NDArray[np.float32]
Samples: TypeAlias = NDArray[Any]
"""(N, D) float16 or float32 inputs of a layer's gate; may be an np.memmap."""
Fired: TypeAlias = NDArray[Any]
"""(N, F) booleans, or (N, ceil(F / 8)) uint8 as np.packbits(..., axis=1) packs them; may be an np.memmap."""
Bools: TypeAlias = NDArray[np.bool_]
Ids: TypeAlias = NDArray[np.int64]
RECALLS = (0.90, 0.95, 0.97, 0.98, 0.99, 0.995)
OVERSAMPLE, POWER_ITERATIONS = 16, 4
# The logistic function is nearest to the normal distribution's at this scale.
LOGIT_OF_PROBIT = 1.702
MAGNITUDE_CAP = 4.0
HELD_BACK_BLOCK, PIECE_SAMPLES = 128, 512
MOST_HELD_BACK = 4096
"""Samples held back at most: their scores are all in memory while thresholds are set."""
BLOCK_VALUES = 1 << 17
"""Values of an array that elementwise work goes over together: what lies between stays in a core's cache."""
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8


@dataclass(frozen=True)
class PredictorTraining:
    """How a predictor is fitted. Equal settings, data and generator give equal predictors.

    learning_rate is relative: a step of Adam moves a matrix by about that share of its root mean square. It
    falls linearly to zero. balance: what fires weighs (inactive / active) ** balance, 0 for no weighting.
    weigh_magnitude: it also weighs as its gate's distance from zero, in means of the minibatch and at most 4
    of them, since what is missed near zero hardly counts; the gates are multiplied anew in every epoch.
    held_back: share of the samples (4,096 at most) that only calibrate. recall: of what fires, the share that
    a score above zero shall find.
    """

    epochs: int = 10
    batch_samples: int = 256
    learning_rate: float = 0.03
    balance: float = 1.0
    weigh_magnitude: bool = True
    held_back: float = 0.1
    recall: float = 0.97

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.batch_samples < 1:
            raise UsageError(f"{self.epochs} epochs of {self.batch_samples} samples; give it 0, 1 or more")
        if not (0 < self.learning_rate <= 1 and 0 <= self.balance <= 1 and 0 < self.held_back <= 0.5):
            raise UsageError(f"{self}: learning_rate, balance, held_back are beyond (0, 1], [0, 1], (0, 0.5]")
        if self.recall not in RECALLS:
            raise UsageError(f"recall {self.recall} is not one of {', '.join(map(str, RECALLS))}")


@dataclass(frozen=True)
class OperatingPoint:
    """What selecting every neuron with a score above `threshold` finds, as shares.

    recall: the target. false_negatives: of what fires, what is missed. false_positives: of what doesn't fire,
    what is selected. precision: of what is selected, what fires; of nothing 1. selected, active: of all.
    """

    recall: float
    threshold: float
    false_negatives: float
    false_positives: float
    precision: float
    selected: float
    active: float

    @property
    def over_prediction(self) -> float:
        """Selected neurons per active one; 1 where none is active."""
        return self.selected / self.active if self.active else 1.0


@dataclass(frozen=True)
class LayerPredictor:
    """down (R, D), up (F, R), bias (F,): float32. A neuron is selected where its score is above zero.

    points: measured on samples held back; the threshold of the recall that it was calibrated for is 0.
    """

    down: Float32
    up: Float32
    bias: Float32
    points: tuple[OperatingPoint, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.down)

    def scores(self, inputs: Samples) -> Float32:
        """(B, F) scores of inputs (B, D)."""
        hidden: Float32 = np.asarray(inputs, dtype=np.float32) @ self.down.T
        return hidden @ self.up.T + self.bias

    def point(self, recall: float) -> OperatingPoint:
        """The measurement at a recall target. Raises UsageError if there is none."""
        for point in self.points:
            if point.recall == recall:
                return point
        raise UsageError(f"no operating point at recall {recall}; only {[p.recall for p in self.points]}")


def train_layer(
    inputs: Samples,
    fired: Fired,
    gate: Float32,
    ranks: Sequence[int],
    config: PredictorTraining,
    rng: Generator,
) -> list[LayerPredictor]:
    """Calibrated predictors of one layer, one of each rank, trained together: they share the gates' products.

    inputs: (N, D); fired: (N, F), see `Samples` and `Fired`; gate: (F, D) the layer's gate projection.
    Holds float32 copies of (D, D), of the gate, of four times (D + F) * R for every rank R, of a few (B, F)
    of a minibatch, and while it calibrates of a few (4096, F); never of (N, D), (N, F) or (F, F).
    Raises UsageError for shapes or ranks that don't fit, CheckpointError for inputs or gates not finite.
    """
    neurons, width = gate.shape
    _check(inputs, fired, gate, ranks)
    trained, _ = split(len(inputs), config)
    active = active_share(fired, trained, neurons)
    if active in (0.0, 1.0):
        bias = np.full(neurons, 1 if active else -1, dtype=np.float32)
        predictors = [
            LayerPredictor(np.zeros((rank, width), np.float32), np.zeros((neurons, rank), np.float32), bias)
            for rank in ranks
        ]
    else:
        predictors = principal_components(inputs, trained, gate, ranks, rng)
        fine_tune(predictors, inputs, fired, gate, trained, config, rng)
    return [calibrate(predictor, inputs, fired, config) for predictor in predictors]


def split(samples: int, config: PredictorTraining) -> tuple[Ids, Ids]:
    """Ascending sample ids to train on, and those held back. Raises UsageError where there are too few.

    Blocks, not single tokens, are held back: a token's neighbours are too much like it to be news.
    """
    every = max(round(1 / config.held_back), -(-samples // MOST_HELD_BACK))
    if samples < 2 * every:
        raise UsageError(f"{samples} samples are too few to fit a predictor; give it {2 * every} or more")
    ids = np.arange(samples, dtype=np.int64)
    held = ids // min(HELD_BACK_BLOCK, samples // every) % every == every - 1
    return ids[~held], ids[held]


def principal_components(
    inputs: Samples, ids: Ids, gate: Float32, ranks: Sequence[int], rng: Generator
) -> list[LayerPredictor]:
    """The maps of each rank R nearest to the gates on the samples `ids`, as log-odds of being above zero.

    G = X W^T, centred; V (F, R) its principal directions: the gates that V V^T W x leaves have the smallest
    squared error. Since G^T G = W (X^T X) W^T, randomised subspace iteration (arXiv 0909.4061, algorithm 4.4)
    needs only the covariance (D, D) of X. The largest rank's directions begin with those of the others. What
    is left of a neuron's gate is taken as normal noise, and its score divided by that noise's deviation.
    """
    mean, covariance = _moments(inputs, ids)
    basis = rng.standard_normal((len(gate), min(max(ranks) + OVERSAMPLE, *gate.shape))).astype(np.float32)
    for _ in range(POWER_ITERATIONS):
        basis = np.linalg.qr(gate @ (covariance @ (gate.T @ basis)))[0]
    inner = gate.T @ basis
    values, vectors = np.linalg.eigh(inner.T @ (covariance @ inner))
    variance = np.einsum("fd,fd->f", gate @ covariance, gate)
    found = []
    for rank in ranks:
        strongest = np.argsort(values)[::-1][:rank]
        spread = np.sqrt(np.maximum(values[strongest], max(values.max() * 1e-6, 1e-12)))
        directions = basis @ vectors[:, strongest]
        up, down = directions * spread, (directions / spread).T @ gate
        left = np.sqrt(np.maximum(variance - np.einsum("fr,fr->f", up, up), variance * np.float32(1e-4)))
        scale = np.float32(LOGIT_OF_PROBIT) / np.maximum(left, np.float32(1e-12))
        bias = gate @ mean - up @ (down @ mean)
        found.append(LayerPredictor(np.ascontiguousarray(down), up * scale[:, None], bias * scale))
    return found


def gradients(predictor: LayerPredictor, x: Float32, y: Bools, weights: Float32) -> tuple[Float32, ...]:
    """Of the weighted binary cross-entropy, summed over neurons, mean of samples, for down, up and bias.

    x: (B, D); y: (B, F) what fired; weights: (B, F) how much each counts.
    """
    hidden = x @ predictor.down.T
    error: NDArray[Any] = hidden @ predictor.up.T
    samples = max(1, BLOCK_VALUES // len(predictor.bias))
    for first in range(0, len(x), samples):
        block = slice(first, first + samples)
        scores = error[block] + predictor.bias
        small = np.exp(-np.abs(scores))
        chance = np.where(scores >= 0, np.float32(1), small) / (1 + small)
        error[block] = (chance - y[block]) * weights[block] / np.float32(len(x))
    return (error @ predictor.up).T @ x, error.T @ hidden, error.sum(axis=0)


def fine_tune(
    predictors: Sequence[LayerPredictor],
    inputs: Samples,
    fired: Fired,
    gate: Float32,
    ids: Ids,
    config: PredictorTraining,
    rng: Generator,
) -> None:
    """Move `predictors`, in place, by Adam on balanced cross-entropy over the samples `ids`.

    All see the same minibatches, whose gates are multiplied once for all.
    """
    active = active_share(fired, ids, len(gate))
    balance = np.float32(((1 - active) / active) ** config.balance)
    descents = [_Adam(predictor, config.learning_rate) for predictor in predictors]
    steps = config.epochs * -(-len(ids) // config.batch_samples)
    step = 0
    for _ in range(config.epochs):
        order = rng.permutation(ids)
        for first in range(0, len(order), config.batch_samples):
            batch = order[first : first + config.batch_samples]
            x, y = inputs[batch].astype(np.float32), _bits(fired, batch, len(gate))
            weights = _weights(x, y, gate, balance, config)
            step += 1
            for descent in descents:
                descent.step(gradients(descent.predictor, x, y, weights), step, steps)


def _weights(x: Float32, y: Bools, gate: Float32, balance: np.float32, config: PredictorTraining) -> Float32:
    """(B, F) how much each neuron counts for each sample of x (B, D) where y (B, F) fired."""
    if not (config.weigh_magnitude and y.any()):
        return np.where(y, balance, np.float32(1))
    gates = x @ gate.T
    np.maximum(gates, 0, out=gates)
    gates /= max(float(gates.mean(where=y)), 1e-12)
    np.minimum(gates, np.float32(MAGNITUDE_CAP), out=gates)
    gates *= balance
    gates[~y] = 1
    return gates


class _Adam:
    """Steps of Adam (arXiv 1412.6980) on one predictor's arrays, at rates relative to their size."""

    def __init__(self, predictor: LayerPredictor, learning_rate: float) -> None:
        self.predictor = predictor
        self._parameters = (predictor.down, predictor.up, predictor.bias)
        self._rates = [learning_rate * float(np.sqrt(np.mean(p * p))) for p in self._parameters]
        self._means = [np.zeros_like(p) for p in self._parameters]
        self._squares = [np.zeros_like(p) for p in self._parameters]

    def step(self, slopes: Sequence[Float32], step: int, steps: int) -> None:
        """One of `steps` steps, counted from 1, down the slopes of down, up and bias."""
        fall = (1 - (step - 1) / steps) * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
        for rate, *arrays in zip(
            self._rates, self._parameters, slopes, self._means, self._squares, strict=True
        ):
            rows = max(1, BLOCK_VALUES * len(arrays[0]) // arrays[0].size)
            for start in range(0, len(arrays[0]), rows):
                p, g, mean, square = (array[start : start + rows] for array in arrays)
                mean += np.float32(1 - BETA1) * (g - mean)
                square += np.float32(1 - BETA2) * (g * g - square)
                p -= np.float32(rate * fall) * mean / (np.sqrt(square) + np.float32(EPSILON))


def calibrate(
    predictor: LayerPredictor, inputs: Samples, fired: Fired, config: PredictorTraining
) -> LayerPredictor:
    """`predictor` with a bias that meets config.recall above zero, and its points, on the samples held back.

    Apply it again to weights that were rounded: rounding moves scores.
    """
    _, ids = split(len(inputs), config)
    y = _bits(fired, ids, len(predictor.bias))
    (point,) = operating_points(predictor.scores(inputs[ids]), y, [config.recall])
    # Adding a shifted bias rounds otherwise than comparing with a threshold: leave a few units in the last
    # place, so that what was just above is still above.
    largest = max(abs(point.threshold), float(np.abs(predictor.bias).max()))
    predictor = replace(predictor, bias=predictor.bias - np.float32(point.threshold - 1e-6 * largest))
    scores = predictor.scores(inputs[ids])
    at_zero = _measure(scores, y, config.recall, 0.0)
    points = (at_zero if p.recall == config.recall else p for p in operating_points(scores, y))
    return replace(predictor, points=tuple(points))


def operating_points(
    scores: Float32, fired: Bools, recalls: Sequence[float] = RECALLS
) -> tuple[OperatingPoint, ...]:
    """For each recall target the highest threshold that meets it, and what it costs.

    scores, fired: (M, F), of samples the predictor was not trained on.
    Raises UsageError for shapes that differ, scores that are NaN, or recalls outside (0, 1].
    """
    if scores.shape != fired.shape or np.isnan(scores).any():
        raise UsageError(f"scores {scores.shape} of what fired {fired.shape} differ in shape or hold NaN")
    if not all(0 < recall <= 1 for recall in recalls):
        raise UsageError(f"recall targets {list(recalls)} must lie in (0, 1]")
    active = np.sort(scores[fired])[::-1]
    points = []
    for recall in recalls:
        # A product such as 0.9 * 10 may come out above 9, and must not ask for a tenth neuron.
        last = int(np.ceil(recall * len(active) * (1 - 1e-12))) - 1
        threshold = float(np.nextafter(active[last], np.float32(-np.inf))) if len(active) else 0.0
        points.append(_measure(scores, fired, recall, threshold))
    return tuple(points)


def _measure(scores: Float32, fired: Bools, recall: float, threshold: float) -> OperatingPoint:
    selected = scores > np.float32(threshold)
    hits, chosen, active = (int(np.count_nonzero(each)) for each in (selected & fired, selected, fired))
    return OperatingPoint(
        recall=recall,
        threshold=threshold,
        false_negatives=(active - hits) / max(1, active),
        false_positives=(chosen - hits) / max(1, fired.size - active),
        precision=hits / chosen if chosen else 1.0,
        selected=chosen / max(1, fired.size),
        active=active / max(1, fired.size),
    )


def choose_rank(candidates: Sequence[LayerPredictor], recall: float, factor: float = 1.15) -> LayerPredictor:
    """The smallest candidate that selects at most `factor` times what the largest does, at equal recall.

    It must also miss no more than it may. What is selected in vain is read from flash in vain; what rank is
    too high is memory that the neuron cache loses. Raises UsageError if there is none to choose from.
    """
    if not candidates:
        raise UsageError("no predictor to choose from; train at least one rank")
    ascending = sorted(candidates, key=lambda candidate: candidate.rank)
    limit = factor * ascending[-1].point(recall).over_prediction
    for candidate in ascending[:-1]:
        point = candidate.point(recall)
        # Not exactly 1 - recall: that difference is rounded.
        if point.false_negatives <= 1 - recall + 1e-9 and point.over_prediction <= limit:
            return candidate
    return ascending[-1]


def active_share(fired: Fired, ids: Ids, neurons: int) -> float:
    """Share of neurons that fire, over the samples `ids`."""
    count = sum(int(_bits(fired, piece, neurons).sum()) for piece in _pieces(ids))
    return count / (len(ids) * neurons)


def _moments(inputs: Samples, ids: Ids) -> tuple[Float32, Float32]:
    """Mean (D,) and covariance (D, D) of the samples `ids`."""
    width = inputs.shape[1]
    total, covariance = np.zeros(width), np.zeros((width, width), dtype=np.float32)
    for piece in _pieces(ids):
        total += inputs[piece].sum(axis=0, dtype=np.float64)
    mean = (total / len(ids)).astype(np.float32)
    for piece in _pieces(ids):
        x = inputs[piece].astype(np.float32) - mean
        covariance += x.T @ x
    return mean, covariance / np.float32(len(ids))


def _pieces(ids: Ids) -> list[Ids]:
    return [ids[start : start + PIECE_SAMPLES] for start in range(0, len(ids), PIECE_SAMPLES)]


def _bits(fired: Fired, ids: Ids, neurons: int) -> Bools:
    rows: NDArray[Any] = np.asarray(fired[ids])
    return rows if rows.dtype == np.bool_ else np.unpackbits(rows, axis=1, count=neurons).view(np.bool_)


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
    finite = all(np.isfinite(inputs[piece]).all() for piece in _pieces(np.arange(samples)))
    if not (finite and np.isfinite(gate).all()):
        raise CheckpointError("gates or their inputs hold NaN or infinity; the model is damaged")
