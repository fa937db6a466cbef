"""Low-rank predictors: their gradients, what they recover, and what their operating points promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ondevice.converters.training.predictors import arrays, fine_tune
from ondevice.converters.training.predictors.fine_tune import FineTuning, Parameters, gradients
from ondevice.converters.training.predictors.layer_predictor import (
    RECALLS,
    LayerPoint,
    LayerPredictor,
    PredictorTraining,
    active_count,
)
from ondevice.converters.training.predictors.low_rank import (
    calibrate,
    choose_rank,
    principal_components,
    split,
    train_layer,
)
from ondevice.errors import CheckpointError, UsageError
from tests.support.planted import CONFIG, NEURONS, NUMPY, RANK, SAMPLES, WIDTH, Planted, tuning


@pytest.fixture(scope="module")
def planted() -> Planted:
    return Planted()


@pytest.fixture(scope="module")
def noisy() -> Planted:
    return Planted(noise=0.15)


@pytest.fixture(scope="module")
def idle() -> Planted:
    return Planted(noise=0.15, idle=1.2)


def random_predictor(rank: int = 3, width: int = 5, neurons: int = 7) -> LayerPredictor:
    rng = np.random.default_rng(3)
    shapes = ((rank, width), (neurons, rank), (neurons,))
    # float64, so that differences are not of rounding errors.
    return LayerPredictor(*(rng.standard_normal(shape) for shape in shapes))


def parameters(predictor: LayerPredictor) -> Parameters:
    return predictor.down, predictor.up, predictor.bias


def loss(predictor: LayerPredictor, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """The definition: -log of the chance given to what happened."""
    scores = x @ predictor.down.T @ predictor.up.T + predictor.bias
    chance = 1 / (1 + np.exp(-scores))
    return float(-(weights * np.log(np.where(y, chance, 1 - chance))).sum() / len(x))


@pytest.mark.parametrize("field", ["down", "up", "bias"])
def test_gradients_are_finite_differences(field: str) -> None:
    rng = np.random.default_rng(4)
    predictor, x = random_predictor(), rng.standard_normal((11, 5))
    y, weights = rng.random((11, 7)) < 0.3, rng.uniform(0.5, 5, (11, 7))
    slopes = gradients(NUMPY, parameters(predictor), x, y, weights)
    found = dict(zip(("down", "up", "bias"), slopes, strict=True))[field]
    values, step = getattr(predictor, field), 1e-5
    assert found.shape == values.shape
    for index in np.ndindex(values.shape):
        nudge = np.zeros_like(values)
        nudge[index] = step
        above, below = (
            loss(replace(predictor, **{field: values + sign * nudge}), x, y, weights) for sign in (1, -1)
        )
        assert found[index] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-8)


def test_gradients_of_certain_scores_are_finite() -> None:
    predictor = replace(random_predictor(), bias=np.array([1e4, -1e4, 0, 90, -90, 1e30, -1e30]))
    x, y = np.zeros((2, 5)), np.array([[True] * 7, [False] * 7])
    _, _, bias = gradients(NUMPY, parameters(predictor), x, y, np.ones((2, 7)))
    assert bias == pytest.approx([0.5 * (2 * p - 1) for p in (1, 0, 0.5, 1, 0, 1, 0)])


def test_principal_components_are_the_best_map_of_their_rank(noisy: Planted) -> None:
    ids = np.arange(0, SAMPLES, 2)
    x = noisy.inputs[ids].astype(np.float32)
    _, found = principal_components(noisy.inputs, ids, noisy.gate, [2, RANK], np.random.default_rng(0), NUMPY)
    gates = x @ noisy.gate.T
    centred = gates - gates.mean(axis=0)
    u, s, v = np.linalg.svd(centred, full_matrices=False)
    best = u[:, :RANK] * s[:RANK] @ v[:RANK]
    deviation = np.sqrt(np.square(centred - best).mean(axis=0))
    scores = found.scores(x) * deviation / 1.702
    assert np.square(scores - gates).mean() == pytest.approx(np.square(centred - best).mean(), rel=0.01)
    assert np.abs(scores - best - gates.mean(axis=0)).max() < 0.05 * gates.std()


def test_a_planted_rule_is_recovered(planted: Planted) -> None:
    assert 0.08 < planted.fired.mean() < 0.14
    predictor = planted.train()
    selected = predictor.scores(planted.fresh) > 0
    hits = (selected & planted.fresh_fired).sum()
    assert hits / planted.fresh_fired.sum() > 0.96
    assert hits / selected.sum() > 0.95
    assert predictor.point(0.99).precision > 0.95


def test_fine_tuning_spends_the_rank_on_what_fires(idle: Planted) -> None:
    """Principal components spend half of it on gates that are far below zero whatever they are."""
    plain, tuned = (idle.train(config=replace(CONFIG, epochs=epochs)) for epochs in (0, 8))
    for recall in (0.9, 0.97):
        assert tuned.point(recall).precision > 1.2 * plain.point(recall).precision


@pytest.mark.slow
def test_weighing_magnitudes_misses_less_of_what_counts(noisy: Planted) -> None:
    gates = np.maximum(noisy.fresh.astype(np.float32) @ noisy.gate.T, 0)
    missed = []
    for weigh in (False, True):
        scores = noisy.train(4, replace(CONFIG, weigh_magnitude=weigh)).scores(noisy.fresh)
        as_many = np.sort(scores, axis=None)[-2 * noisy.fresh_fired.sum()]
        missed.append(np.square(gates[scores < as_many]).sum())
    assert missed[1] < missed[0]


def missed(predictor: LayerPredictor, data: Planted, ids: np.ndarray, threshold: float = 0.0) -> float:
    """Of what fires for the samples `ids`, the share with a score that isn't above the threshold."""
    return float((predictor.scores(data.inputs[ids]) <= threshold)[data.fired[ids]].mean())


def test_the_recall_target_is_met_with_a_margin_and_measured_elsewhere(noisy: Planted) -> None:
    for recall in RECALLS:
        config = replace(CONFIG, epochs=1, recall=recall)
        predictor = noisy.train(4, config)
        _, held = split(SAMPLES, config)
        assert predictor.point(recall).threshold == 0.0
        assert [point.recall for point in predictor.points] == list(RECALLS)
        for point in predictor.points:
            measured = missed(predictor, noisy, held.measuring, point.threshold)
            assert point.false_negatives == pytest.approx(measured, abs=1e-9)
            assert missed(predictor, noisy, held.calibrating, point.threshold) < 1 - point.recall
        thresholds = [point.threshold for point in predictor.points]
        assert thresholds == sorted(thresholds, reverse=True)
        # Eight small blocks are few for the promise of `thresholds`; this is near it.
        assert (predictor.scores(noisy.fresh) <= 0)[noisy.fresh_fired].mean() < 1.5 * (1 - recall)


def test_what_measures_sets_no_threshold(noisy: Planted) -> None:
    """Where it is harder than what calibrates, rates say so."""
    predictor = noisy.train(4, replace(CONFIG, epochs=0))
    _, held = split(SAMPLES, CONFIG)
    shuffled = noisy.inputs.copy()
    shuffled[held.measuring] = np.random.default_rng(2).permutation(shuffled[held.measuring])
    usual, harder = (
        calibrate(predictor, inputs, noisy.fired, held, 0.95) for inputs in (noisy.inputs, shuffled)
    )
    assert harder.bias.tobytes() == usual.bias.tobytes()
    for one, other in zip(usual.points, harder.points, strict=True):
        assert one.threshold == other.threshold
        assert one.false_negatives < 0.11
        assert other.false_negatives > 2 * (1 - other.recall)
    shuffled = noisy.inputs.copy()
    shuffled[held.calibrating] = np.random.default_rng(2).permutation(shuffled[held.calibrating])
    warned = calibrate(predictor, shuffled, noisy.fired, held, 0.95)
    assert warned.point(0.95).false_negatives < 0.5 * usual.point(0.95).false_negatives


def test_rounded_weights_can_be_calibrated_again(noisy: Planted) -> None:
    config = replace(CONFIG, epochs=1)
    _, held = split(SAMPLES, config)
    predictor = noisy.train(4, config)
    rough = replace(predictor, up=np.round(predictor.up, 0), bias=predictor.bias + 3)
    again = calibrate(rough, noisy.inputs, noisy.fired, held, 0.97)
    assert missed(rough, noisy, held.calibrating) < 0.002
    assert 0.01 < missed(again, noisy, held.calibrating) < 0.03
    assert again.point(0.97).false_negatives == pytest.approx(missed(again, noisy, held.measuring), abs=1e-9)
    assert again.point(0.97).precision < predictor.point(0.97).precision


def test_equal_seeds_give_equal_predictors(planted: Planted) -> None:
    config = replace(CONFIG, epochs=1)
    first, second, other = (planted.train(config=config, seed=seed) for seed in (1, 1, 2))
    for field in ("down", "up", "bias"):
        assert getattr(first, field).tobytes() == getattr(second, field).tobytes()
        assert getattr(first, field).dtype == np.float32
    assert first.points == second.points
    assert first.down.tobytes() != other.down.tobytes()


def test_nothing_that_one_rank_learns_reaches_another(noisy: Planted) -> None:
    """They share minibatches and weights, whoever else is trained, and whoever has been given up."""
    together, others = tuning(noisy, [2, RANK]), tuning(noisy, [4, RANK])
    for _ in range(2):
        together.epoch()
        others.epoch()
        assert together.predictors[-1].up.tobytes() == others.predictors[-1].up.tobytes()
        together.keep(RANK)
    assert [predictor.rank for predictor in together.predictors] == [RANK]
    assert [predictor.rank for predictor in others.predictors] == [4, RANK]


def test_the_rank_is_chosen_on_trial_and_trained_to_the_end(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[list[int]] = []

    def epoch(self: FineTuning, once: Callable[[FineTuning], None] = FineTuning.epoch) -> None:
        moved.append([predictor.rank for predictor in self.predictors])
        once(self)

    monkeypatch.setattr(FineTuning, "epoch", epoch)
    rng, data = np.random.default_rng(1), (planted.inputs, planted.fired, planted.gate)
    predictor = train_layer(*data, [12, 2, RANK], CONFIG, rng, NUMPY)
    assert predictor.rank == RANK
    trial = CONFIG.trial_epochs
    assert moved == trial * [[2, RANK, 12]] + (CONFIG.epochs - trial) * [[RANK]]
    short = train_layer(*data, [12, 2, RANK], replace(CONFIG, epochs=2), np.random.default_rng(1), NUMPY)
    assert short.rank == RANK
    assert predictor.point(0.99).precision > short.point(0.99).precision
    assert predictor.point(0.99).precision > 0.95


def test_what_fires_weighs_as_its_gate(noisy: Planted) -> None:
    ids = split(SAMPLES, CONFIG)[0]
    gates = np.maximum(noisy.inputs.astype(np.float32) @ noisy.gate.T, 0)
    active = int(noisy.fired[ids].sum())
    found = fine_tune._Magnitudes(noisy.inputs, noisy.fired, noisy.gate, ids, active, NUMPY)
    batch = np.random.default_rng(3).permutation(ids)[:50]
    first = ids[:512]
    unit = gates[first][noisy.fired[first]].mean()
    expected = np.minimum(gates[batch][noisy.fired[batch]] / unit, 4)
    np.testing.assert_allclose(found.of(batch), expected, atol=4 / 255 / 2 + 1e-5)


def test_blocks_of_samples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    predictor, x = random_predictor(), rng.standard_normal((11, 5))
    y, weights = rng.random((11, 7)) < 0.3, rng.uniform(0.5, 5, (11, 7))
    given = parameters(predictor), x, y, weights
    whole = gradients(NUMPY, *given)
    monkeypatch.setattr(arrays, "BLOCK_VALUES", 15)
    for expected, found in zip(whole, gradients(NUMPY, *given), strict=True):
        assert found.tobytes() == expected.tobytes()


def test_packed_bits_and_mapped_files_are_the_same_samples(planted: Planted, tmp_path: Path) -> None:
    config = replace(CONFIG, epochs=1)
    np.save(tmp_path / "inputs.npy", planted.inputs)
    np.save(tmp_path / "fired.npy", np.packbits(planted.fired, axis=1))
    inputs, fired = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("inputs", "fired"))
    mapped = train_layer(inputs, fired, planted.gate, [RANK], config, np.random.default_rng(1), NUMPY)
    assert mapped.up.tobytes() == planted.train(config=config).up.tobytes()
    ids = np.arange(10)
    assert active_count(fired, ids, NEURONS) == planted.fired[:10].sum()


@pytest.mark.parametrize("samples", [160, 999, 3000, 90_000])
def test_held_back_samples_are_a_bounded_share_and_not_trained_on(samples: int) -> None:
    trained, held = split(samples, CONFIG)
    assert sorted([*trained, *held.calibrating, *held.measuring]) == list(range(samples))
    count = len(held.calibrating) + len(held.measuring)
    assert 0 < count <= min(4096 + 128, 0.15 * samples)
    assert count >= 0.04 * samples
    assert 0.3 < len(held.calibrating) / count < 0.7


def test_blocks_are_held_back_whole_and_from_every_place_of_a_piece() -> None:
    """One in exactly ten would be, of pieces of four, always the second or the fourth."""
    _, held = split(40_000, CONFIG)
    for ids in (held.calibrating, held.measuring):
        starts = ids[:: held.block]
        assert (ids == np.add.outer(starts, np.arange(held.block)).reshape(-1)).all()
        assert (np.diff(starts) > held.block).all()
        assert set(starts // held.block % 4) == {0, 1, 2, 3}


@pytest.mark.parametrize("fires", [False, True])
def test_where_all_is_equal_there_is_nothing_to_learn(planted: Planted, fires: bool) -> None:
    fired = np.full(planted.fired.shape, fires)
    predictor = train_layer(planted.inputs, fired, planted.gate, [4], CONFIG, np.random.default_rng(0), NUMPY)
    assert ((predictor.scores(planted.fresh) > 0) == fires).all()
    assert {point.false_negatives for point in predictor.points} == {0.0}
    assert {point.precision for point in predictor.points} == {1.0}


def test_inputs_without_variance_and_what_the_gate_does_not_explain(planted: Planted) -> None:
    fired = np.random.default_rng(0).random(planted.fired.shape) < 0.1
    for inputs in (np.zeros_like(planted.inputs), np.ones_like(planted.inputs), -planted.inputs):
        predictor = train_layer(inputs, fired, planted.gate, [4], CONFIG, np.random.default_rng(0), NUMPY)
        ids = split(SAMPLES, CONFIG)[1].calibrating
        assert np.isfinite(predictor.scores(inputs)).all()
        assert (predictor.scores(inputs[ids]) > 0)[fired[ids]].mean() >= 0.97


@pytest.mark.parametrize("where", ["trained", "held back", "gate"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(planted: Planted, where: str, bad: float) -> None:
    trained, held = split(SAMPLES, CONFIG)
    ids = trained if where == "trained" else held.measuring
    inputs, gate = planted.inputs.copy(), planted.gate.copy()
    if where == "gate":
        gate[3, 4] = bad
    else:
        inputs[ids[-1], 5] = bad
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        train_layer(inputs, planted.fired, gate, [4], CONFIG, np.random.default_rng(0), NUMPY)


def test_what_does_not_fit_is_refused(planted: Planted) -> None:
    rng, (x, y, gate) = np.random.default_rng(0), (planted.inputs, planted.fired, planted.gate)
    for inputs, fired, ranks, message in (
        (x[:-1], y, [4], "don't fit"),
        (x[:, :-1], y, [4], "don't fit"),
        (x, y[:, :-1], [4], "don't fit"),
        (x, np.packbits(y, axis=1)[:, 1:], [4], "don't fit"),
        (x, y.astype(np.float32)[:, :9], [4], "booleans"),
        (x, y, [], r"ranks \[\]"),
        (x, y, [4, 0], r"ranks \[4, 0\]"),
        (x, y, [WIDTH + 1, 4], r"ranks \[25, 4\]"),
        (x[:159], y[:159], [4], "give it 160"),
    ):
        with pytest.raises(UsageError, match=message):
            train_layer(inputs, fired, gate, ranks, CONFIG, rng, NUMPY)


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": -1},
        {"trial_epochs": 0},
        {"batch_samples": 0},
        {"learning_rate": float("nan")},
        {"balance": 1.5},
        {"held_back": 0.0},
        {"recall": 0.93},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        PredictorTraining(**options)


def candidate(rank: int, selected: float, missed: float = 0.03) -> LayerPredictor:
    point = LayerPoint(0.97, 0.0, missed, 0.1, 0.5, selected, active=0.1)
    return replace(random_predictor(rank), points=(point,))


def test_the_smallest_rank_that_selects_little_more_is_chosen() -> None:
    candidates = [candidate(192, 0.20), candidate(64, 0.30), candidate(128, 0.22)]
    assert choose_rank(candidates, 0.97).rank == 128
    assert choose_rank(candidates, 0.97, factor=1.0).rank == 192
    assert choose_rank(candidates, 0.97, factor=2.0).rank == 64
    assert choose_rank([candidate(64, 0.1, missed=0.2), candidate(128, 0.3)], 0.97).rank == 128
    # Samples on which even the largest misses too much say nothing against the others.
    hard = [candidate(64, 0.1, missed=0.031), candidate(128, 0.1, missed=0.032)]
    assert choose_rank(hard, 0.97).rank == 64
    with pytest.raises(UsageError, match="no operating point"):
        choose_rank(candidates, 0.9)
    with pytest.raises(UsageError, match="at least one"):
        choose_rank([], 0.97)
