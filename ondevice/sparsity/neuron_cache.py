"""The neuron cache: slots of record size in equal segments, who holds which, and who goes.

A policy scores neurons (`policies.py`): the layers' shares follow where the best of the model are, and in
each layer the best keep their slots. Slots are taken from any segment, so that nothing ever moves: a neuron
gets a free slot when it is read and gives it back when it goes. The memory plan says how many segments there
are; this is their one owner.

Legend: L layers, F neurons of a layer, n neurons at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32, Int32
from ondevice.errors import OndeviceError
from ondevice.kernels import _native
from ondevice.sparsity.policies import Policy

Addresses = NDArray[np.uint64]

ROWS_AT_ONCE = 16
DIVIDE_TOKENS = 16
"""Tokens between two divisions of the slots among layers: 0.1 points of hit rate below every token's."""
_NONE: NDArray[np.intp] = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True)
class Placement:
    """Where neurons lie: addresses[i] belongs to the i-th asked for; `missing` are those still to be read."""

    addresses: Addresses
    missing: NDArray[np.intp]
    """(m,) positions among those asked for."""


class NeuronCache:
    """L x F neurons in slots of `slot_bytes`, `segment_slots` to a segment; `reserve` slots belong to no
    layer.

    What a layer reads gets a slot at once, from the reserve where its share is used up; `evict_to_share` lets
    the lowest scores go until the share is kept. So at most `reserve` missing neurons may be placed between
    two calls of `evict_to_share`. Without `keep` no share is more than nothing: nobody outstays a pass.
    """

    def __init__(
        self,
        layers: int,
        neurons: int,
        slot_bytes: int,
        segment_slots: int,
        reserve: int,
        policy: Policy,
        keep: bool = True,
    ) -> None:
        self._keep = keep
        self._neurons = neurons
        self.slot_bytes = slot_bytes
        self._segment_slots = segment_slots
        self._reserve = reserve
        self._policy = policy
        self._quota = 0
        self.holds_all = False
        """Whether every neuron may stay, so that nobody needs to choose."""
        self._segments: list[Bytes] = []
        self._address: Addresses = np.zeros(0, dtype=np.uint64)
        """Where every slot that exists lies."""
        self._slot_of: Int32 = np.full((layers, neurons), -1, dtype=np.int32)
        self._owner: Int32 = np.zeros(0, dtype=np.int32)
        """layer * F + neuron, or -1, of every slot that exists."""
        self._free: Int32 = np.zeros(0, dtype=np.int32)
        """A stack of slots: the first `_num_free` are free."""
        self._num_free = 0
        self._counts = [0] * layers
        self._reserved = [0] * layers
        """Slots of each layer that are being read into and hold nobody yet."""
        self._shares = [0] * layers
        """Slots that each layer may keep."""
        self._tokens = 0
        """Tokens since the shares were last drawn up."""
        self.lookups = 0
        """Neurons that were asked for."""
        self.hits = 0
        """Those of them that had a slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that exist; those within the quota that aren't needed yet don't."""
        return len(self._segments) * self._segment_slots * self.slot_bytes

    @property
    def _room(self) -> int:
        """Slots that layers may keep, all together."""
        return max(0, self._quota * self._segment_slots - self._reserve) if self._keep else 0

    def resize(self, segments: int) -> None:
        """Keep to so many segments: those above go at once, with the neurons in them.

        No reservation may be open: slots that are read into would be gone.
        """
        self._quota = segments
        self.holds_all = self._room >= self._slot_of.size
        limit = segments * self._segment_slots
        if len(self._segments) > segments:
            gone = self._owner[limit:]
            layers, neurons = np.divmod(gone[gone >= 0], self._neurons)
            self._slot_of[layers, neurons] = -1
            for layer, count in zip(*np.unique(layers, return_counts=True), strict=True):
                self._counts[layer] -= int(count)
            free = self._free[: self._num_free]
            free = free[free < limit]
            self._free, self._num_free = np.resize(free, limit), len(free)
            self._owner, self._address = self._owner[:limit].copy(), self._address[:limit].copy()
            del self._segments[segments:]
        self._draw_shares()

    def divide(self, tokens: int, keep: bool = False) -> None:
        """Draw up the layers' shares anew, from time to time; called before each pass with its tokens.

        keep: not now, as there are claims, which were made by the shares as they are.
        """
        self._tokens += tokens
        if self._tokens >= DIVIDE_TOKENS and not self.holds_all and not keep:
            self._draw_shares()

    def observe(self, layer: int, gates: Float32) -> None:
        """Tell the policy what the gates (T, F) of accepted tokens were."""
        if not self.holds_all:
            # A few tokens at a time, to keep what the policy computes in between small.
            for first in range(0, len(gates), ROWS_AT_ONCE):
                self._policy.observe(layer, gates[first : first + ROWS_AT_ONCE])

    def acquire(self, layer: int, ids: Int32) -> Placement:
        """Give every neuron of `ids` (n,) a slot. The missing are to be read there before anything else.

        Raises OndeviceError if more are missing than slots can be had.
        """
        slots = self._slot_of[layer]
        own = slots[ids]
        missing = _NONE if self.holds_layer(layer) else np.flatnonzero(own < 0)
        self.lookups += len(ids)
        self.hits += len(ids) - len(missing)
        if len(missing):
            new = self._take(len(missing))
            own[missing] = slots[ids[missing]] = new
            self._owner[new] = layer * self._neurons + ids[missing]
            self._counts[layer] += len(missing)
        return Placement(self._address[own], missing)

    def places(self, layer: int) -> tuple[Int32, Addresses]:
        """Of a layer that is held: every neuron's slot, (F,), and where slots lie."""
        return self._slot_of[layer], self._address

    def count(self, multiplied: int) -> None:
        """So many neurons were multiplied that nobody asked to acquire, as their layer is held."""
        self.lookups += multiplied
        self.hits += multiplied

    def has_room(self, count: int) -> bool:
        """Whether so many more neurons can be placed before anybody has to go."""
        segments = self._quota - len(self._segments)
        return self._num_free + segments * self._segment_slots >= count

    def evict_to_share(self, layer: int, keep: Int32 | None = None) -> None:
        """Let the layer's lowest scores go until it keeps to its share; those of `keep` stay in any case."""
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
        return sum(self._counts) == self._slot_of.size

    def holds_layer(self, layer: int) -> bool:
        """Whether all of a layer's neurons have slots."""
        return self._counts[layer] == self._neurons

    def held(self, layer: int, ids: Int32) -> Int32:
        """Those of `ids` that have slots."""
        found: Int32 = ids[self._slot_of[layer, ids] >= 0]
        return found

    def lie_at(self, layer: int, ids: Int32) -> Addresses:
        """Where neurons lie that have slots. Who only drafts with them counts for nothing here."""
        places: Addresses = self._address[self._slot_of[layer, ids]]
        return places

    def absent(self, layer: int) -> NDArray[np.intp]:
        """Ascending ids of the layer's neurons without a slot."""
        return np.flatnonzero(self._slot_of[layer] < 0)

    def likeliest(self, layer: int, most: int) -> Int32:
        """Ascending ids of up to `most` absent neurons, the likeliest, for which its share has room."""
        spare = min(most, self._shares[layer] - self._counts[layer] - self._reserved[layer])
        if spare <= 0:
            return np.zeros(0, dtype=np.int32)
        absent = self.absent(layer)
        if spare < len(absent):
            scores = self._policy.scores(layer)[absent]
            absent = np.sort(absent[np.argpartition(-scores, spare - 1)[:spare]])
        return absent.astype(np.int32)

    def reserve(self, layer: int, count: int) -> tuple[Int32, Addresses]:
        """Slots for `count` absent neurons of a layer, and their addresses.

        They are absent until `commit`. What the share has no room for must fit the reserve.
        """
        slots = self._take(count)
        self._reserved[layer] += count
        return slots, self._address[slots]

    def commit(self, layer: int, ids: Int32, slots: Int32) -> tuple[Int32, Int32]:
        """Those neurons of a reservation that nobody has read meanwhile have their slots from now on.

        Returns their ids, and the slots of the others, which stay claimed: `release` them once nothing is
        read into them any more.
        """
        absent = self._slot_of[layer, ids] < 0
        new, held = ids[absent], slots[absent]
        self._slot_of[layer, new] = held
        self._owner[held] = layer * self._neurons + new
        self._counts[layer] += len(new)
        self._reserved[layer] -= len(new)
        return new, slots[~absent]

    def release(self, layer: int, slots: Int32) -> None:
        """A reservation came to nothing."""
        self._reserved[layer] -= len(slots)
        self._give_back(slots)

    def evict(self, layer: int, ids: NDArray[np.integer]) -> None:
        """Give back the slots of these neurons, which all have one."""
        slots = self._slot_of[layer]
        freed = slots[ids]
        slots[ids] = -1
        self._owner[freed] = -1
        self._give_back(freed)
        self._counts[layer] -= len(freed)

    def close(self) -> None:
        """Give all memory back."""
        self.resize(0)

    def _draw_shares(self) -> None:
        """Shares by where the best scores of the whole model are: a slot is worth the same in every layer.

        Shares from calibrated miss-rate curves hold as much of what fires, in small caches 0.3 points less
        (tests/benchmarks/explain/cache_hit_rates.py).
        """
        layers, neurons = self._slot_of.shape
        self._tokens = 0
        if self.holds_all:
            self._shares = [neurons] * layers
            return
        self._policy.fit(self._room)
        scores = np.concatenate([self._policy.scores(layer) for layer in range(layers)])
        rest = scores.size - self._room
        best = np.argpartition(scores, min(rest, scores.size - 1))[rest:]
        # What nobody has seen fire says nothing of its layer: its slots are divided evenly.
        seen = best[scores[best] > scores.min()]
        even = (self._room - len(seen)) // layers
        shares = np.bincount(seen // neurons, minlength=layers) + even
        excess = int(np.maximum(shares - neurons, 0).sum())
        self._shares = np.minimum(shares, neurons).tolist()
        for layer in range(layers):
            more = min(excess, neurons - self._shares[layer])
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
        segment = _native.allocate(self._segment_slots * self.slot_bytes)
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
