"""Thresholds of predictors' scores: what they promise elsewhere, and how they are measured."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.converters.training.predictors import operating_points
from ondevice.converters.training.predictors.layer_predictor import RECALLS
from ondevice.converters.training.predictors.operating_points import measure, thresholds
from ondevice.errors import UsageError

NEURONS, BLOCK, BLOCKS = 6, 16, 40


def drawn(rng: np.random.Generator, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores (M, F) and what fired, of blocks in which some find less than others."""
    fired = rng.random((blocks * BLOCK, NEURONS)) < 0.3
    scores = rng.standard_normal(fired.shape) + 2 * fired
    harder = rng.standard_normal((blocks, 1, 1)) * np.ones((1, BLOCK, 1))
    return (scores + harder.reshape(-1, 1)).astype(np.float32), fired


def met(recall: float, block: int) -> float:
    """How often a threshold of few blocks finds so much of what fires in very many."""
    rng = np.random.default_rng(7)
    scores, fired = drawn(rng, 2000)
    active = np.sort(scores[fired])
    found = [thresholds(*drawn(rng, BLOCKS), block, [recall])[0] for _ in range(200)]
    reached = 1 - np.searchsorted(active, np.array(found, np.float32), side="right") / len(active)
    return float((reached >= recall).mean())


@pytest.mark.parametrize("recall", [0.9, 0.97])
def test_a_target_is_met_on_other_samples(recall: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 97.7 % of all cases if recall were normal; not without a margin, nor if tokens had no neighbours."""
    assert met(recall, BLOCK) > 0.93
    assert met(recall, 1) < 0.91
    monkeypatch.setattr(operating_points, "MARGIN", 0.0)
    assert 0.3 < met(recall, BLOCK) < 0.7


def test_the_margin_is_two_standard_errors_of_blocks() -> None:
    scores, fired = drawn(np.random.default_rng(3), BLOCKS)
    (plain,) = thresholds(scores, fired, len(scores), [0.9])
    (careful,) = thresholds(scores, fired, BLOCK, [0.9])
    hits = (fired & (scores > plain)).reshape(BLOCKS, -1).sum(axis=1)
    firing = fired.reshape(BLOCKS, -1).sum(axis=1)
    rng = np.random.default_rng(4)
    picks = rng.integers(BLOCKS, size=(4000, BLOCKS))
    error = (hits[picks].sum(axis=1) / firing[picks].sum(axis=1)).std()
    assert (scores > careful)[fired].mean() - 0.9 == pytest.approx(2 * error, rel=0.1)


def test_thresholds_and_rates_are_those_of_brute_force() -> None:
    rng = np.random.default_rng(5)
    fired = rng.random((40, 30)) < 0.2
    # Few values, so that many scores are equal.
    scores = np.round(rng.standard_normal(fired.shape) + 2 * fired, 1).astype(np.float32)
    recalls = (0.5, *RECALLS, 1.0)
    # One block has no margin.
    wanted = list(zip(recalls, thresholds(scores, fired, 40, recalls), strict=True))
    ids = np.arange(1, 40, 2)
    points = measure(lambda x: scores[x[:, 0]], np.arange(40)[:, None], fired, ids, 30, wanted)
    for point, (recall, threshold) in zip(points, wanted, strict=True):
        meeting = [t for t in np.unique(scores) if (scores >= t)[fired].mean() >= recall - 1e-12]
        assert np.array_equal(scores > np.float32(threshold), scores >= max(meeting))
        selected, y = (scores >= max(meeting))[ids], fired[ids]
        assert (point.recall, point.threshold) == (recall, threshold)
        assert point.false_negatives == pytest.approx(1 - selected[y].mean())
        assert point.false_positives == pytest.approx(selected[~y].mean())
        assert point.precision == pytest.approx(y[selected].mean())
        assert point.selected == pytest.approx(selected.mean())
        assert point.over_prediction == pytest.approx(selected.sum() / y.sum())


def test_a_recall_that_comes_out_even_takes_no_neuron_more() -> None:
    scores = np.arange(10, dtype=np.float32)[None]
    (threshold,) = thresholds(scores, np.ones((1, 10), dtype=bool), 1, [0.9])
    assert (scores > threshold).sum() == 9


def test_thresholds_fall_as_targets_rise_however_few_the_blocks() -> None:
    """Of few blocks, the error may fall faster from target to target than what is missed."""
    for seed in range(50):
        found = thresholds(*drawn(np.random.default_rng(seed), 6), BLOCK)
        assert list(found) == sorted(found, reverse=True)


@pytest.mark.parametrize("bad", ["shape", "nan", "recall"])
def test_what_has_no_threshold_is_refused(bad: str) -> None:
    scores, fired = np.zeros((2, 3), dtype=np.float32), np.ones((2, 3), dtype=bool)
    if bad == "nan":
        scores[0, 0] = np.nan
    with pytest.raises(UsageError, match="NaN" if bad != "recall" else "must lie in"):
        thresholds(scores, fired[:1] if bad == "shape" else fired, 1, [0.0 if bad == "recall" else 0.9])
