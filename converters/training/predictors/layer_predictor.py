"""One layer's predictor of which neurons fire, its training settings, and its measured rates.

Legend: N samples (tokens), D model width, F neurons, R rank, B samples of a minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.errors import UsageError

Float32: TypeAlias = NDArray[np.float32]
Samples: TypeAlias = NDArray[Any]
"""(N, D) float16 or float32 inputs of a layer's gates; may be an np.memmap."""
Fired: TypeAlias = NDArray[Any]
"""(N, F) booleans, or (N, ceil(F / 8)) uint8 as np.packbits(..., axis=1) packs them; may be an np.memmap."""
Bools: TypeAlias = NDArray[np.bool_]
Ids: TypeAlias = NDArray[np.int64]
RECALLS = (0.90, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Recall targets, ascending."""
PIECE_SAMPLES = 512
"""Samples that are processed together."""


@dataclass(frozen=True)
class PredictorTraining:
    """How a predictor is fitted. Equal settings, data and generator give equal predictors.

    Args:
        epochs: passes over the training samples.
        trial_epochs: epochs after which the rank is chosen; the other ranks are then dropped.
        batch_samples: samples of a minibatch.
        learning_rate: about the share of a matrix's root mean square by which a step of Adam moves it. It
            falls linearly to zero.
        balance: exponent of the weight of firing neurons, (inactive / active) ** balance. 0 means no
            weighting.
        weigh_magnitude: whether firing neurons are also weighted by their gate's distance from zero, divided
            by the mean of these distances and at most 4, because missing a neuron near zero hardly matters.
        held_back: share of the samples (4,096 at most) that aren't used for training, but for setting
            thresholds and comparing ranks.
        recall: the share of firing neurons that should have a score above zero.
    """

    epochs: int = 10
    trial_epochs: int = 1
    batch_samples: int = 256
    learning_rate: float = 0.03
    balance: float = 1.0
    weigh_magnitude: bool = True
    held_back: float = 0.1
    recall: float = 0.97

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.trial_epochs < 1 or self.batch_samples < 1:
            raise UsageError(
                f"{self.epochs} epochs, {self.trial_epochs} on trial, of {self.batch_samples} samples; "
                "give it 0, 1 and 1 or more"
            )
        if not (0 < self.learning_rate <= 1 and 0 <= self.balance <= 1 and 0 < self.held_back <= 0.5):
            raise UsageError(f"{self}: learning_rate, balance, held_back are beyond (0, 1], [0, 1], (0, 0.5]")
        if self.recall not in RECALLS:
            raise UsageError(f"recall {self.recall} is not one of {', '.join(map(str, RECALLS))}")


@dataclass(frozen=True)
class LayerPoint:
    """The measured rates of a selection of all neurons with a score above `threshold`. All rates are shares
    from 0 to 1.

    recall: the target. false_negatives: missed neurons per neuron that fires. false_positives: selected
    neurons per neuron that doesn't fire. precision: share of the selected neurons that fire, 1 if none is
    selected. selected, active: shares of all neurons.
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
        """Number of selected neurons per firing one; 1 if none fires."""
        return self.selected / self.active if self.active else 1.0


@dataclass(frozen=True)
class LayerPredictor:
    """A layer's predictor: it selects a neuron if the neuron's score is above zero.

    down (R, D), up (F, R), bias (F,): float32. points: measured on samples that were used neither for
    training nor for thresholds. For the recall that the predictor was calibrated for, the threshold is 0.
    """

    down: Float32
    up: Float32
    bias: Float32
    points: tuple[LayerPoint, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.down)

    def scores(self, inputs: Samples) -> Float32:
        """The scores (B, F) of neurons for inputs (B, D)."""
        hidden: Float32 = np.asarray(inputs, dtype=np.float32) @ self.down.T
        return hidden @ self.up.T + self.bias

    def point(self, recall: float) -> LayerPoint:
        """The operating point of a recall target. Raises UsageError if there is none."""
        for point in self.points:
            if point.recall == recall:
                return point
        raise UsageError(f"no operating point at recall {recall}; only {[p.recall for p in self.points]}")


def active_count(fired: Fired, ids: Ids, neurons: int) -> int:
    """The number of (sample, neuron) pairs in which the neuron fires, over the samples `ids`."""
    return sum(int(bits(fired, piece, neurons).sum()) for piece in in_pieces(ids))


def in_pieces(ids: Ids) -> list[Ids]:
    """The ids, divided into runs of PIECE_SAMPLES."""
    return [ids[start : start + PIECE_SAMPLES] for start in range(0, len(ids), PIECE_SAMPLES)]


def bits(fired: Fired, ids: Ids, neurons: int) -> Bools:
    """Booleans (n, F), True for each neuron that fired, for the samples `ids`."""
    rows: NDArray[Any] = np.asarray(fired[ids])
    return rows if rows.dtype == np.bool_ else np.unpackbits(rows, axis=1, count=neurons).view(np.bool_)
