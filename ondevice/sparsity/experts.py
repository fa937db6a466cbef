"""The `NeuronSource` of experts: those that a pass chose, from the cache or from flash.

An expert is one run of records, read in one piece straight into its slot, and multiplied there. Those in
memory come first, or, where they have to come in order, while the next ones are read. If one can't be read,
its slot is freed: an expert is never multiplied before it has arrived whole.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import ClosedNeurons, NeuronSource, Segment
from ondevice.backends.routing import Routing
from ondevice.bundle.layout import DATA_OFFSET
from ondevice.errors import OndeviceError
from ondevice.experts_spec import ExpertsSpec
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.prefetch import PrefetchQuality
from ondevice.stats import PassTimes
from ondevice.units import PAGE_BYTES


class ExpertFetcher(NeuronSource):
    """Provides a model's layers with experts from `cache`, and from flash if they aren't cached.

    Args:
        layers: the model's layers, in order; each gets this object as its `neurons`.
        reader: over the bundle's files.
        cache: of experts; owned by this object from now on, and closed by `close`.
        experts: what the layers' experts are.
        most: most experts that are read at once: the cache's reserve.
    """

    def __init__(
        self,
        layers: Sequence[FeedForwardLayer],
        reader: FlashReader,
        cache: NeuronCache,
        experts: ExpertsSpec,
        most: int,
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._experts = experts
        self._most = most
        self._reads = _native.RangeReads(reader.native)
        self._draft_gates: NDArray[np.float16] = np.zeros((0, 0, 0), dtype=np.float16)
        """(layers, draft tokens, E) gates of the last pass's draft tokens, in the order of its batch."""
        self._since = 0.0
        self._waited = self._managed = 0.0
        for layer in layers:
            layer.neurons = self

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that exist."""
        return self._cache.nbytes

    @property
    def filled_bytes(self) -> int:
        """Bytes of the slots that exist, as slots are made when needed. Safe from any thread."""
        return self._cache.nbytes

    @property
    def lookups(self) -> int:
        """Experts that passes have multiplied, counted once per pass and layer."""
        return self._cache.lookups

    @property
    def hits(self) -> int:
        """Lookups whose expert was in memory when the pass came to its layer."""
        return self._cache.hits

    @property
    def times(self) -> PassTimes:
        return PassTimes(self._waited, self._managed)

    @property
    def prefetching(self) -> PrefetchQuality:
        """Nothing is prefetched."""
        return PrefetchQuality()

    def resize(self, quota: Sequence[int]) -> None:
        """Keep to sum(quota) segments. Surplus ones are freed now; missing ones are made when needed."""
        self._cache.resize(sum(quota))

    def fill(self) -> bool:
        """Nothing is read while the model is idle."""
        return False

    def close(self) -> None:
        """Wait for the reads under way and free the slots. The layers then refuse to be multiplied."""
        self._reads.close()
        self._cache.close()
        for layer in self._layers:
            layer.neurons = ClosedNeurons()

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Divide the slots among layers, if it is time."""
        if batch.draft_rows > self._draft_gates.shape[1]:
            shape = len(self._layers), batch.draft_rows, self._experts.count
            self._draft_gates = np.zeros(shape, dtype=np.float16)
        self._since = time.perf_counter()
        self._cache.divide(len(batch.tokens))
        self._managed += self._lap()

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the cache about the accepted draft tokens."""
        accepted = [row - batch.text_rows for row in rows if row >= batch.text_rows]
        if accepted and not self._cache.holds_all:
            for layer in range(len(self._layers)):
                self._cache.observe(layer, self._draft_gates[layer, accepted].astype(np.float32))

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes | Segment]:
        """No neurons: those that aren't an expert's stay in memory."""
        return ()

    def experts(
        self, layer: int, routing: Routing, batch: ForwardBatch, in_order: bool
    ) -> Iterator[tuple[int, int]]:
        if batch.resident_only or batch.stream_rows:
            raise OndeviceError("experts can't be estimated from those in memory alone")
        self._since = time.perf_counter()
        cache = self._cache
        if not cache.holds_all:
            self._observe(layer, routing, batch)
        ids = routing.experts
        held = cache.held(layer, ids)
        addresses = dict(zip(held.tolist(), cache.acquire(layer, held).addresses.tolist(), strict=True))
        wanted: list[int] = ids.tolist()
        missing = deque(expert for expert in wanted if expert not in addresses)
        order = wanted if in_order else [*addresses, *missing]
        under_way: deque[tuple[int, int, int]] = deque()
        arrived = False
        try:
            for done, expert in enumerate(order):
                self._begin(layer, missing, under_way, order[done:])
                address = addresses[expert] if expert in addresses else self._next(under_way)
                address += self._phase(layer, expert)
                self._managed += self._lap()
                yield expert, address
                self._since = time.perf_counter()
            arrived = True
        finally:
            if not arrived:
                self._give_up(layer, under_way)
            cache.evict_to_share(layer)
            self._managed += self._lap()

    def _begin(
        self, layer: int, missing: deque[int], under_way: deque[tuple[int, int, int]], kept: Sequence[int]
    ) -> None:
        """Begin to read as many of the missing experts as there is room for; `kept` are still needed."""
        cache = self._cache
        while missing and len(under_way) < self._most:
            if not cache.has_room(1):
                cache.evict_to_share(layer, np.array(kept, dtype=np.int32))
                if not cache.has_room(1):
                    return
            expert = missing.popleft()
            own = np.array([expert], dtype=np.int32)
            slot, begun = int(cache.acquire(layer, own).addresses[0]), False
            try:
                offset = self._offset(layer, expert)
                file, target = self._layers[layer].source.file, slot + offset % PAGE_BYTES
                ticket = self._reads.begin(file, offset, self._expert_bytes(layer), target)
                begun = True
            finally:
                if not begun:
                    cache.evict(layer, own)
            under_way.append((expert, slot, ticket))

    def _next(self, under_way: deque[tuple[int, int, int]]) -> int:
        """The slot of the first expert under way, once it has arrived."""
        _, slot, ticket = under_way[0]
        self._managed += self._lap()
        try:
            self._reads.wait(ticket)
        finally:
            self._waited += self._lap()
        under_way.popleft()
        return slot

    def _give_up(self, layer: int, under_way: deque[tuple[int, int, int]]) -> None:
        """Wait until nothing is written to any more, and free the slots of what hasn't arrived."""
        self._reads.cancel()
        if under_way:
            self._cache.evict(layer, np.array([expert for expert, _, _ in under_way], dtype=np.int32))

    def _observe(self, layer: int, routing: Routing, batch: ForwardBatch) -> None:
        """Tell the cache the gates of the text's tokens now; keep those of draft tokens until `accept`."""
        gates, text_rows = routing.gates, batch.text_rows
        self._cache.observe(layer, gates[:text_rows])
        if batch.draft_rows:
            rows = range(len(gates)) if batch.unpruned_rows is None else batch.unpruned_rows
            with np.errstate(over="ignore"):
                self._draft_gates[layer, [row - text_rows for row in rows[text_rows:]]] = gates[text_rows:]

    def _expert_bytes(self, layer: int) -> int:
        return self._experts.neurons * self._layers[layer].source.layout.stride

    def _offset(self, layer: int, expert: int) -> int:
        """First byte of an expert in its layer's file."""
        source = self._layers[layer].source
        return DATA_OFFSET + source.num_neurons * source.layout.stride + expert * self._expert_bytes(layer)

    def _phase(self, layer: int, expert: int) -> int:
        """Bytes from the begin of an expert's slot to the expert, which lies in its page as on flash."""
        return self._offset(layer, expert) % PAGE_BYTES

    def _lap(self) -> float:
        """Seconds since the last lap."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before
