"""Sets score thresholds of a predictor that select a target share of the firing neurons, and measures them on
other samples.

A threshold that has exactly the target recall on the samples used to set it misses the target on other
samples about half the time. So the threshold is set where a lower confidence bound of recall reaches the
target, as for risk-controlling prediction sets (arXiv 2101.02703, with the bound of the central limit
theorem). The bound is MARGIN standard errors below the measured recall. Neighbouring tokens are similar, and
a token's neurons fire together. The standard error is therefore that of a ratio over a sample of complete
blocks of tokens (Cochran, Sampling Techniques, 3rd edition, 1977, chapter 6).

Legend as in `layer_predictor.py`; M samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.training.predictors.layer_predictor import (
    RECALLS,
    Bools,
    Fired,
    Float32,
    Ids,
    LayerPoint,
    Samples,
    bits,
    in_pieces,
)
from ondevice.errors import UsageError

MARGIN = 2.0
"""Standard errors between the recall where a threshold is set and the target: 97.7 % of a normal
distribution."""

Scores = Callable[[Samples], Float32]
"""Function from inputs (B, D) to scores (B, F)."""


@dataclass(frozen=True)
class HeldBack:
    """The ascending ids of samples that aren't used for training.

    calibrating: samples used to set thresholds. measuring: samples used to measure them. block: number of
    neighbouring calibrating samples that form one block.
    """

    calibrating: Ids
    measuring: Ids
    block: int


def thresholds(
    scores: Float32, fired: Bools, block: int, recalls: Sequence[float] = RECALLS
) -> tuple[float, ...]:
    """For each recall target, the threshold above which scores reach that recall on other samples too.

    Args:
        scores: (M, F) scores of samples that the predictor wasn't trained on.
        fired: (M, F), true where a neuron fired.
        block: number of consecutive samples that form a block.
        recalls: the targets, ascending.

    The promise: other samples drawn from the same text miss no more than 1 - target in 97.7 % of all cases,
    for each layer and target. It holds if blocks are drawn at random, and are so numerous that their recall
    is normally distributed. Nothing is promised for text of another kind. From a single block no error can be
    estimated, so there is no margin then.

    Raises UsageError for shapes that differ, scores that are NaN, or recalls outside (0, 1].
    """
    if scores.shape != fired.shape or np.isnan(scores).any():
        raise UsageError(f"scores {scores.shape} of what fired {fired.shape} differ in shape or hold NaN")
    if not all(0 < recall <= 1 for recall in recalls):
        raise UsageError(f"recall targets {list(recalls)} must lie in (0, 1]")
    active = np.sort(scores[fired])
    starts = np.arange(0, len(scores), block)
    firing = _per_block(fired, starts)
    cuts: list[float] = []
    needed = 0.0
    for recall in recalls:
        hits = _per_block((scores > np.float32(_threshold(active, recall))) & fired, starts)
        # The error may fall faster than the target rises; a higher target still must not raise the threshold.
        needed = max(needed, recall + MARGIN * _standard_error(hits, firing))
        cuts.append(_threshold(active, min(1.0, needed)))
    return tuple(cuts)


def measure(
    scores: Scores,
    inputs: Samples,
    fired: Fired,
    ids: Ids,
    neurons: int,
    wanted: Sequence[tuple[float, float]],
) -> tuple[LayerPoint, ...]:
    """The operating points of thresholds, measured on the samples `ids`, a piece at a time.

    Args:
        scores: computes the scores of inputs.
        inputs: see `Samples`.
        fired: see `Fired`.
        ids: the samples to measure on.
        neurons: F.
        wanted: recall targets and their thresholds.
    """
    hits, chosen, active = [0] * len(wanted), [0] * len(wanted), 0
    for piece in in_pieces(ids):
        piece_scores, y = scores(inputs[piece]), bits(fired, piece, neurons)
        active += int(np.count_nonzero(y))
        for index, (_, threshold) in enumerate(wanted):
            selected = piece_scores > np.float32(threshold)
            chosen[index] += int(np.count_nonzero(selected))
            hits[index] += int(np.count_nonzero(selected & y))
    values = len(ids) * neurons
    return tuple(
        LayerPoint(
            recall=recall,
            threshold=threshold,
            false_negatives=(active - hit) / max(1, active),
            false_positives=(number - hit) / max(1, values - active),
            precision=hit / number if number else 1.0,
            selected=number / max(1, values),
            active=active / max(1, values),
        )
        for (recall, threshold), hit, number in zip(wanted, hits, chosen, strict=True)
    )


def _threshold(active: Float32, recall: float) -> float:
    """The highest threshold with the share `recall` of ascending scores above it; 0 if there are
    no scores.
    """
    if not len(active):
        return 0.0
    # A product such as 0.9 * 10 may be rounded to above 9; it must not ask for a tenth neuron.
    last = len(active) - ceil(recall * len(active) * (1 - 1e-12))
    return float(np.nextafter(active[last], np.float32(-np.inf)))


def _per_block(values: Bools, starts: NDArray[np.int64]) -> NDArray[Any]:
    """The number of true values of (M, F) in each block of samples."""
    return np.add.reduceat(np.count_nonzero(values, axis=1), starts)


def _standard_error(hits: NDArray[Any], firing: NDArray[Any]) -> float:
    """The standard error of the recall, sum(hits) / sum(firing), from hits and firing neurons per block."""
    blocks, total = len(firing), int(firing.sum())
    if blocks < 2 or not total:
        return 0.0
    apart = hits - firing * (hits.sum() / total)
    return sqrt(blocks / (blocks - 1) * float(np.square(apart).sum())) / total
