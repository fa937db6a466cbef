"""Segments made ahead: how many there are, what is freed, and what an error does."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from ondevice.backends.base import Bytes
from ondevice.kernels import _native
from ondevice.sparsity import fresh_segments
from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.fresh_segments import FreshSegments
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import make_policy
from ondevice.sparsity.pooled_cache import PooledCache

LARGE = _native.POPULATED_BYTES


def test_every_segment_is_memory_of_its_own() -> None:
    fresh = FreshSegments(LARGE)
    segments = [fresh.take(another=more) for more in (True, True, True, False)]
    for number, segment in enumerate(segments):
        assert segment.shape == (LARGE,)
        segment[:] = number
    assert [int(segment.max()) for segment in segments] == [0, 1, 2, 3]
    assert fresh.waiting == 0
    fresh.close()


def test_what_nothing_takes_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Bytes]] = []

    def allocate(nbytes: int) -> Bytes:
        segment = np.zeros(nbytes, np.uint8)
        made.append(weakref.ref(segment))
        return segment

    monkeypatch.setattr(fresh_segments._native, "allocate", allocate)
    before = set(threading.enumerate())
    fresh = FreshSegments(LARGE)
    fresh.take(another=True)
    assert fresh.waiting == 1
    fresh.drop()
    assert fresh.waiting == 0
    fresh.close()
    gc.collect()
    assert len(made) in (1, 2)
    assert all(segment() is None for segment in made)
    assert set(threading.enumerate()) <= before


def test_an_error_is_raised_once_where_the_segment_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, fails = FreshSegments(LARGE), threading.Event()

    def allocate(nbytes: int) -> Bytes:
        if fails.is_set():
            raise MemoryError
        return np.zeros(nbytes, np.uint8)

    monkeypatch.setattr(fresh_segments._native, "allocate", allocate)
    fails.set()
    fresh._next = fresh._maker.submit(allocate, LARGE) if fresh._maker else None
    with pytest.raises(MemoryError):
        fresh.take(another=True)
    fails.clear()
    assert fresh.take(another=False).shape == (LARGE,)
    fresh.close()


@pytest.mark.parametrize("own", [False, True])
def test_small_segments_and_those_of_others_are_made_when_they_are_needed(own: bool) -> None:
    fresh = FreshSegments(LARGE, _native.allocate) if own else FreshSegments(LARGE - 1)
    fresh.take(another=True)
    assert fresh.waiting == 0


def test_a_cache_never_holds_more_than_its_quota() -> None:
    slot_bytes, slots = LARGE // 4, 4
    cache = NeuronCache((64,), slot_bytes, slots, slots, make_policy("gate", (64,)))
    segment = slots * slot_bytes
    cache.resize(3)
    held = []
    for first in range(0, 12, 4):
        cache.acquire(0, np.arange(first, first + 4, dtype=np.int32))
        held.append(cache.nbytes // segment)
    assert held == [2, 3, 3]
    cache.resize(8)
    cache.acquire(0, np.arange(12, 16, dtype=np.int32))
    assert cache.nbytes == 5 * segment
    cache.resize(4)
    assert cache.nbytes == 4 * segment
    cache.close()
    assert cache.nbytes == 0


def test_a_pool_evicts_rather_than_waits_for_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits as long as there are fewer slots than the reserve, and where nothing may go."""
    given, allocate = threading.Event(), _native.allocate
    layers, experts, slots = 2, 16, 4

    def slowly(nbytes: int) -> Bytes:
        given.wait(30)
        return allocate(nbytes)

    monkeypatch.setattr(fresh_segments._native, "allocate", slowly)
    given.set()
    policy = ExpertReuse(layers, experts, 2)
    cache = PooledCache([experts] * layers, LARGE // slots, slots, slots, policy)
    cache.resize(4)
    kept = np.arange(4, dtype=np.int32)
    for expert in range(4):
        assert cache.has_room(1)
        cache.acquire(0, np.array([expert], dtype=np.int32))
    deadline = time.monotonic() + 30
    while not cache._fresh.is_ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    # The segment that is there is taken, and the next begun, which takes until `given` is set again.
    given.clear()
    cache.acquire(1, np.arange(4, dtype=np.int32))
    assert cache._num_free == 0
    assert not cache.has_room(1)
    # The segment that is being made isn't there: two of the other layer's go, and none that is kept.
    assert cache.make_room(2, 0, kept)
    assert cache._num_free == 2
    assert len(cache.held(0, kept)) == 4
    assert len(cache.held(1, kept)) == 2
    cache.acquire(0, np.array([4], dtype=np.int32))
    # Once it is there, nothing goes.
    given.set()
    while not cache._fresh.is_ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert cache.has_room(2)
    assert cache._num_free == slots + 1
    assert len(cache.held(1, kept)) == 2
    cache.close()


def test_where_nothing_may_go_fresh_memory_is_waited_for() -> None:
    slots, policy = 4, ExpertReuse(1, 16, 2)
    cache = PooledCache([16], LARGE // slots, slots, slots, policy)
    cache.resize(3)
    cache.acquire(0, np.arange(4, dtype=np.int32))
    assert cache.has_room(1) or cache.make_room(1, 0, np.arange(16, dtype=np.int32))
    cache.acquire(0, np.array([4], dtype=np.int32))
    assert len(cache.held(0, np.arange(16, dtype=np.int32))) == 5
    cache.close()
