"""Which experts a router chooses, and their weights, against plain descriptions in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.backends.routing import FEW, exp, native_route, route, sigmoid
from ondevice.model_config import ExpertsSpec

SPECS = {
    "softmax": ExpertsSpec(16, 4, 8),
    "renormalised": ExpertsSpec(16, 4, 8, renormalised=True, factor=2.5),
    "sigmoid": ExpertsSpec(16, 4, 8, "sigmoid", renormalised=True, choice_bias=True),
    "groups": ExpertsSpec(16, 4, 8, "sigmoid", choice_bias=True, groups=4, chosen_groups=2, factor=1.5),
    "groups of one": ExpertsSpec(16, 4, 8, groups=4, chosen_groups=2, factor=1.5, group_best=1),
    "sparsemixer": ExpertsSpec(16, 2, 8, "sparsemixer", jitter=0.05),
}


def logits(tokens: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((tokens, 16)).astype(np.float32)


def bias_of(spec: ExpertsSpec) -> Float32 | None:
    return logits(1, 7)[0] if spec.choice_bias else None


def best_groups(groups: NDArray[np.float64], spec: ExpertsSpec) -> list[int]:
    """By what their best scores are together."""
    worth = np.sort(groups, axis=1)[:, -spec.group_best :].sum(axis=1)
    return sorted(range(spec.groups), key=lambda group: -worth[group])[: spec.chosen_groups]


def described(row: Float32, spec: ExpertsSpec, bias: Float32 | None) -> dict[int, float]:
    """The weights of one token's experts."""
    wide = row.astype(np.float64)
    if spec.scoring == "sparsemixer":
        found: dict[int, float] = {}
        for _ in range(2):
            left = [e for e in range(16) if e not in found]
            best = max(left, key=lambda e: wide[e])
            near = [
                e for e in left if (wide[best] - wide[e]) / max(abs(wide[e]), wide[best]) <= 2 * spec.jitter
            ]
            found[best] = 1 / sum(np.exp(wide[e] - wide[best]) for e in near)
        return found
    scores = np.exp(wide) / np.exp(wide).sum() if spec.scoring == "softmax" else 1 / (1 + np.exp(-wide))
    choice = scores + (0 if bias is None else bias)
    size = 16 // spec.groups
    groups = choice.reshape(spec.groups, size)
    good = best_groups(groups, spec)
    among = [e for e in range(16) if e // size in good]
    chosen = sorted(among, key=lambda e: -choice[e])[: spec.chosen]
    total = sum(scores[e] for e in chosen) if spec.renormalised else 1.0
    return {e: spec.factor * scores[e] / total for e in chosen}


@pytest.mark.parametrize("name", SPECS)
def test_experts_and_weights_are_those_described(name: str) -> None:
    spec, rows = SPECS[name], logits(200)
    found = route(rows, spec, bias_of(spec))
    for row, ids, weights in zip(rows, found.ids, found.weights, strict=True):
        wanted = described(row, spec, bias_of(spec))
        assert ids.tolist() == sorted(wanted)
        np.testing.assert_allclose(weights, [wanted[e] for e in sorted(wanted)], rtol=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_a_row_has_the_same_bits_beside_any_others(name: str) -> None:
    spec, rows = SPECS[name], logits(33)
    together = route(rows, spec, bias_of(spec))
    for at in range(len(rows)):
        alone = route(rows[at : at + 1], spec, bias_of(spec))
        assert alone.ids.tobytes() == together.ids[at].tobytes()
        assert alone.weights.tobytes() == together.weights[at].tobytes()


@pytest.mark.parametrize("name", SPECS)
def test_of_equal_scores_the_lower_number_is_chosen(name: str) -> None:
    spec = SPECS[name]
    found = route(np.zeros((2, 16), np.float32), spec, None if bias_of(spec) is None else np.zeros(16))
    assert found.ids.tolist() == [list(range(spec.chosen))] * 2


@pytest.mark.parametrize("name", SPECS)
def test_native_routing_has_the_same_bits(name: str) -> None:
    spec, rows = SPECS[name], np.concatenate([logits(300) * size for size in (0.01, 1, 30, 300)])
    # Equal scores, and scores so low that their exponentials vanish.
    rows = np.concatenate(
        [rows, np.zeros((1, 16), np.float32), np.round(logits(100, 3)), 1e4 * logits(50, 4)]
    )
    rows[0, 5] = -np.inf
    scales = np.abs(logits(1, 9)[0]) if name == "softmax" else None
    told = route(rows, spec, bias_of(spec), scales)
    found = native_route(rows, spec, bias_of(spec), scales)
    np.testing.assert_array_equal(found.ids, told.ids)
    assert found.weights.tobytes() == told.weights.tobytes()


@pytest.mark.parametrize("name", SPECS)
def test_native_routing_of_what_is_not_finite_gives_experts_that_exist(name: str) -> None:
    rows = logits(6)
    rows[0], rows[1, 3], rows[2, :] = np.nan, np.inf, -np.inf
    found = native_route(rows, SPECS[name], bias_of(SPECS[name]))
    assert ((found.ids >= 0) & (found.ids < 16)).all()
    assert not np.isfinite(found.weights[0]).all()


def test_gates_are_above_zero_for_the_chosen_alone() -> None:
    found = route(logits(20), SPECS["softmax"])
    for gates, ids in zip(found.gates, found.ids, strict=True):
        assert np.flatnonzero(gates > 0).tolist() == ids.tolist()


def test_every_row_of_an_expert_is_named_once() -> None:
    found = route(logits(50), SPECS["softmax"])
    pairs = {(row, e) for e in found.experts.tolist() for row in found.rows_of(e)[0].tolist()}
    assert len(pairs) == 50 * 4
    assert all(
        weights.shape == (len(rows), 1) for rows, weights in map(found.rows_of, found.experts.tolist())
    )


@pytest.mark.parametrize("name", SPECS)
def test_values_that_are_not_finite_give_experts_that_exist(name: str) -> None:
    rows = logits(6)
    rows[0], rows[1, 3], rows[2, :] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        found = route(rows, SPECS[name], bias_of(SPECS[name]))
    assert ((found.ids >= 0) & (found.ids < 16)).all()
    assert not np.isfinite(found.weights[0]).all()


def test_exp_and_sigmoid_are_near_the_libraries() -> None:
    x = np.linspace(-700, 700, 20001)
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=1e-14)
    y = np.linspace(-80, 80, 2001).astype(np.float32)
    np.testing.assert_allclose(sigmoid(y), 1 / (1 + np.exp(-y.astype(np.float64))), rtol=2e-7)
    assert sigmoid(np.array([[-1e30, 1e30]], np.float32)).tolist() == [[0.0, 1.0]]


def test_few_sigmoids_have_the_bits_of_many() -> None:
    random = np.random.default_rng(8)
    values = np.concatenate([
        random.normal(0, 3, 4000), random.uniform(-800, 800, 4000), random.normal(0, 1e-5, 200),
        [0.0, -0.0, np.inf, -np.inf, np.nan, 700.0, -700.0, 88.7, -103.9, 1e-40, -1e-40],
    ]).astype(np.float32)  # fmt: skip
    together = sigmoid(values)
    for size in (1, FEW):
        pieces = [sigmoid(values[at : at + size]) for at in range(0, len(values), size)]
        assert np.concatenate(pieces).tobytes() == together.tobytes()
    assert sigmoid(values[:6].reshape(3, 2)).shape == (3, 2)
