"""The `NeuronSource` of experts: provides the experts that a pass chose, from the cache or from flash.

An expert is one record, or one run of records, which is read at once into a slot and multiplied there.
Experts that are in memory come first, unless the order is prescribed. If one can't be read, its slot is
freed: an expert is never multiplied before all of it has arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32, Int32
from ondevice.backends.expert_records import ExpertRecords
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import Segment
from ondevice.backends.routing import Routing
from ondevice.errors import OndeviceError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model_config import ExpertsSpec
from ondevice.sparsity.cached_source import CachedSource
from ondevice.sparsity.expert_prefetch import ExpertPrefetcher
from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.pooled_cache import PooledCache
from ondevice.sparsity.prefetch import PrefetchQuality
from ondevice.sparsity.segments import SegmentPool
from ondevice.stats import PassTimes
from ondevice.units import PAGE_BYTES

FILLED_AT_ONCE = 4
"""Experts that are read together while the model is idle, enough for flash's full rate."""


class ExpertFetcher(CachedSource):
    """Provides a model's layers with experts from `cache`, and from flash if they aren't cached.

    Args:
        layers: the model's layers, in order; each gets this object as its `neurons`.
        reader: over the bundle's files.
        experts: the spec of each layer's experts; None for a layer without any.
        slot_bytes, segment_slots: bytes of a slot, and slots in a segment.
        most: most experts that are read at once, and slots that are kept free for them.
        keep: whether experts may stay after the pass that read them.
        prefetch: whether to begin to read the next layer's experts before they are known.
        frequencies: for each layer with experts, (E,) share of a text's tokens that chose each.
        dense: provides the neurons that belong to no expert, owned by this object from now on; None: the
            layers hold them.
        of_model: the spec of the model's experts, for a part of a model that has no layers with experts.
    """

    def __init__(
        self,
        layers: Sequence[FeedForwardLayer],
        reader: FlashReader,
        experts: Sequence[ExpertsSpec | None],
        slot_bytes: int,
        segment_slots: int,
        most: int,
        keep: bool = True,
        prefetch: bool = True,
        frequencies: Sequence[Float32] | None = None,
        dense: SegmentPool | None = None,
        of_model: ExpertsSpec | None = None,
    ) -> None:
        specs = {layer: spec for layer, spec in enumerate(experts) if spec is not None}
        self._moe_index = {layer: moe_index for moe_index, layer in enumerate(specs)}
        """Number of each layer with experts among these, as the cache counts layers."""
        self._layer_of = tuple(specs)
        spec = next(iter(specs.values()), of_model)
        assert spec is not None
        self._experts = spec
        count, num_layers = self._experts.count, max(1, len(specs))
        policy = ExpertReuse(num_layers, count, self._experts.chosen, frequencies)
        allocate = layers[0].piece_memory.slot_allocator
        cache = PooledCache([count] * num_layers, slot_bytes, segment_slots, most, policy, keep, allocate)
        self._pool = cache
        self._most = most
        self._dense = dense
        self._reads = _native.RangeReads(reader.native)
        # One slot is always left for an expert that a pass waits for.
        self._prefetcher = ExpertPrefetcher(self._reads, cache, self._read_ahead, most - 1)
        self._prefetches = prefetch
        self._prefetched_hits = 0
        self._fills = bool(specs) and keep
        self._draft_gates: NDArray[np.float16] = np.zeros((0, 0, 0), dtype=np.float16)
        """(layers with experts, draft tokens, E) gates of the last pass's draft tokens, in batch order."""
        super().__init__(layers, cache)

    @property
    def hits(self) -> int:
        """Number of lookups whose expert was already in memory when the pass came to its layer. Prefetched
        ones don't count.
        """
        return self._cache.hits - self._prefetched_hits

    @property
    def prefetching(self) -> PrefetchQuality:
        """Hits, waste and time of prefetching so far."""
        return self._prefetcher.quality

    def resize(self, quota: Sequence[int]) -> None:
        """Keep to sum(quota) segments. Surplus segments are freed now; missing ones are made when needed."""
        self._prefetcher.drop()
        self._cache.resize(sum(quota))

    def keep_dense(self, quota: Sequence[int]) -> None:
        """Keep to a quota of segments for neurons that belong to no expert."""
        if self._dense is not None:
            self._dense.resize(quota)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that exist, and of the segments for neurons that belong to no expert."""
        return super().nbytes + (0 if self._dense is None else self._dense.nbytes)

    @property
    def filled_bytes(self) -> int:
        """Bytes of the slots that exist, and of filled segments for neurons outside experts. Safe from any
        thread.
        """
        return super().filled_bytes + (0 if self._dense is None else self._dense.filled_bytes)

    @property
    def times(self) -> PassTimes:
        times = super().times
        if self._dense is None:
            return times
        return replace(times, waited=times.waited + self._dense.times.waited)

    def fill(self) -> bool:
        """Read a few of the likeliest absent experts. Returns False if there is no room, or if a read failed.

        If a pass needs an expert whose read failed, it reads the expert again and raises.
        """
        self._prefetcher.drop()
        likely = self._pool.likeliest_of_all(FILLED_AT_ONCE) if self._fills else []
        return bool(likely) and self._prefetcher.fill(likely)

    def close(self) -> None:
        """Wait for the reads under way and free the slots. Layers then raise if they are multiplied."""
        self._reads.close()
        if self._dense is not None:
            self._dense.close()
        self._close_cache()

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Prepare for a pass: make room for the gates of draft tokens."""
        if len(batch.drafted) > self._draft_gates.shape[1]:
            shape = len(self._moe_index), len(batch.drafted), self._experts.count
            self._draft_gates = np.zeros(shape, dtype=np.float16)
        if self._dense is not None:
            self._dense.begin_pass(batch)
        self._since = time.perf_counter()
        self._prefetcher.next_pass(len(batch.tokens), super().times)
        self._cache.divide(len(batch.tokens))
        self._managed += self._lap()

    def wants_prefetch(self, layer: int, rows: int) -> bool:
        moe_index = self._moe_index.get(layer)
        return self._prefetches and moe_index is not None and self._prefetcher.wants(moe_index, rows)

    def prefetch_experts(self, layer: int, chosen: Callable[[], Int32]) -> None:
        self._since = time.perf_counter()
        self._prefetcher.expect(self._moe_index[layer], chosen)
        self._managed += self._lap()

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the cache about the accepted draft tokens."""
        accepted = batch.accepted(rows)
        if accepted and not self._cache.holds_all:
            for moe_index, gates in enumerate(self._draft_gates[:, accepted]):
                self._cache.observe(moe_index, gates.astype(np.float32))

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes | Segment]:
        """Yields a layer's neurons that belong to no expert, from flash: records, or segments that were just
        filled.
        """
        return () if self._dense is None else self._dense.offloaded(layer, batch)

    def experts(
        self, layer: int, routing: Routing, batch: ForwardBatch, needs_expert_order: bool
    ) -> Iterator[tuple[int, int]]:
        if batch.resident_only or batch.stream_rows:
            raise OndeviceError("experts can't be estimated from those in memory alone")
        self._since = time.perf_counter()
        cache, moe_index = self._cache, self._moe_index[layer]
        if not cache.holds_all:
            self._observe(moe_index, routing, batch)
        ids, records, arrived = routing.experts, self._records(layer), False
        under_way: dict[int, tuple[int, int]] = {}
        try:
            for one in self._prefetcher.commit(moe_index, ids):
                under_way[one.expert] = one.address, one.ticket
            self._prefetched_hits += len(under_way)
            addresses = cache.find(moe_index, ids)
            wanted: list[int] = ids.tolist()
            missing = deque(expert for expert in wanted if expert not in addresses)
            self._prefetcher.count_missing(len(under_way) + len(missing))
            here = [expert for expert in addresses if expert not in under_way]
            order = wanted if needs_expert_order else [*here, *under_way, *missing]
            for done, expert in enumerate(order):
                self._begin(layer, missing, under_way, order[done:])
                if not missing:
                    self._prefetcher.begin(moe_index, order[done:])
                slot = self._wait(layer, expert, under_way) if expert in under_way else addresses[expert]
                self._managed += self._lap()
                yield expert, _address(records, expert, slot)
                self._since = time.perf_counter()
            arrived = True
        finally:
            if not arrived:
                self._give_up(layer, under_way)
            cache.evict_to_share(moe_index)
            self._managed += self._lap()

    def _begin(
        self, layer: int, missing: deque[int], under_way: dict[int, tuple[int, int]], kept: Sequence[int]
    ) -> None:
        """Begin to read as many of the missing experts as there is room for. Experts in `kept` are still
        needed.
        """
        cache, moe_index = self._cache, self._moe_index[layer]
        while missing and len(under_way) < self._most:
            count = min(len(missing), self._most - len(under_way))
            if not cache.has_room(1) and not self._pool.make_room(count, moe_index, np.array(kept, np.int32)):
                return
            # A backend's computations may still use evicted slots.
            memory = self._layers[layer].piece_memory
            memory.wait(memory.take_pending())
            expert = missing.popleft()
            ids = np.array([expert], dtype=np.int32)
            slot, begun = int(cache.acquire(moe_index, ids).addresses[0]), False
            try:
                ticket = self._read(layer, expert, slot)
                begun = True
            finally:
                if not begun:
                    cache.evict(moe_index, ids)
            under_way[expert] = slot, ticket

    def _read(self, layer: int, expert: int, slot: int, ahead: bool = False) -> int:
        """Begin to read an expert into the slot at address `slot`. Returns the read's ticket."""
        records = self._records(layer)
        offset, address = records.offset(expert), _address(records, expert, slot)
        return self._reads.begin(records.file, offset, records.nbytes, address, ahead)

    def _read_ahead(self, moe_index: int, expert: int, slot: int) -> int:
        """Begin to read an expert that no pass waits for yet. Returns the read's ticket."""
        return self._read(self._layer_of[moe_index], expert, slot, ahead=True)

    def _wait(self, layer: int, expert: int, under_way: dict[int, tuple[int, int]]) -> int:
        """Wait for an expert that is being read, and return its slot."""
        slot, ticket = under_way[expert]
        self._managed += self._lap()
        try:
            self._reads.wait(ticket)
        finally:
            self._waited += self._lap()
        self._layers[layer].expert_arrived(_address(self._records(layer), expert, slot))
        del under_way[expert]
        return slot

    def _give_up(self, layer: int, under_way: dict[int, tuple[int, int]]) -> None:
        """Wait until all reads have ended, and free the slots of experts that haven't arrived."""
        self._prefetcher.drop()
        if under_way:
            self._cache.evict(self._moe_index[layer], np.array(list(under_way), dtype=np.int32))

    def _observe(self, moe_index: int, routing: Routing, batch: ForwardBatch) -> None:
        """Tell the cache the gates of accepted tokens now, and keep the gates of draft tokens
        until `accept`.
        """
        gates = routing.gates
        self._cache.observe(moe_index, gates[batch.text_rows] if batch.drafted else gates)
        if batch.drafted:
            self._draft_gates[moe_index, : len(batch.drafted)] = gates[batch.drafted]

    def _records(self, layer: int) -> ExpertRecords:
        records = self._layers[layer].source.experts
        assert records is not None
        return records


def _address(records: ExpertRecords, expert: int, slot: int) -> int:
    """The address of an expert in the slot at address `slot`. Its offset within a page is the same as on
    flash.
    """
    return slot + records.offset(expert) % PAGE_BYTES
