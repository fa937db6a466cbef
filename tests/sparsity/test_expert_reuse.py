"""The experts' policy against its definition, told slowly, and the pooled cache that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from ondevice.backends.base import Float32, Int32
from ondevice.sparsity.expert_reuse import (
    AHEAD_WEIGHTS,
    FAST_DECAY,
    FAST_WEIGHT,
    REMEMBERED_TOKENS,
    SHARPNESS,
    SIMILAR_TOKENS,
    SLOW_DECAY,
    TOKEN_DECAY,
    ExpertReuse,
)
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import Recency, make_policy
from ondevice.sparsity.pooled_cache import PooledCache
from ondevice.sparsity.replay import hit_rate, run_through

LAYERS, EXPERTS, CHOSEN, SLOT_BYTES = 5, 16, 2, 64


def walk(tokens: int, seed: int = 0) -> Int32:
    """(T, L, k) choices of a text: words come by Zipf's law, and each has its experts in most layers."""
    random = np.random.default_rng(seed)
    # Some experts are hotter than others.
    heat = random.random((LAYERS, EXPERTS)) ** 3

    def drawn() -> list[Int32]:
        return [random.choice(EXPERTS, CHOSEN, replace=False, p=hot / hot.sum()) for hot in heat]

    words = [drawn() for _ in range(30)]
    often = 1 / np.arange(1, 31)
    text = random.choice(30, tokens, p=often / often.sum())
    rows = [
        [own if random.random() < 0.7 else other for own, other in zip(words[i], drawn(), strict=True)]
        for i in text
    ]
    return np.array(rows, dtype=np.int32)


def gates_of(chosen: Int32) -> Float32:
    """(L, T, E) gates of choices (T, L, k)."""
    gates = np.full((chosen.shape[1], len(chosen), EXPERTS), -1, np.float32)
    for token, rows in enumerate(chosen):
        for layer, ids in enumerate(rows):
            gates[layer, token, ids] = 1
    return gates


def learnt(chosen: Int32) -> ExpertReuse:
    policy, gates = ExpertReuse(LAYERS, EXPERTS, CHOSEN), gates_of(chosen)
    for token in range(len(chosen)):
        for layer in range(LAYERS):
            policy.observe(layer, gates[layer, token : token + 1])
    return policy


def told_slowly(chosen: Int32, layer: int) -> list[float]:
    """Scores of a layer after all of `chosen`, in which the layers behind it have no turn any more."""
    last = len(chosen) - 1
    fade = TOKEN_DECAY ** (1 / LAYERS)
    alike = {}
    for lag in range(1, min(last, REMEMBERED_TOKENS - 1) + 1):
        total = 0.0
        # What is four tokens old counts for nothing.
        for token in range(max(0, last - 4), last + 1):
            for at in range(LAYERS):
                behind = (last - token) * LAYERS + layer - at
                if token >= lag and behind >= 0:
                    shared = len({*chosen[token, at]} & {*chosen[token - lag, at]})
                    total += (1 - fade) * fade**behind * shared / CHOSEN
        alike[lag] = total
    best = sorted(alike, key=lambda lag: -alike[lag])[:SIMILAR_TOKENS]
    weights = {lag: math.exp(SHARPNESS * alike[lag]) for lag in best}
    scores = [0.0] * EXPERTS
    for token in range(last + 1):
        for expert in chosen[token, layer]:
            scores[expert] += (1 - SLOW_DECAY) * SLOW_DECAY ** (last - token)
            scores[expert] += FAST_WEIGHT * (1 - FAST_DECAY) * FAST_DECAY ** (last - token)
    for lag, weight in weights.items():
        for turn, ahead in enumerate(AHEAD_WEIGHTS):
            if lag - 1 - turn >= 0:
                for expert in chosen[last - (lag - 1 - turn), layer]:
                    scores[expert] += ahead * weight / sum(weights.values())
    return scores


@pytest.mark.parametrize("tokens", [1, 2, 12, 40, REMEMBERED_TOKENS + 2])
def test_scores_are_their_definition(tokens: int) -> None:
    chosen = walk(tokens)
    # At the last layer's turn every layer's likeness is as the definition has it.
    scores = learnt(chosen).scores(LAYERS - 1)
    np.testing.assert_allclose(scores, told_slowly(chosen, LAYERS - 1), rtol=2e-3, atol=1e-5)


def test_rows_together_leave_the_same_history() -> None:
    chosen = walk(30)
    gates, together, alone = (
        gates_of(chosen),
        ExpertReuse(1, EXPERTS, CHOSEN),
        ExpertReuse(1, EXPERTS, CHOSEN),
    )
    together.observe(0, gates[0, :17])
    together.observe(0, gates[0, 17:])
    for row in gates[0]:
        alone.observe(0, row[None])
    np.testing.assert_array_equal(together._past, alone._past)
    np.testing.assert_allclose(together._slow, alone._slow, rtol=1e-5)
    # A layer that a prompt's token doesn't reach learns nothing from it.
    before = alone.scores(0).copy()
    alone.observe(0, np.full((1, EXPERTS), -1, np.float32))
    np.testing.assert_array_equal(alone.scores(0), before)


def test_known_frequencies_are_where_scores_begin() -> None:
    frequencies = list(np.random.default_rng(1).random((LAYERS, EXPERTS), dtype=np.float32))
    policy = ExpertReuse(LAYERS, EXPERTS, CHOSEN, frequencies)
    np.testing.assert_array_equal(policy.scores(2), frequencies[2])
    # The layer whose turn is next is worth most, the one that had its turn least.
    worth = np.split(policy.pool_scores(1), LAYERS)
    np.testing.assert_allclose(worth[1], frequencies[1])
    np.testing.assert_allclose(worth[2], frequencies[2] * math.sqrt(LAYERS))


class GlobalRecency(Recency):
    """LRU over all layers' experts."""

    def pool_scores(self, layer: int) -> Float32:
        """What stands above `layer` was used a turn later than what stands below with the same token."""
        return np.concatenate([used + other / 1000 for other, used in enumerate(self._used)])


def pooled_rate(gates: Float32, slots: int, policy: ExpertReuse | GlobalRecency) -> float:
    cache = PooledCache([EXPERTS] * LAYERS, SLOT_BYTES, slots + EXPERTS, EXPERTS, policy)
    run_through(cache, list(gates), 20)
    cache.close()
    return cache.hits / cache.lookups


@pytest.mark.parametrize("slots", [5, 6, 8])
def test_below_one_tokens_cycle_there_is_no_cliff(slots: int) -> None:
    """Ten experts make a cycle here. Global LRU throws out just what comes next."""
    gates = gates_of(walk(120))
    assert pooled_rate(gates, slots, GlobalRecency([EXPERTS] * LAYERS)) == 0
    ours = pooled_rate(gates, slots, ExpertReuse(LAYERS, EXPERTS, CHOSEN))
    assert ours >= hit_rate(list(gates), "lru", slots, 20, equal=True) > 0


def test_a_repeated_text_is_foreseen() -> None:
    """Ten tokens again and again, 100 experts with room for 60: counts and recency see no difference."""
    random = np.random.default_rng(3)
    once = np.array(
        [np.array_split(random.permutation(EXPERTS)[:10], 5) for _ in range(LAYERS)], dtype=np.int32
    ).transpose(1, 0, 2)
    gates = gates_of(np.concatenate([once] * 12))
    ours = pooled_rate(gates, 30, ExpertReuse(LAYERS, EXPERTS, CHOSEN))
    assert hit_rate(list(gates), "lru", 30, 20) == 0
    assert ours >= 0.4


def test_the_same_choices_make_the_same_cache() -> None:
    gates, orders = gates_of(walk(60, seed=5)), []
    for _ in range(2):
        cache = PooledCache(
            [EXPERTS] * LAYERS, SLOT_BYTES, 14 + EXPERTS, EXPERTS, ExpertReuse(LAYERS, EXPERTS, CHOSEN)
        )
        run_through(cache, list(gates), 0)
        orders.append((cache.hits, cache._slots.copy()))
    assert orders[0][0] == orders[1][0]
    np.testing.assert_array_equal(orders[0][1], orders[1][1])


def pool(slots: int) -> PooledCache:
    """A pool of segments of four slots, four of them in reserve."""
    cache = PooledCache([EXPERTS] * LAYERS, SLOT_BYTES, 4, 4, ExpertReuse(LAYERS, EXPERTS, CHOSEN))
    cache.resize(slots // 4 + 1)
    return cache


def held(cache: NeuronCache) -> list[tuple[int, int]]:
    every = np.arange(EXPERTS, dtype=np.int32)
    return [(layer, i) for layer in range(LAYERS) for i in cache.held(layer, every).tolist()]


def test_a_pool_keeps_to_its_room() -> None:
    cache, chosen = pool(12), walk(50, seed=2)
    gates = gates_of(chosen)
    for token, rows in enumerate(chosen):
        cache.divide(1)
        for layer, ids in enumerate(rows):
            cache.observe(layer, gates[layer, token : token + 1])
            addresses = cache.acquire(layer, np.sort(ids)).addresses.tolist()
            assert len({*addresses}) == CHOSEN
            cache.evict_to_share(layer, np.sort(ids))
            assert {(layer, int(i)) for i in ids} <= {*held(cache)}
            cache.evict_to_share(layer)
            assert len(held(cache)) <= 12
            places = [int(cache.lie_at(a, np.array([i], np.int32))[0]) for a, i in held(cache)]
            assert len({*places}) == len(places)
        if token == 30:
            cache.resize(3)
            assert len(held(cache)) <= 8
            assert cache.nbytes <= 3 * 4 * SLOT_BYTES
            cache.resize(4)
    assert len(held(cache)) == 12


def test_what_is_read_ahead_keeps_to_the_room() -> None:
    cache, gates = pool(8), gates_of(walk(3))
    for layer in range(3):
        cache.observe(layer, gates[layer])
        cache.acquire(layer, np.array([0, 1], np.int32))
    assert len(cache.likeliest(4, 5)) == 2
    ids = cache.likeliest(3, 1)
    slots, _ = cache.reserve(3, 1)
    # What is being read ahead lies in the reserve until it is committed.
    assert len(cache.likeliest(4, 5)) == 2
    cache.commit(3, ids, slots)
    cache.acquire(4, np.array([3], np.int32))
    assert len(cache.likeliest(4, 5)) == 0
    cache.acquire(4, np.array([3, 4, 5], np.int32))
    cache.evict_to_share(4)
    assert len(held(cache)) == 8


def test_a_pool_with_room_for_all_holds_all() -> None:
    cache = pool(LAYERS * EXPERTS)
    for layer in range(LAYERS):
        cache.acquire(layer, np.arange(EXPERTS, dtype=np.int32))
        cache.evict_to_share(layer)
    assert cache.holds_all
    assert cache.is_full


@pytest.mark.parametrize(
    "make", [lambda: make_policy("gate", [EXPERTS] * 2), lambda: ExpertReuse(2, EXPERTS, 2)]
)
def test_hits_grow_with_slots(make: Callable[[], ExpertReuse]) -> None:
    """The policy runs in a cache with shares too."""
    gates = gates_of(walk(60))[:2]
    rates = []
    for slots in (4, 8, 16, 32):
        cache = NeuronCache([EXPERTS] * 2, SLOT_BYTES, slots + EXPERTS, EXPERTS, make())
        run_through(cache, list(gates), 10)
        rates.append(cache.hits)
    assert all(less < more for less, more in pairwise(rates))
