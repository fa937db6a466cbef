"""Thresholds of a predictor's scores that find a share of what fires, and what they do on other samples.

A threshold that finds just the target's share of what fires where it is set finds less elsewhere about
every other time. So it is set where a lower confidence bound of recall reaches the target, as for
risk-controlling prediction sets (arXiv 2101.02703, with the bound of the central limit theorem): MARGIN
standard errors below the recall found. Neighbouring tokens are alike, and a token's neurons fire together:
the standard error is that of a ratio over a sample of whole blocks of tokens (Cochran, Sampling Techniques,
3rd edition, 1977, chapter 6).

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
    OperatingPoint,
    Samples,
    bits,
    in_pieces,
)
from ondevice.errors import UsageError

MARGIN = 2.0
"""Standard errors between recall where a threshold is set and the target: 97.7 % of a normal distribution."""

Scores = Callable[[Samples], Float32]
"""(B, F) of inputs (B, D)."""


@dataclass(frozen=True)
class HeldBack:
    """Ascending ids of samples that weren't trained on, some to set thresholds and others to measure them.

    block: of the samples that calibrate, so many neighbours after each other are one block.
    """

    calibrating: Ids
    measuring: Ids
    block: int


def thresholds(
    scores: Float32, fired: Bools, block: int, recalls: Sequence[float] = RECALLS
) -> tuple[float, ...]:
    """For each recall target the threshold above which scores find that share of what fires elsewhere too.

    scores, fired: (M, F), of samples that the predictor wasn't trained on, in blocks of `block` after each
    other; recalls: ascending. Promised, if blocks are drawn at random and many enough for their recall to be
    normal: samples drawn from the same text miss no more than 1 - target in 97.7 % of all cases, for each
    layer and target. Nothing is promised for text of another kind. One block has no error that can be known,
    and gets no margin.

    Raises UsageError for shapes that differ, scores that are NaN, or recalls outside (0, 1].
    """
    if scores.shape != fired.shape or np.isnan(scores).any():
        raise UsageError(f"scores {scores.shape} of what fired {fired.shape} differ in shape or hold NaN")
    if not all(0 < recall <= 1 for recall in recalls):
        raise UsageError(f"recall targets {list(recalls)} must lie in (0, 1]")
    active = np.sort(scores[fired])
    starts = np.arange(0, len(scores), block)
    firing = _per_block(fired, starts)
    found: list[float] = []
    asked = 0.0
    for recall in recalls:
        hits = _per_block((scores > np.float32(_threshold(active, recall))) & fired, starts)
        # Where the error falls faster than the target rises, thresholds must still not.
        asked = max(asked, recall + MARGIN * _standard_error(hits, firing))
        found.append(_threshold(active, min(1.0, asked)))
    return tuple(found)


def measure(
    scores: Scores,
    inputs: Samples,
    fired: Fired,
    ids: Ids,
    neurons: int,
    wanted: Sequence[tuple[float, float]],
) -> tuple[OperatingPoint, ...]:
    """What selecting the scores above thresholds finds of what fired, for the samples `ids`, in pieces.

    wanted: recall targets and their thresholds.
    """
    hits, chosen, active = [0] * len(wanted), [0] * len(wanted), 0
    for piece in in_pieces(ids):
        found, y = scores(inputs[piece]), bits(fired, piece, neurons)
        active += int(np.count_nonzero(y))
        for index, (_, threshold) in enumerate(wanted):
            selected = found > np.float32(threshold)
            chosen[index] += int(np.count_nonzero(selected))
            hits[index] += int(np.count_nonzero(selected & y))
    values = len(ids) * neurons
    return tuple(
        OperatingPoint(
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
    """The highest above which lie so many of the ascending scores; 0 of none."""
    if not len(active):
        return 0.0
    # A product such as 0.9 * 10 may come out above 9, and must not ask for a tenth neuron.
    last = len(active) - ceil(recall * len(active) * (1 - 1e-12))
    return float(np.nextafter(active[last], np.float32(-np.inf)))


def _per_block(values: Bools, starts: NDArray[np.int64]) -> NDArray[Any]:
    """How many of (M, F) are true in each block."""
    return np.add.reduceat(np.count_nonzero(values, axis=1), starts)


def _standard_error(hits: NDArray[Any], firing: NDArray[Any]) -> float:
    """Of the ratio of their sums: recall of blocks of which `hits` of `firing` were found."""
    blocks, total = len(firing), int(firing.sum())
    if blocks < 2 or not total:
        return 0.0
    apart = hits - firing * (hits.sum() / total)
    return sqrt(blocks / (blocks - 1) * float(np.square(apart).sum())) / total
