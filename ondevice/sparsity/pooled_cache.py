"""A neuron cache for experts. Slots belong to no layer: the experts of the least worth are evicted.

An expert's worth depends on how soon its layer comes again, which layers' shares can't express.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ondevice.backends.base import Bytes, Float32, Int32
from ondevice.kernels import _native
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import Policy

_NO_IDS: Int32 = np.zeros(0, dtype=np.int32)


class PoolPolicy(Policy, Protocol):
    """A policy whose scores can be compared across layers."""

    def pool_scores(self, layer: int) -> Float32:
        """The worth of a slot for each neuron of all layers, (N,), once `layer` has been computed."""
        ...


class PooledCache(NeuronCache):
    """A `NeuronCache` without shares: `evict_to_share` evicts until all layers together fit into the room."""

    def __init__(
        self,
        widths: Sequence[int],
        slot_bytes: int,
        segment_slots: int,
        reserve: int,
        policy: PoolPolicy,
        keep: bool = True,
        allocate: Callable[[int], Bytes] | None = None,
    ) -> None:
        super().__init__(widths, slot_bytes, segment_slots, reserve, policy, keep, allocate)
        self._pool_policy = policy

    def evict_to_share(self, layer: int, keep: Int32 | None = None) -> None:
        """Evict the neurons of the least worth once `layer` has been computed, but none of the layer's
        neurons in `keep`.
        """
        if self._spare < 0:
            self._evict_least(-self._spare, layer, keep)

    def has_room(self, count: int) -> bool:
        """Whether `count` more neurons can get slots now, without waiting for memory from the system.

        It does wait for memory if all neurons have room, or if there are fewer slots than the reserve needs.
        """
        if self.holds_all or len(self._owner) < self._reserve:
            return super().has_room(count)
        while self._num_free < count and len(self._segments) < self._quota and self._fresh.is_ready():
            self._add_segment()
        return self._num_free >= count

    def make_room(self, count: int, layer: int, keep: Int32) -> bool:
        """Evict other neurons, but none of the layer's in `keep`, for `count` missing ones. Returns False if
        none gets a slot.
        """
        self.evict_for(count, layer, keep)
        return self.has_room(1) or super().has_room(1)

    def evict_for(self, count: int, layer: int, keep: Int32) -> None:
        """Evict neurons that exceed the room, and more for `count` neurons if memory for these doesn't exist
        yet.

        The layer's neurons in `keep` stay. In a virtual machine, reading evicted neurons from flash again is
        faster than getting fresh memory from the system.
        """
        self.evict_to_share(layer, keep)
        if len(self._segments) < self._quota and not self.has_room(count):
            self._evict_least(count - self._num_free, layer, keep)

    def _evict_least(self, over: int, layer: int, keep: Int32 | None) -> None:
        worth, kept = self._pool_policy.pool_scores(layer), _NO_IDS if keep is None else keep
        gone = np.array(
            _native.worth_least(self._slots, worth, self._first[layer], kept, over), dtype=np.int32
        )
        freed = self._slots[gone]
        self._slots[gone] = -1
        self._owner[freed] = -1
        self._give_back(freed)
        for other in (np.searchsorted(self._first, gone, side="right") - 1).tolist():
            self._counts[other] -= 1

    def likeliest(self, layer: int, most: int) -> Int32:
        """Ascending ids of the likeliest absent neurons: at most `most`, and no more than the remaining room
        allows.
        """
        return super().likeliest(layer, min(most, self._spare))

    def likeliest_of_all(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` absent neurons of the highest worth that fit into the remaining room: pairs of layer
        and id, best first.

        Neurons of equal worth are in the order of layers.
        """
        absent = np.flatnonzero(self._slots < 0)
        worth = self._pool_policy.pool_scores(len(self._widths) - 1)[absent]
        best = absent[np.argsort(-worth, kind="stable")[: max(0, min(most, self._spare))]]
        layers = np.searchsorted(self._first, best, side="right") - 1
        ids = best - np.array(self._first)[layers]
        return list(zip(layers.tolist(), ids.tolist(), strict=True))

    @property
    def _spare(self) -> int:
        """Number of slots left in the room; negative if more neurons are held. Reserved slots count to the
        reserve.
        """
        return self._room - sum(self._counts)

    def _draw_shares(self) -> None:
        """Let any layer hold all of its neurons."""
        self._tokens = 0
        self._shares = list(self._widths)
        self._policy.fit(self._room)
        self.evict_to_share(len(self._widths) - 1)
