"""The neuron cache against a slow model of it: who has a slot, whose it is, and how many there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ondevice.backends.base import Float32, Int32
from ondevice.errors import OndeviceError
from ondevice.sparsity.neuron_cache import DIVIDE_TOKENS, NeuronCache
from ondevice.sparsity.policies import POLICIES, PolicyName, make_policy

LAYERS, NEURONS, SLOT_BYTES, SEGMENT_SLOTS, RESERVE = 3, 40, 96, 16, 24
GUESSES = 4
WIDTHS = (40, 24, 56)
"""Neurons of layers that differ; as many together as of LAYERS equal ones."""


def cache_of(
    policy: PolicyName = "gate", segments: int = 4, widths: tuple[int, ...] = (NEURONS,) * LAYERS
) -> NeuronCache:
    cache = NeuronCache(widths, SLOT_BYTES, SEGMENT_SLOTS, RESERVE, make_policy(policy, widths))
    cache.resize(segments)
    return cache


def gates_that_fire(ids: list[int], neurons: int = NEURONS) -> Float32:
    gates = np.full((1, neurons), -1.0, np.float32)
    gates[0, ids] = 1.0
    return gates


class Cache(RuleBasedStateMachine):
    """Passes, changes of the budget and failed reads in any order; contents are followed by address."""

    @initialize(policy=st.sampled_from(POLICIES), widths=st.sampled_from([WIDTHS, (NEURONS,) * LAYERS]))
    def begin(self, policy: PolicyName, widths: tuple[int, ...]) -> None:
        self.cache, self.widths = cache_of(policy, widths=widths), widths
        self.segments = 4
        self.at: dict[int, tuple[int, int]] = {}
        """Which neuron was last read to an address."""
        self.reservation: tuple[int, Int32, Int32, list[int]] | None = None
        """Layer, ids, slots and addresses of what is read ahead."""

    @rule(
        layer=st.integers(0, LAYERS - 1),
        ids=st.lists(st.integers(0, max(WIDTHS) - 1), max_size=20, unique=True).map(sorted),
        guess=st.sets(st.integers(0, max(WIDTHS) - 1), max_size=GUESSES),
        arrive=st.integers(0, GUESSES),
        fails=st.booleans(),
    )
    def use(self, layer: int, ids: list[int], guess: set[int], arrive: int, fails: bool) -> None:
        self.cache.divide(1, keep=self.reservation is not None)
        self.guess(layer, guess, arrive)
        ids = [i for i in ids if i < self.widths[layer]]
        self.cache.observe(layer, gates_that_fire(ids, self.widths[layer]))
        wanted = np.array(ids, np.int32)
        placement = self.cache.acquire(layer, wanted)
        addresses = placement.addresses.tolist()
        assert len(set(addresses)) == len(ids)
        for i in placement.missing.tolist():
            self.at[addresses[i]] = (layer, ids[i])
        assert all(self.at[address] == (layer, i) for address, i in zip(addresses, ids, strict=True))
        if fails:
            self.cache.evict(layer, wanted[placement.missing])
        self.cache.evict_to_share(layer)

    def guess(self, layer: int, guess: set[int], arrive: int) -> None:
        """Of the absent ones that were prefetched, the first few arrive, whatever the layer's share is."""
        absent = self.cache.absent(layer)
        assert self.cache.holds_layer(layer) == (not len(absent))
        ids = absent[np.isin(absent, list(guess))].astype(np.int32)
        slots, addresses = self.cache.reserve(layer, len(ids))
        self.cache.release(layer, slots[arrive:])
        adopted, spare = self.cache.commit(layer, ids[:arrive], slots[:arrive])
        np.testing.assert_array_equal(adopted, ids[:arrive])
        assert not len(spare)
        for i, address in list(zip(ids.tolist(), addresses.tolist(), strict=True))[:arrive]:
            self.at[address] = (layer, i)

    @rule(layer=st.integers(0, LAYERS - 1), most=st.integers(1, 50))
    def read_ahead(self, layer: int, most: int) -> None:
        if self.reservation is None:
            ids = self.cache.likeliest(layer, most)
            slots, addresses = self.cache.reserve(layer, len(ids))
            assert len(ids) <= most
            assert (self.cache._slot_of[layer][ids] < 0).all()
            self.reservation = (layer, ids, slots, addresses.tolist())

    @rule(fails=st.booleans())
    def read_ahead_ends(self, fails: bool) -> None:
        if self.reservation is None:
            return
        layer, ids, slots, addresses = self.reservation
        self.reservation = None
        before = self.cache._slot_of[layer][ids].copy()
        if fails:
            self.cache.release(layer, slots)
            np.testing.assert_array_equal(self.cache._slot_of[layer][ids], before)
            return
        adopted, spare = self.cache.commit(layer, ids, slots)
        # What a pass has read meanwhile keeps its slot, and the other one isn't free before it is said so.
        np.testing.assert_array_equal(adopted, ids[before < 0])
        np.testing.assert_array_equal(spare, slots[before >= 0])
        assert not np.isin(spare, self.cache._free[: self.cache._num_free]).any()
        self.cache.release(layer, spare)
        for i, address, had in zip(ids.tolist(), addresses, before.tolist(), strict=True):
            if had < 0:
                self.at[address] = (layer, i)

    @rule(segments=st.integers(2, 12))
    def resize(self, segments: int) -> None:
        self.read_ahead_ends(fails=True)
        self.cache.resize(segments)
        self.segments = segments

    @invariant()
    def every_slot_is_held_once_or_free(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        slots = np.concatenate(cache._slot_of)
        held = slots[slots >= 0]
        free = cache._free[: cache._num_free]
        existing = len(cache._segments) * SEGMENT_SLOTS
        claimed = [] if self.reservation is None else self.reservation[2].tolist()
        assert sorted([*held.tolist(), *free.tolist(), *claimed]) == list(range(existing))
        np.testing.assert_array_equal(cache._owner[held], np.flatnonzero(slots >= 0))
        assert tuple(map(len, cache._slot_of)) == self.widths
        assert cache._counts == [int((own >= 0).sum()) for own in cache._slot_of]
        reserving = -1 if self.reservation is None else self.reservation[0]
        assert cache._reserved == [len(claimed) if layer == reserving else 0 for layer in range(LAYERS)]
        begins = [segment.__array_interface__["data"][0] for segment in cache._segments]
        places = [at + slot * SLOT_BYTES for at in begins for slot in range(SEGMENT_SLOTS)]
        assert cache._address.tolist() == places
        assert cache.nbytes == existing * SLOT_BYTES <= self.segments * SEGMENT_SLOTS * SLOT_BYTES
        kept = [count + claimed for count, claimed in zip(cache._counts, cache._reserved, strict=True)]
        assert all(count <= share for count, share in zip(kept, cache._shares, strict=True))
        shares = map(min, cache._shares, self.widths)
        assert sum(shares) <= max(self.segments * SEGMENT_SLOTS - RESERVE, 0)


class CacheAtLength(Cache):
    """The same with more examples."""


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=30, stateful_step_count=60)
TestCacheAtLength = pytest.mark.slow(CacheAtLength.TestCase)
TestCacheAtLength.settings = settings(max_examples=60, stateful_step_count=60)


def test_the_policy_decides_who_stays() -> None:
    cache = cache_of(segments=3)  # 8 slots for each layer, beside the reserve
    often, seldom = list(range(0, 8)), list(range(20, 28))
    for _ in range(5):
        for ids in (often, often, seldom):
            cache.observe(0, gates_that_fire(ids))
            cache.acquire(0, np.array(ids, np.int32))
            cache.evict_to_share(0)
    assert np.flatnonzero(cache._slot_of[0] >= 0).tolist() == often


def test_shares_follow_where_neurons_fire() -> None:
    cache = cache_of(segments=4)  # 40 slots in all beside the reserve
    for _ in range(2 * DIVIDE_TOKENS):
        cache.divide(1)
        for layer, ids in enumerate((list(range(25)), [1, 2], [])):
            cache.observe(layer, gates_that_fire(ids))
            for half in (ids[:13], ids[13:]):
                cache.acquire(layer, np.array(half, np.int32))
                cache.evict_to_share(layer)
    held = [int((own >= 0).sum()) for own in cache._slot_of]
    assert held == [25, 2, 0]


def test_neurons_of_the_batch_under_way_stay_when_shares_are_kept() -> None:
    cache = cache_of(segments=2)  # 8 slots for three layers, beside the reserve: two each
    first, second = np.arange(0, 10, dtype=np.int32), np.arange(10, 20, dtype=np.int32)
    cache.acquire(0, first)
    placed = cache.acquire(0, second).addresses
    cache.evict_to_share(0, keep=second)
    assert cache.acquire(0, second).missing.size == 0
    np.testing.assert_array_equal(cache.acquire(0, second).addresses, placed)
    cache.evict_to_share(0)
    assert (cache._slot_of[0] >= 0).sum() == 2


def test_what_a_pass_reads_meanwhile_keeps_its_slot_and_the_reserved_one_stays_reserved() -> None:
    cache = cache_of(segments=1)
    ids = np.arange(SEGMENT_SLOTS // 2, dtype=np.int32)
    slots, _ = cache.reserve(0, len(ids))
    placed = cache.acquire(0, ids)
    assert sorted([*slots.tolist(), *cache._slot_of[0][ids].tolist()]) == list(range(SEGMENT_SLOTS))
    adopted, spare = cache.commit(0, ids, slots)
    assert not len(adopted)
    assert spare.tolist() == slots.tolist()
    assert (cache._reserved[0], cache.has_room(1)) == (len(ids), False)
    np.testing.assert_array_equal(cache.acquire(0, ids).addresses, placed.addresses)
    cache.release(0, spare)
    assert (cache._reserved[0], cache.has_room(len(ids))) == (0, True)


def test_the_likeliest_are_those_that_fired_and_fit_beside_what_is_reserved() -> None:
    cache = cache_of(segments=3)  # 8 slots for each layer, beside the reserve
    fired = [3, 8, 21, 30, 39]
    cache.observe(0, gates_that_fire(fired))
    assert cache.likeliest(0, 5).tolist() == fired
    cache.reserve(0, 6)
    assert cache.likeliest(0, 5).size == 2
    assert np.isin(cache.likeliest(0, 5), fired).all()
    cache.acquire(0, np.array([3, 8], np.int32))
    assert cache.likeliest(0, 5).size == 0


def test_more_than_the_reserve_is_an_error_and_costs_nothing() -> None:
    cache = cache_of(segments=2)
    assert cache.has_room(32)
    assert not cache.has_room(33)
    with pytest.raises(OndeviceError, match="33 neurons don't fit"):
        cache.acquire(0, np.arange(33, dtype=np.int32))
    assert cache.acquire(0, np.arange(32, dtype=np.int32)).missing.size == 32


def test_memory_comes_as_it_is_needed_and_goes_at_once() -> None:
    cache = cache_of(segments=8)
    assert cache.nbytes == 0
    cache.acquire(0, np.arange(17, dtype=np.int32))
    assert cache.nbytes == 2 * SEGMENT_SLOTS * SLOT_BYTES
    assert (cache.lookups, cache.hits) == (17, 0)
    cache.acquire(0, np.arange(5, dtype=np.int32))
    assert (cache.lookups, cache.hits) == (22, 5)
    cache.resize(1)
    assert cache.nbytes == SEGMENT_SLOTS * SLOT_BYTES
    cache.close()
    assert cache.nbytes == 0
    with pytest.raises(OndeviceError, match="given back"):
        cache.acquire(1, np.arange(1, dtype=np.int32))


def test_where_all_neurons_fit_nobody_goes() -> None:
    cache = cache_of(segments=9)
    assert cache.holds_all
    for layer in range(LAYERS):
        for first in range(0, NEURONS, 20):
            cache.acquire(layer, np.arange(first, first + 20, dtype=np.int32))
            cache.evict_to_share(layer)
    assert all((own >= 0).all() for own in cache._slot_of)
    with_one_slot_less = NeuronCache(
        cache._widths, SLOT_BYTES, SEGMENT_SLOTS, RESERVE + 1, make_policy("gate", cache._widths)
    )
    with_one_slot_less.resize(9)
    assert not with_one_slot_less.holds_all
