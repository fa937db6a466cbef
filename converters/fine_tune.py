"""Moving predictors by gradient steps, so that their rank is spent on what fires.

"LLM in a flash" (arXiv 2312.11514), appendix B, trains with a balanced loss that it doesn't spell out; ours
is in `FineTuning`. Legend as in `layer_predictor.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ondevice.converters.layer_predictor import (
    Bools,
    Fired,
    Float32,
    Ids,
    LayerPredictor,
    PredictorTraining,
    Samples,
    bits,
    in_pieces,
)

MAGNITUDE_CAP = 4.0
BLOCK_VALUES = 1 << 17
"""Values of an array that elementwise work goes over together: what lies between stays in a core's cache."""
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8


class FineTuning:
    """Adam on balanced cross-entropy over the samples `ids`, an epoch at a time, of predictors in place.

    All see the same minibatches. Memory, beside four times the predictors: a byte for every gate that fires,
    and a few (B, F) of a minibatch.
    """

    def __init__(
        self,
        predictors: Sequence[LayerPredictor],
        inputs: Samples,
        fired: Fired,
        gate: Float32,
        ids: Ids,
        active: int,
        config: PredictorTraining,
        rng: Generator,
    ) -> None:
        """ids: ascending; active: how often neurons fire for them. gate: (F, D), multiplied once for all."""
        self._inputs, self._fired, self._ids = inputs, fired, ids
        self._config, self._rng, self._neurons = config, rng, len(gate)
        values = len(ids) * len(gate)
        self._balance = np.float32(((values - active) / active) ** config.balance)
        self._magnitudes = _Magnitudes(inputs, fired, gate, ids, active) if config.weigh_magnitude else None
        self._descents = [_Adam(predictor, config.learning_rate) for predictor in predictors]
        self._steps = config.epochs * -(-len(ids) // config.batch_samples)
        self._step = 0

    @property
    def predictors(self) -> list[LayerPredictor]:
        """Those that are moved."""
        return [descent.predictor for descent in self._descents]

    def keep(self, rank: int) -> None:
        """Move none but the one of this rank from now on."""
        self._descents = [descent for descent in self._descents if descent.predictor.rank == rank]

    def epoch(self) -> None:
        """A pass over all samples, one of `config.epochs`."""
        order = self._rng.permutation(self._ids)
        for first in range(0, len(order), self._config.batch_samples):
            batch = order[first : first + self._config.batch_samples]
            x, y = self._inputs[batch].astype(np.float32), bits(self._fired, batch, self._neurons)
            weights = np.ones(y.shape, dtype=np.float32)
            magnitudes = 1 if self._magnitudes is None else self._magnitudes.of(batch)
            weights[y] = magnitudes * self._balance
            self._step += 1
            for descent in self._descents:
                descent.step(gradients(descent.predictor, x, y, weights), self._step, self._steps)


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


class _Magnitudes:
    """Gates of what fires, in means of them and at most MAGNITUDE_CAP, rounded to a byte each."""

    def __init__(self, inputs: Samples, fired: Fired, gate: Float32, ids: Ids, active: int) -> None:
        self._ids = ids
        self._codes = np.empty(active, dtype=np.uint8)
        self._ends = np.zeros(len(ids) + 1, dtype=np.int64)
        unit, done, samples = 0.0, 0, 0
        for piece in in_pieces(ids):
            y = bits(fired, piece, len(gate))
            gates = np.maximum((inputs[piece].astype(np.float32) @ gate.T)[y], 0)
            # The mean of the first samples: so many values that all of them have no other.
            unit = unit or (float(gates.mean()) if len(gates) else 0.0)
            shares = np.minimum(gates / max(unit, 1e-12) / MAGNITUDE_CAP, 1)
            self._codes[done : done + len(gates)] = np.rint(255 * shares)
            self._ends[samples + 1 : samples + 1 + len(piece)] = done + np.cumsum(y.sum(axis=1))
            done, samples = done + len(gates), samples + len(piece)

    def of(self, batch: Ids) -> Float32:
        """Those of what fires for the samples of a batch, sample by sample, by ascending neuron."""
        places = np.searchsorted(self._ids, batch)
        codes = [self._codes[self._ends[place] : self._ends[place + 1]] for place in places]
        return np.concatenate(codes).astype(np.float32) * np.float32(MAGNITUDE_CAP / 255)


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
