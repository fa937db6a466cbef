"""One layer's predictor of which neurons fire, how it is trained, and how well it does.

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
"""(N, D) float16 or float32 inputs of a layer's gate; may be an np.memmap."""
Fired: TypeAlias = NDArray[Any]
"""(N, F) booleans, or (N, ceil(F / 8)) uint8 as np.packbits(..., axis=1) packs them; may be an np.memmap."""
Bools: TypeAlias = NDArray[np.bool_]
Ids: TypeAlias = NDArray[np.int64]
RECALLS = (0.90, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Ascending."""
PIECE_SAMPLES = 512
"""Samples that are gone over together."""


@dataclass(frozen=True)
class PredictorTraining:
    """How a predictor is fitted. Equal settings, data and generator give equal predictors.

    learning_rate is relative: a step of Adam moves a matrix by about that share of its root mean square. It
    falls linearly to zero. trial_epochs: after so many the rank is chosen, and no other is trained on.
    balance: what fires weighs (inactive / active) ** balance, 0 for no weighting. weigh_magnitude: it also
    weighs as its gate's distance from zero, in means of what fires and at most 4 of them, since what is
    missed near zero hardly counts. held_back: share of the samples (4,096 at most) that don't train, but set
    thresholds and judge ranks. recall: of what fires, the share that a score above zero shall find.
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

    points: measured on samples that neither trained it nor set thresholds; the threshold of the recall that
    it was calibrated for is 0.
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


def active_count(fired: Fired, ids: Ids, neurons: int) -> int:
    """How often neurons fire, over the samples `ids`."""
    return sum(int(bits(fired, piece, neurons).sum()) for piece in in_pieces(ids))


def in_pieces(ids: Ids) -> list[Ids]:
    """`ids` in runs of PIECE_SAMPLES."""
    return [ids[start : start + PIECE_SAMPLES] for start in range(0, len(ids), PIECE_SAMPLES)]


def bits(fired: Fired, ids: Ids, neurons: int) -> Bools:
    """(n, F) what fired for the samples `ids`."""
    rows: NDArray[Any] = np.asarray(fired[ids])
    return rows if rows.dtype == np.bool_ else np.unpackbits(rows, axis=1, count=neurons).view(np.bool_)
