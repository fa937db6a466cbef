"""The neuron cache: equal segments of slots for one record each, which neuron is in which slot, and eviction.

A policy scores neurons (`policies.py`). A layer's share of the slots follows its share of the model's best
scores, and in each layer the best neurons keep their slots. A slot may come from any segment, so nothing ever
moves. The memory plan decides the number of segments; the cache owns them.

Legend: L layers, F neurons of a layer, N neurons of all layers, n neurons of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32, Int32
from ondevice.errors import OndeviceError
from ondevice.records import dataclass
from ondevice.sparsity.fresh_segments import FreshSegments
from ondevice.sparsity.policies import Policy

Addresses = NDArray[np.uint64]

ROWS_AT_ONCE = 16
"""Tokens that a policy observes in one call."""
DIVIDE_TOKENS = 16
"""Tokens between two divisions of the slots among layers. Dividing at every token adds 0.1 points of hits."""
_NONE: NDArray[np.intp] = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True)
class Placement:
    """Where the neurons of a request are: the record of the i-th neuron is at addresses[i]."""

    addresses: Addresses
    missing: NDArray[np.intp]
    """(m,) indices of the neurons that are still to be read."""


class NeuronCache:
    """A cache of N neurons. Each slot belongs to a layer's share or to a common reserve.

    A neuron that is read gets a slot at once, from the reserve if its layer's share is used up.
    `evict_to_share` then evicts the neurons with the lowest scores. So at most `reserve` missing neurons may
    get slots between two calls of `evict_to_share`.

    Args:
        widths: F of each layer.
        slot_bytes: bytes of a slot.
        segment_slots: slots in a segment.
        reserve: slots that belong to no layer.
        policy: scores neurons.
        keep: whether neurons may stay after the pass that read them; otherwise all shares are 0.
        allocate: allocates a segment of this many bytes; None for native memory.
    """

    def __init__(
        self,
        widths: Sequence[int],
        slot_bytes: int,
        segment_slots: int,
        reserve: int,
        policy: Policy,
        keep: bool = True,
        allocate: Callable[[int], Bytes] | None = None,
    ) -> None:
        self._keep = keep
        self._fresh = FreshSegments(slot_bytes * segment_slots, allocate)
        self._widths = tuple(widths)
        self._first = [sum(self._widths[:layer]) for layer in range(len(self._widths))]
        """Number of every layer's first neuron, counted through all layers."""
        self.slot_bytes = slot_bytes
        self._segment_slots = segment_slots
        self._reserve = reserve
        self._policy = policy
        self._quota = 0
        self.holds_all = False
        """Whether there is room for every neuron, so that nothing is ever evicted."""
        self._segments: list[Bytes] = []
        self._address: Addresses = np.zeros(0, dtype=np.uint64)
        """Address of every slot that exists."""
        self._slots: Int32 = np.full(sum(self._widths), -1, dtype=np.int32)
        self._slot_of: list[Int32] = np.split(self._slots, self._first[1:])
        """The slot of every neuron, (N,), and by layer, (F,), as views; -1 without one."""
        self._owner: Int32 = np.zeros(0, dtype=np.int32)
        """Number of the neuron in every slot that exists; -1 for an empty one."""
        self._free: Int32 = np.zeros(0, dtype=np.int32)
        """A stack of slots: the first `_num_free` are free."""
        self._num_free = 0
        self._counts = [0] * len(self._widths)
        self._reserved = [0] * len(self._widths)
        """Slots of each layer that are being read into, and that no neuron has yet."""
        self._shares = [0] * len(self._widths)
        """Slots that each layer may keep."""
        self._tokens = 0
        """Tokens since slots were last divided."""
        self.lookups = 0
        """Number of neurons requested."""
        self.hits = 0
        """Number of requested neurons that had a slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that exist. Segments are made when needed, or one ahead, within the quota."""
        return (len(self._segments) + self._fresh.waiting) * self._segment_slots * self.slot_bytes

    @property
    def _room(self) -> int:
        """Number of slots in all layers' shares together."""
        return max(0, self._quota * self._segment_slots - self._reserve) if self._keep else 0

    def resize(self, segments: int) -> None:
        """Set the quota of segments. Segments above it are freed at once, with the neurons in them.

        No reservation may be open, because its slots are being written to.
        """
        self._quota = segments
        self.holds_all = self._room >= self._slots.size
        limit = segments * self._segment_slots
        if len(self._segments) >= segments:
            self._fresh.drop()
        if len(self._segments) > segments:
            gone = self._owner[limit:]
            self._slots[gone[gone >= 0]] = -1
            self._counts = [int(np.count_nonzero(slots >= 0)) for slots in self._slot_of]
            free = self._free[: self._num_free]
            free = free[free < limit]
            self._free, self._num_free = np.resize(free, limit), len(free)
            self._owner, self._address = self._owner[:limit].copy(), self._address[:limit].copy()
            del self._segments[segments:]
        self._draw_shares()

    def divide(self, tokens: int, keep: bool = False) -> None:
        """Divide the slots among layers again, once every `DIVIDE_TOKENS` tokens. Called before each pass.

        tokens: number of tokens in the pass. keep: whether to leave the shares as they are, because open
        reservations rely on them.
        """
        self._tokens += tokens
        if self._tokens >= DIVIDE_TOKENS and not self.holds_all and not keep:
            self._draw_shares()

    def observe(self, layer: int, gates: Float32) -> None:
        """Tell the policy the gates (T, F) of accepted tokens."""
        if not self.holds_all:
            # A few tokens at a time, to keep the policy's temporary arrays small.
            for first in range(0, len(gates), ROWS_AT_ONCE):
                self._policy.observe(layer, gates[first : first + ROWS_AT_ONCE])

    def acquire(self, layer: int, ids: Int32) -> Placement:
        """Give every neuron of `ids` (n,) a slot. Missing neurons must then be read into their slots.

        Raises OndeviceError if more are missing than there are slots.
        """
        slots = self._slot_of[layer]
        places = slots[ids]
        missing = _NONE if self.holds_layer(layer) else np.flatnonzero(places < 0)
        self.lookups += len(ids)
        self.hits += len(ids) - len(missing)
        if len(missing):
            new = self._take(len(missing))
            places[missing] = slots[ids[missing]] = new
            self._owner[new] = self._first[layer] + ids[missing]
            self._counts[layer] += len(missing)
        return Placement(self._address[places], missing)

    def places(self, layer: int) -> tuple[Int32, Addresses]:
        """The slot of every neuron, (F,), and the address of every slot. All of the layer's neurons must have
        slots.
        """
        return self._slot_of[layer], self._address

    def count(self, multiplied: int) -> None:
        """Count multiplied neurons that have slots and didn't go through `acquire`."""
        self.lookups += multiplied
        self.hits += multiplied

    def has_room(self, count: int) -> bool:
        """Whether `count` more neurons can get slots before any must be evicted."""
        segments = self._quota - len(self._segments)
        return self._num_free + segments * self._segment_slots >= count

    def evict_to_share(self, layer: int, keep: Int32 | None = None) -> None:
        """Evict the layer's neurons with the lowest scores until its share isn't exceeded, but none in
        `keep`.
        """
        over = self._counts[layer] + self._reserved[layer] - self._shares[layer]
        if over <= 0:
            return
        held = self._slot_of[layer] >= 0
        if keep is not None:
            held[keep] = False
        candidates = np.flatnonzero(held)
        if over < len(candidates):
            scores = self._policy.scores(layer)[candidates]
            candidates = candidates[np.argpartition(scores, over)[:over]]
        self.evict(layer, candidates)

    @property
    def is_full(self) -> bool:
        """Whether all neurons have slots."""
        return sum(self._counts) == self._slots.size

    def holds_layer(self, layer: int) -> bool:
        """Whether all of a layer's neurons have slots."""
        return self._counts[layer] == self._widths[layer]

    def held(self, layer: int, ids: Int32) -> Int32:
        """The ids among `ids`, (k,), of neurons that have slots."""
        held: Int32 = ids[self._slot_of[layer][ids] >= 0]
        return held

    def without_slot(self, layer: int, ids: Int32) -> list[int]:
        """The ids among `ids` of neurons that have no slots."""
        slots = self._slot_of[layer][ids].tolist()
        return [neuron for neuron, slot in zip(ids.tolist(), slots, strict=True) if slot < 0]

    def find(self, layer: int, ids: Int32) -> dict[int, int]:
        """The address of each neuron in `ids` that has a slot. Counts these neurons as lookups."""
        slots, address = self._slot_of[layer][ids].tolist(), self._address
        pairs = zip(ids.tolist(), slots, strict=True)
        addresses = {neuron: int(address[slot]) for neuron, slot in pairs if slot >= 0}
        self.count(len(addresses))
        return addresses

    def lie_at(self, layer: int, ids: Int32) -> Addresses:
        """The addresses of neurons that have slots. They don't count as lookups, because drafting asks for
        them.
        """
        places: Addresses = self._address[self._slot_of[layer][ids]]
        return places

    def absent(self, layer: int) -> NDArray[np.intp]:
        """Ascending ids of the layer's neurons without a slot."""
        return np.flatnonzero(self._slot_of[layer] < 0)

    def likeliest(self, layer: int, most: int) -> Int32:
        """Ascending ids of the likeliest absent neurons: at most `most`, and no more than the layer's share
        allows.
        """
        spare = min(most, self._shares[layer] - self._counts[layer] - self._reserved[layer])
        if spare <= 0:
            return np.zeros(0, dtype=np.int32)
        absent = self.absent(layer)
        if spare < len(absent):
            scores = self._policy.scores(layer)[absent]
            absent = np.sort(absent[np.argpartition(-scores, spare - 1)[:spare]])
        return absent.astype(np.int32)

    def reserve(self, layer: int, count: int) -> tuple[Int32, Addresses]:
        """Reserve slots for at most `count` absent neurons of a layer. Returns the slots and their addresses.

        The neurons stay absent until `commit`. Slots beyond the layer's share come from the reserve.
        """
        slots = self._take(count)
        self._reserved[layer] += count
        return slots, self._address[slots]

    def commit(self, layer: int, ids: Int32, slots: Int32) -> tuple[Int32, Int32]:
        """Give reserved slots to those neurons of a reservation that are still absent.

        Returns their ids, and the slots of the other neurons. These slots stay reserved: `release` them once
        nothing writes to them any more.
        """
        slot_of = self._slot_of[layer]
        absent = slot_of[ids] < 0
        new, held = ids[absent], slots[absent]
        slot_of[new] = held
        self._owner[held] = self._first[layer] + new
        self._counts[layer] += len(new)
        self._reserved[layer] -= len(new)
        return new, slots[~absent]

    def release(self, layer: int, slots: Int32) -> None:
        """Free reserved slots."""
        self._reserved[layer] -= len(slots)
        self._give_back(slots)

    def evict(self, layer: int, ids: NDArray[np.integer]) -> None:
        """Free the slots of these neurons, all of which have one."""
        slots = self._slot_of[layer]
        freed = slots[ids]
        slots[ids] = -1
        self._owner[freed] = -1
        self._give_back(freed)
        self._counts[layer] -= len(freed)

    def close(self) -> None:
        """Free all memory."""
        self.resize(0)
        self._fresh.close()

    def _draw_shares(self) -> None:
        """Set each layer's share of slots to its share of the model's best scores.

        Shares from calibrated miss-rate curves would give the same hit rate, and 0.3 points less in small
        caches (tests/benchmarks/explain/cache_hit_rates.py).
        """
        widths, layers = np.array(self._widths), len(self._widths)
        self._tokens = 0
        if self.holds_all:
            self._shares = list(self._widths)
            return
        self._policy.fit(self._room)
        scores = np.concatenate([self._policy.scores(layer) for layer in range(layers)])
        rest = scores.size - self._room
        best = np.argpartition(scores, min(rest, scores.size - 1))[rest:]
        # Neurons that never fired tell nothing about their layer: their slots are divided evenly.
        seen = best[scores[best] > scores.min()]
        even = (self._room - len(seen)) * widths // widths.sum()
        chosen = np.zeros(scores.size, dtype=bool)
        chosen[seen] = True
        shares = np.array([np.count_nonzero(part) for part in np.split(chosen, self._first[1:])]) + even
        excess = int(np.maximum(shares - widths, 0).sum())
        self._shares = np.minimum(shares, widths).tolist()
        for layer in range(layers):
            more = min(excess, self._widths[layer] - self._shares[layer])
            self._shares[layer] += more
            excess -= more
        for layer in range(layers):
            self.evict_to_share(layer)

    def _give_back(self, slots: Int32) -> None:
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def _take(self, count: int) -> Int32:
        while self._num_free < count:
            if len(self._segments) == self._quota:
                raise OndeviceError(
                    f"{count} neurons don't fit the {self._num_free} free slots: the feed-forward memory "
                    "was given back, or is too small"
                )
            self._add_segment()
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def _add_segment(self) -> None:
        segment = self._fresh.take(another=len(self._segments) + 1 < self._quota)
        first = len(self._owner)
        new = np.arange(first, first + self._segment_slots, dtype=np.int32)
        lies_at = np.uint64(segment.__array_interface__["data"][0])
        places = lies_at + np.arange(self._segment_slots, dtype=np.uint64) * np.uint64(self.slot_bytes)
        address = np.concatenate([self._address, places])
        owner = np.append(self._owner, np.full_like(new, -1))
        free = np.resize(np.concatenate([self._free[: self._num_free], new]), len(owner))
        # Nothing can fail from here on.
        self._segments.append(segment)
        self._address, self._owner, self._free = address, owner, free
        self._num_free += len(new)
