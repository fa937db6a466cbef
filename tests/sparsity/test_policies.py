"""Cache policies: each against its definition, told slowly in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.sparsity.policies import (
    FAST_DECAY,
    FREQUENCY_DECAY,
    GATE_WEIGHT,
    POLICIES,
    SLOW_DECAY,
    PolicyName,
    fires,
    make_policy,
    selected,
)

NEURONS = 50


def gates_of(tokens: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((tokens, NEURONS)).astype(np.float32) - np.float32(1)


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_seen_together_or_alone_score_the_same(name: PolicyName) -> None:
    gates, together, alone = (
        gates_of(40),
        make_policy(name, (NEURONS,) * 2),
        make_policy(name, (NEURONS,) * 2),
    )
    together.observe(1, gates[:33])
    together.observe(1, gates[33:])
    for row in gates:
        alone.observe(1, row[None])
    np.testing.assert_allclose(together.scores(1), alone.scores(1), rtol=1e-4, atol=1e-6)
    # Layers don't see each other.
    untouched = make_policy(name, (NEURONS,) * 2)
    np.testing.assert_array_equal(together.scores(0), untouched.scores(0))


def test_lru_orders_neurons_by_their_last_use() -> None:
    gates, policy = gates_of(30), make_policy("lru", (NEURONS,))
    policy.observe(0, gates)
    last = [max((t for t in range(30) if gates[t, n] > 0), default=-1) for n in range(NEURONS)]
    order = np.argsort(policy.scores(0), kind="stable")
    assert [last[n] for n in order] == sorted(last)


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("neurons", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_what_any_token_wants_is_selected(tokens: int, neurons: int, density: float) -> None:
    random = np.random.default_rng(neurons)
    scores = random.random((tokens, neurons), dtype=np.float32) + np.float32(1e-6)
    scores[random.random(scores.shape) >= density] *= -1
    scores[0, neurons // 2] = np.nan
    scores[-1, 0] = 0
    ids = selected(scores)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.flatnonzero((~(scores <= 0)).any(axis=0)))


@pytest.mark.parametrize("slots", [1, 40, 61, 75, 97, 98, 99, 100, 101])
def test_the_window_is_the_longest_that_fits(slots: int) -> None:
    gates, policy = [gates_of(60), gates_of(60, seed=1)], make_policy("window", (NEURONS,) * 2)
    policy.fit(slots)
    for layer in range(2):
        policy.observe(layer, gates[layer])
        # Before it is fitted, there is no window.
        ever = (gates[layer] > 0).any(axis=0)
        np.testing.assert_array_equal(np.isfinite(policy.scores(layer)), ever)
    policy.fit(slots)

    def used(tokens: int) -> list[np.ndarray]:
        return [(of[60 - tokens :] > 0).any(axis=0) for of in gates]

    longest = max(k for k in range(61) if k <= 1 or np.sum(used(k)) <= slots)
    for layer in range(2):
        np.testing.assert_array_equal(np.isfinite(policy.scores(layer)), used(longest)[layer])


def test_frequency_is_a_decayed_count_of_uses() -> None:
    gates, policy = gates_of(25), make_policy("frequency", (NEURONS,))
    policy.observe(0, gates)
    expected = [
        (1 - FREQUENCY_DECAY) * sum(FREQUENCY_DECAY ** (24 - t) for t in range(25) if gates[t, n] > 0)
        for n in range(NEURONS)
    ]
    np.testing.assert_allclose(policy.scores(0), expected, rtol=1e-5, atol=1e-7)


def test_the_gate_score_adds_near_misses_to_the_decayed_count() -> None:
    gates, policy = gates_of(25), make_policy("gate", (NEURONS,))
    policy.observe(0, gates)
    fired, near = np.zeros(NEURONS), np.zeros(NEURONS)
    for row in gates.astype(float):
        fired = SLOW_DECAY * fired + (1 - SLOW_DECAY) * (row > 0)
        scaled = row / np.sqrt((row * row).mean())
        near = FAST_DECAY * near + (1 - FAST_DECAY) * np.minimum(np.maximum(0.5 + scaled, 0), 1)
    np.testing.assert_allclose(policy.scores(0), fired + GATE_WEIGHT * near, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_what_is_no_number_counts_as_fired_and_spoils_no_score(name: PolicyName, value: float) -> None:
    gates, policy = gates_of(3), make_policy(name, (NEURONS,))
    gates[1, 4] = value
    assert fires(gates)[1, 4] == (not value <= 0)
    policy.observe(0, gates)
    policy.observe(0, np.zeros((1, NEURONS), np.float32))
    policy.observe(0, gates_of(2, seed=1))
    assert not np.isnan(policy.scores(0)).any()


@pytest.mark.parametrize("name", ["gate", "frequency"])
def test_policies_that_count_begin_with_what_is_known(name: PolicyName) -> None:
    frequencies = np.random.default_rng(2).random((2, NEURONS), dtype=np.float32)
    policy = make_policy(name, (NEURONS,) * 2, frequencies)
    np.testing.assert_array_equal(policy.scores(1), frequencies[1])
    before = frequencies.copy()
    policy.observe(1, gates_of(5))
    assert (policy.scores(1) != frequencies[1]).all()
    np.testing.assert_array_equal(frequencies, before)
    with pytest.raises(ValueError, match=r"\[50, 50\]"):
        make_policy(name, (NEURONS,) * 3, frequencies)
