"""Moves predictors by gradient steps, so that their rank is used for neurons that fire.

"LLM in a flash" (arXiv 2312.11514), appendix B, trains with a balanced loss that it doesn't spell out. The
loss used here is in `FineTuning`. Legend as in `layer_predictor.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator

from ondevice.converters.training.predictors.arrays import Array, Arrays
from ondevice.converters.training.predictors.layer_predictor import (
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
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8

Parameters: TypeAlias = tuple[Array, Array, Array]
"""A predictor's down, up and bias as an `Arrays` holds them."""


class FineTuning:
    """Adam on balanced cross-entropy over the samples `ids`, one epoch at a time.

    All predictors are trained on the same minibatches, in place with numpy. Memory: four times the
    predictors, a byte for every gate that fires, and a few (B, F) arrays of a minibatch.
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
        arrays: Arrays,
        shift: Float32 | None = None,
    ) -> None:
        """Start with predictors at step 0.

        Args:
            predictors: the predictors to move, one per rank.
            inputs: see `Samples`.
            fired: see `Fired`.
            gate: (F, D) gate projection, which is multiplied only once for all predictors.
            ids: ascending ids of the samples to train on.
            active: `active_count` of these samples.
            config: how predictors are fitted.
            rng: generator of the minibatches.
            arrays: the array library to fit with.
            shift: (F,) values added to the gate's products, or None.
        """
        self._inputs, self._fired, self._ids = inputs, fired, ids
        self._config, self._rng, self._neurons, self._arrays = config, rng, len(gate), arrays
        values = len(ids) * len(gate)
        self._balance = np.float32(((values - active) / active) ** config.balance)
        self._magnitudes = (
            _Magnitudes(inputs, fired, gate, ids, active, arrays, shift) if config.weigh_magnitude else None
        )
        self._descents = [_Adam(predictor, config.learning_rate, arrays) for predictor in predictors]
        self._steps = config.epochs * -(-len(ids) // config.batch_samples)
        self._step = 0

    @property
    def predictors(self) -> list[LayerPredictor]:
        """The predictors that are still being trained, with their present values."""
        return [descent.predictor for descent in self._descents]

    def keep(self, rank: int) -> None:
        """Train only the predictor of this rank from now on."""
        self._descents = [descent for descent in self._descents if descent.rank == rank]

    def epoch(self) -> None:
        """Train on all samples once. `config.epochs` is the number of such passes."""
        order = self._rng.permutation(self._ids)
        for first in range(0, len(order), self._config.batch_samples):
            x, y, weights = self._minibatch(order[first : first + self._config.batch_samples])
            # The previous step ran while the host built this minibatch; at most one step is under way.
            self._arrays.wait(*self._moved())
            self._step += 1
            for descent in self._descents:
                slopes = gradients(self._arrays, descent.parameters, x, y, weights)
                descent.step(slopes, self._step, self._steps)
            self._arrays.begin(*self._moved())

    def _minibatch(self, batch: Ids) -> tuple[Array, Array, Array]:
        """The inputs x (B, D) of a minibatch, which neurons fire, y (B, F), and the weight of
        each, (B, F).
        """
        x, y = self._inputs[batch].astype(np.float32), bits(self._fired, batch, self._neurons)
        weights = np.ones(y.shape, dtype=np.float32)
        magnitudes = 1 if self._magnitudes is None else self._magnitudes.of(batch)
        weights[y] = magnitudes * self._balance
        return self._arrays.load(x), self._arrays.load(y), self._arrays.load(weights)

    def _moved(self) -> Iterator[Array]:
        """Yields all arrays that a step changes."""
        return (array for descent in self._descents for state in descent.states for array in state)


def gradients(
    arrays: Arrays, parameters: Parameters, x: Array, y: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Gradients of the weighted binary cross-entropy for down, up and bias.

    The loss is summed over neurons and averaged over samples. x: (B, D). y: (B, F), true where a neuron
    fired. weights: (B, F) weight of each.
    """
    down, up, bias = parameters
    xp, samples = arrays.namespace, len(x)

    def error_of(scores: Array, y: Array, weights: Array) -> tuple[Array]:
        scores = scores + bias
        small = xp.exp(-xp.abs(scores))
        chance = xp.where(scores >= 0, 1.0, small) / (1 + small)
        return ((chance - y) * weights / samples,)

    hidden = x @ down.T
    (error,) = arrays.changed(error_of, (hidden @ up.T,), y, weights)
    return (error @ up).T @ x, error.T @ hidden, error.sum(axis=0)


class _Magnitudes:
    """The gates of firing neurons, divided by their mean and capped at MAGNITUDE_CAP, in one byte each."""

    def __init__(
        self,
        inputs: Samples,
        fired: Fired,
        gate: Float32,
        ids: Ids,
        active: int,
        arrays: Arrays,
        shift: Float32 | None = None,
    ) -> None:
        self._ids = ids
        self._codes = np.empty(active, dtype=np.uint8)
        self._ends = np.zeros(len(ids) + 1, dtype=np.int64)
        unit, done, samples, rows = 0.0, 0, 0, arrays.load(gate)
        for piece in in_pieces(ids):
            y = bits(fired, piece, len(gate))
            products = arrays.to_numpy(arrays.load(inputs[piece].astype(np.float32)) @ rows.T)
            gates = np.maximum((products if shift is None else products + shift)[y], 0)
            # The first samples have enough values for their mean to be that of all.
            unit = unit or (float(gates.mean()) if len(gates) else 0.0)
            shares = np.minimum(gates / max(unit, 1e-12) / MAGNITUDE_CAP, 1)
            self._codes[done : done + len(gates)] = np.rint(255 * shares)
            self._ends[samples + 1 : samples + 1 + len(piece)] = done + np.cumsum(y.sum(axis=1))
            done, samples = done + len(gates), samples + len(piece)

    def of(self, batch: Ids) -> Float32:
        """The magnitudes of the firing neurons of a batch, sample by sample, in ascending order
        of neurons.
        """
        places = np.searchsorted(self._ids, batch)
        codes = [self._codes[self._ends[place] : self._ends[place + 1]] for place in places]
        return np.concatenate(codes).astype(np.float32) * np.float32(MAGNITUDE_CAP / 255)


class _Adam:
    """Adam (arXiv 1412.6980) for the arrays of one predictor, with rates relative to their root
    mean square.
    """

    def __init__(self, predictor: LayerPredictor, learning_rate: float, arrays: Arrays) -> None:
        parameters = (predictor.down, predictor.up, predictor.bias)
        self.rank = predictor.rank
        self._arrays = arrays
        self._rates = [learning_rate * float(np.sqrt(np.mean(p * p))) for p in parameters]
        self.states: list[tuple[Array, ...]] = [
            tuple(arrays.load(values) for values in (p, np.zeros_like(p), np.zeros_like(p)))
            for p in parameters
        ]
        """For down, up and bias: the values, and running means of their slopes and squared slopes."""

    @property
    def parameters(self) -> Parameters:
        down, up, bias = (values for values, _, _ in self.states)
        return down, up, bias

    @property
    def predictor(self) -> LayerPredictor:
        down, up, bias = (self._arrays.to_numpy(values) for values in self.parameters)
        return LayerPredictor(down, up, bias)

    def step(self, slopes: Sequence[Array], step: int, steps: int) -> None:
        """Take step `step` out of `steps`, counted from 1, down the slopes of down, up and bias."""
        fall = (1 - (step - 1) / steps) * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
        for index, (rate, slope) in enumerate(zip(self._rates, slopes, strict=True)):
            function = partial(_moved, self._arrays.namespace, rate * fall)
            self.states[index] = self._arrays.changed(function, self.states[index], slope)


def _moved(xp: Any, rate: float, p: Array, mean: Array, square: Array, g: Array) -> tuple[Array, ...]:
    """The values p and both of Adam's running means, after a step down the slope g."""
    mean = mean + (1 - BETA1) * (g - mean)
    square = square + (1 - BETA2) * (g * g - square)
    return p - rate * mean / (xp.sqrt(square) + EPSILON), mean, square
