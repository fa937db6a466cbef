"""Gates whose rule is known, to fit predictors to."""

from __future__ import annotations

import numpy as np

from ondevice.converters.training.predictors.arrays import Arrays, NumpyArrays
from ondevice.converters.training.predictors.fine_tune import FineTuning
from ondevice.converters.training.predictors.layer_predictor import (
    LayerPredictor,
    PredictorTraining,
    active_count,
)
from ondevice.converters.training.predictors.low_rank import principal_components, split, train_layer

SAMPLES, WIDTH, NEURONS, RANK = 3000, 24, 70, 6
CONFIG = PredictorTraining(epochs=8, batch_samples=64)
NUMPY = NumpyArrays()


class Planted:
    """A gate of rank RANK, and noise of full rank; a neuron fires beyond 1.2 deviations, about a ninth do."""

    def __init__(self, noise: float = 0.0, idle: float = 0.0) -> None:
        """idle: gates' scale of a further, independent half of the neurons, which hardly ever fire."""
        rng = np.random.default_rng(0)
        gate = rng.standard_normal((NEURONS, RANK)) @ rng.standard_normal((RANK, WIDTH))
        gate += noise * RANK**0.5 * rng.standard_normal(gate.shape)
        level = np.full(NEURONS, 1.2)
        if idle:
            gate[::2] = idle * rng.standard_normal((NEURONS // 2, RANK)) @ rng.standard_normal((RANK, WIDTH))
            level[::2] = 4
        # The last input is always 1.
        gate[:, -1] = -level * np.linalg.norm(gate[:, :-1], axis=1)
        self.gate = gate.astype(np.float32)
        samples = rng.standard_normal((2 * SAMPLES, WIDTH))
        samples[:, -1] = 1
        self.inputs, self.fresh = np.split(samples.astype(np.float16), 2)
        self.fired, self.fresh_fired = (self.fires(x) for x in (self.inputs, self.fresh))

    def fires(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32) @ self.gate.T > 0

    def train(
        self, rank: int = RANK, config: PredictorTraining = CONFIG, seed: int = 1, arrays: Arrays = NUMPY
    ) -> LayerPredictor:
        rng = np.random.default_rng(seed)
        return train_layer(self.inputs, self.fired, self.gate, [rank], config, rng, arrays)


def tuning(
    data: Planted, ranks: list[int], config: PredictorTraining = CONFIG, arrays: Arrays = NUMPY
) -> FineTuning:
    """Fine-tuning of these ranks' principal components, not begun."""
    trained, _ = split(SAMPLES, config)
    samples = (data.inputs, data.fired, data.gate, trained)
    start = principal_components(data.inputs, trained, data.gate, ranks, np.random.default_rng(1), NUMPY)
    active = active_count(data.fired, trained, NEURONS)
    return FineTuning(start, *samples, active, config, np.random.default_rng(2), arrays)
