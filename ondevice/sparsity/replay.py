"""Computes hit rates of a cache of any size and policy, by running recorded gates through the runtime's
cache.

Legend: T tokens, F neurons of a layer. Gates are (T, F) for each layer, all of the same tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import PolicyName, fires, make_policy
from ondevice.sparsity.pooled_cache import PooledCache

SLOT_BYTES = 64
"""Bytes of a slot, into which nothing is read."""


def hit_rate(
    gates: Sequence[Float32], policy: PolicyName, slots: int, warm_up: int, equal: bool = False
) -> float:
    """Share of firing neurons that a cache holds, from 0 to 1. It is 1 if none fires.

    Args:
        gates: recorded gates of each layer.
        policy: the cache's policy.
        slots: number of the cache's slots, for all layers together.
        warm_up: index of the first token that is counted.
        equal: whether every layer gets the same share of slots; the runtime divides them by score.
    """
    hits = lookups = 0
    for group in _groups(len(gates), equal):
        widths = [gates[layer].shape[1] for layer in group]
        room, reserve = _room(gates, group, slots), max(widths)
        cache = NeuronCache(widths, SLOT_BYTES, room + reserve, reserve, make_policy(policy, widths))
        run_through(cache, [gates[layer] for layer in group], warm_up)
        hits, lookups = hits + cache.hits, lookups + cache.lookups
        cache.close()
    return hits / lookups if lookups else 1.0


def run_through(cache: NeuronCache, gates: Sequence[Float32], warm_up: int) -> None:
    """Run each layer's gates (T, F) through a cache of one segment, token by token.

    The cache counts lookups and hits from the token `warm_up` on.
    """
    cache.resize(1)
    for token in range(len(gates[0])):
        if token == warm_up:
            cache.hits = cache.lookups = 0
        cache.divide(1)
        for layer, rows in enumerate(gates):
            row = rows[token : token + 1]
            cache.observe(layer, row)
            cache.acquire(layer, np.flatnonzero(fires(row[0])).astype(np.int32))
            cache.evict_to_share(layer)


def expert_hit_rate(chosen: NDArray[np.integer], experts: int, size: int, warm_up: int) -> float:
    """The share of lookups that the runtime's cache of experts serves, from 0 to 1.

    Args:
        chosen: (T, L, k) experts of each layer that each token chose, all different.
        experts: number of experts of each layer.
        size: number of experts that the cache keeps, of all layers together.
        warm_up: index of the first token that is counted.
    """
    tokens, layers, k = chosen.shape
    policy = ExpertReuse(layers, experts, k)
    cache = PooledCache([experts] * layers, SLOT_BYTES, size + k, k, policy)
    cache.resize(1)
    gates = np.full((1, experts), -1.0, dtype=np.float32)
    for token in range(tokens):
        if token == warm_up:
            cache.hits = cache.lookups = 0
        cache.divide(1)
        for layer in range(layers):
            ids = chosen[token, layer].astype(np.int32)
            gates[0, ids] = 1.0
            cache.observe(layer, gates)
            gates[0, ids] = -1.0
            cache.acquire(layer, ids)
            cache.evict_to_share(layer)
    rate = cache.hits / cache.lookups
    cache.close()
    return rate


class Optimum:
    """The upper bound of all policies: a cache that keeps the neurons that fire again soonest (Belady).

    A step is one token's pass through one layer. The cache is represented by how many of its neurons fire
    next at each step. Which ones doesn't matter.
    """

    def __init__(self, gates: Sequence[Float32], warm_up: int, equal: bool = False) -> None:
        """gates, warm_up, equal: as in `hit_rate`."""
        self._gates = gates
        self._groups = [_Schedule(gates, group, warm_up) for group in _groups(len(gates), equal)]

    def hit_rate(self, slots: int) -> float:
        """Share of firing neurons that a cache of `slots` slots holds, from 0 to 1. It is 1 if none fires."""
        hits = lookups = 0
        for group in self._groups:
            hits += group.hits(_room(self._gates, group.layers, slots))
            lookups += group.lookups
        return hits / lookups if lookups else 1.0


class _Schedule:
    """The layers of one group that shares slots. For the neurons that fire in each step, it has the steps of
    their next firing.
    """

    def __init__(self, gates: Sequence[Float32], group: Sequence[int], warm_up: int) -> None:
        self.layers = group
        self.lookups = 0
        count, end = len(group), len(gates[0]) - warm_up
        self._steps = end * count
        # Hits before `warm_up` don't count, so the cache starts with the neurons that fire first afterwards.
        self._at_first = np.zeros(self._steps, dtype=np.int64)
        self._follow: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = [_NONE] * self._steps
        for index, layer in enumerate(group):
            following = np.full(gates[layer].shape[1], end, dtype=np.int64)
            for token in range(end - 1, -1, -1):
                active = fires(gates[layer][warm_up + token])
                self.lookups += int(active.sum())
                again = following[active]
                tokens, counts = np.unique(again[again < end], return_counts=True)
                self._follow[token * count + index] = tokens * count + index, counts
                following[active] = token
            seen = fires(gates[layer][:warm_up]).any(axis=0) & (following < end)
            tokens, counts = np.unique(following[seen], return_counts=True)
            self._at_first[tokens * count + index] = counts

    def hits(self, slots: int) -> int:
        held = self._at_first.copy()
        """(steps,) number of neurons in the cache that fire next in each step."""
        farthest = [-int(step) for step in np.flatnonzero(held)]
        heapq.heapify(farthest)
        count = _shrink(held, farthest, int(held.sum()), slots)
        hits = 0
        for step, (again, counts) in enumerate(self._follow):
            hits += int(held[step])
            count += int(counts.sum()) - int(held[step])
            held[step] = 0
            for position, more in zip(again.tolist(), counts.tolist(), strict=True):
                if not held[position]:
                    heapq.heappush(farthest, -position)
                held[position] += more
            count = _shrink(held, farthest, count, slots)
        return hits


_NONE = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _shrink(held: NDArray[np.int64], farthest: list[int], count: int, slots: int) -> int:
    """Evict the neurons that will fire last until `slots` are held. Returns the number held.

    farthest: a heap of negated steps; some of these may have no neurons left.
    """
    while count > slots:
        step = -farthest[0]
        gone = min(int(held[step]), count - slots)
        held[step] -= gone
        count -= gone
        if not held[step]:
            heapq.heappop(farthest)
    return count


def _room(gates: Sequence[Float32], group: Sequence[int], slots: int) -> int:
    """The number of slots that a group of layers gets out of `slots`, by its share of all neurons."""
    widths: list[int] = [layer.shape[1] for layer in gates]
    return slots * sum(widths[layer] for layer in group) // sum(widths)


def _groups(layers: int, equal: bool) -> list[list[int]]:
    """The groups of layers that share slots: each layer alone if `equal`, otherwise all together."""
    return [[layer] for layer in range(layers)] if equal else [list(range(layers))]
