"""The sparse `NeuronSource`: provides selected neurons from the cache or from flash, in batches that are in
memory.

While one batch is multiplied, the next one's records are read. If a record can't be read, its batch's slots
are freed: a neuron is never multiplied before all of its record has arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32, Int32
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS, FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import Batches, ResidentLayer
from ondevice.errors import FlashReadError
from ondevice.flash.cost_model import CostModel
from ondevice.flash.rate_check import RateCheck
from ondevice.flash.reader import FlashReader
from ondevice.records import dataclass
from ondevice.sparsity.cache_warm_up import CacheWarmUp
from ondevice.sparsity.cached_source import CachedSource
from ondevice.sparsity.neuron_cache import NeuronCache, Placement
from ondevice.sparsity.policies import DEFAULT_POLICY, PolicyName, selected
from ondevice.sparsity.prefetch import PREFETCH_TOKENS, Prefetcher, PrefetchQuality
from ondevice.sparsity.record_reads import Parts, RecordReads, one_by_one

FULL_RECORD, UP_AND_DOWN = 0, 1
"""First part of a neuron's record that is read. If gates select, gate rows are in memory already."""
BATCHES = 2
"""Batches that are read at once."""
WARM_UP_SECONDS = 0.04
"""Reading time of cache warm-up per pass, in seconds."""
WARM_UP_READ_BYTES = 64 << 10
"""Bytes of a typical warm-up read, a run of records."""
READ_WEIGHT = 0.1
"""EMA weight of the newest read time."""


@dataclass(frozen=True)
class _Batch:
    ids: Int32
    placement: Placement
    reads: RecordReads | None


@dataclass(frozen=True)
class FetchOptions:
    """Options for how selected neurons are kept and read. They affect the time of passes, not
    their results.
    """

    policy: PolicyName = DEFAULT_POLICY
    """The cache's eviction policy."""
    keep: bool = True
    """Let neurons stay in memory after the pass that read them, in dense mode too."""
    fill_ahead: bool = True
    """Warm the cache up: read the likeliest neurons into spare slots."""
    prefetch: bool = True
    """Begin to read the next layer's neurons before its selection is known."""
    bundled: bool = True
    """Read all parts of a neuron in one read, with near neighbours. Otherwise each checked part (a row, in
    files that are checked by rows) is one read, except in prefetch and warm-up."""


DEFAULT_FETCH = FetchOptions()


class NeuronFetcher(CachedSource):
    """Provides a model's layers with neurons from `cache`, and from flash if they aren't cached.

    Args:
        layers: the model's layers, in order; each gets this object as its `neurons`.
        reader: over the bundle's files.
        cache: owned by this object from now on; `close` closes it.
        part_bytes: sizes of the checked parts of a record.
        batch: most neurons in a batch.
        prefetched: most neurons of the next layer that are prefetched.
        costs: cost model of the device that is read.
        options: how neurons are kept and read.
    """

    def __init__(
        self,
        layers: Sequence[FeedForwardLayer],
        reader: FlashReader,
        cache: NeuronCache,
        *,
        part_bytes: Sequence[int],
        batch: int,
        prefetched: int,
        costs: CostModel,
        options: FetchOptions,
    ) -> None:
        self._widest = max(layer.source.num_neurons for layer in layers)
        self._batch = batch
        predicted = any(layer.selector is not None and layer.selector.predicted for layer in layers)
        first = FULL_RECORD if predicted else UP_AND_DOWN
        wanted = Parts(first, len(part_bytes) - first)
        self._rate_check = RateCheck(reader, costs, len(layers))
        gap_bytes = costs.gap_bytes(reader.threads)
        groups = [wanted] if options.bundled else one_by_one(wanted, part_bytes)
        self._reads = deque(
            RecordReads(reader, groups, gap_bytes if options.bundled else 0) for _ in range(BATCHES)
        )
        warm_bytes = int(costs.bytes_per_second(WARM_UP_READ_BYTES, reader.threads) * WARM_UP_SECONDS)
        self._warm_up = CacheWarmUp(layers, reader, cache, wanted, warm_bytes)
        self._prefetcher = Prefetcher(
            layers, reader, cache, parts=wanted, gap_bytes=gap_bytes, most=prefetched
        )
        self._fill_ahead = options.keep and options.fill_ahead
        self._prefetched_hits = 0
        self._draft_scores: list[NDArray[np.float16]] = []
        """By layer, (draft tokens, F) scores of the last pass's draft tokens, in the order of its batch."""
        self._read_seconds = 0.0
        """EMA of the waiting time per missing neuron, in seconds."""
        self._prefetches = options.prefetch
        super().__init__(layers, cache)

    @property
    def hits(self) -> int:
        """Number of neurons that were already in memory when the pass came to their layer. Prefetched ones
        don't count.
        """
        return self._cache.hits - self._prefetched_hits

    @property
    def prefetching(self) -> PrefetchQuality:
        """Hits, waste and time of prefetching so far."""
        return self._prefetcher.quality

    def resize(self, quota: Sequence[int]) -> None:
        """Keep to sum(quota) segments. Surplus segments are freed now; missing ones are made when needed."""
        self._prefetcher.drop()
        self._warm_up.stop()
        self._cache.resize(sum(quota))

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the cache about the accepted draft tokens."""
        accepted = batch.accepted(rows)
        if accepted and not self._cache.holds_all:
            for layer in range(len(self._layers)):
                self._cache.observe(layer, self._draft_scores[layer][accepted].astype(np.float32))

    def fill(self) -> bool:
        """Do a step of idle work: warm the cache up a little further. Returns False if nothing is
        left to do.
        """
        return self._fill_ahead and self._warm_up.fill()

    def close(self) -> None:
        """Wait for the reads under way and free the slots. Layers then raise if they are multiplied."""
        self._prefetcher.close()
        self._warm_up.close()
        for reads in self._reads:
            reads.close()
        self._close_cache()

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Prepare for a pass: manage the cache, and prefetch neurons of the first layer that drafting
        selected but lacked.
        """
        self._rate_check.end_pass()
        self._prefetcher.begin_expected()
        if len(batch.drafted) > (len(self._draft_scores[0]) if self._draft_scores else 0):
            self._draft_scores = [
                np.zeros((len(batch.drafted), layer.source.num_neurons), dtype=np.float16)
                for layer in self._layers
            ]
        if not (self._cache.holds_all and self._cache.is_full):
            self._since = time.perf_counter()
            self._manage_cache(len(batch.tokens))
            self._managed += self._lap()

    def wants_prefetch(self, layer: int, rows: int) -> bool:
        return self._prefetches and self._prefetcher.wants(layer, rows)

    def prefetch(self, layer: int, rows: int, scores: Callable[[], Float32]) -> None:
        if self._prefetches:
            self._prefetcher.prefetch(layer, rows, scores)

    def begin_layer(self, layer: int, batch: ForwardBatch) -> ResidentLayer | None:
        """The layer's neurons, if all are in memory and nothing needs their scores; otherwise None."""
        cache = self._cache
        if batch.resident_only or not cache.holds_all or not cache.holds_layer(layer):
            return None
        return None if self._prefetcher.awaits(layer) else ResidentLayer(*cache.places(layer), cache.count)

    def select(self, layer: int, scores: Float32, batch: ForwardBatch) -> Batches:
        """Yields batches of ascending ids. While one is multiplied, the next one's records are read."""
        cache, num_exact_rows = self._cache, batch.num_exact_rows
        if batch.resident_only:
            if not cache.holds_layer(layer):
                self._prefetcher.expect(layer, scores)
            held = cache.held(layer, selected(scores))
            yield held, cache.lie_at(layer, held)
            return
        self._since = time.perf_counter()
        if not cache.holds_all:
            self._observe(layer, scores[:num_exact_rows], batch)
        ids = selected(scores[:num_exact_rows])
        if num_exact_rows < len(scores):
            ids = np.union1d(ids, cache.held(layer, selected(scores[num_exact_rows:])))
        prefetched = self._prefetcher.commit(layer)
        if cache.holds_layer(layer) and not len(prefetched):
            yield from self._resident_batch(layer, ids)
            return
        waiting, done = deque(self._cut(ids)), 0
        under_way: deque[_Batch] = deque()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < BATCHES:
                    under_way.append(self._begin(layer, waiting.popleft()))
                if not self._prefetched_arrived(ids, prefetched):
                    while under_way:
                        self._give_up(layer, under_way.popleft())
                    waiting, prefetched = deque(self._cut(ids)), prefetched[:0]
                    continue
                prefetched = prefetched[:0]
                first = under_way[0]
                if first.reads is not None:
                    self._wait(first.reads, len(first.placement.missing))
                under_way.popleft()
                self._managed += self._lap()
                yield first.ids, first.placement.addresses
                self._since = time.perf_counter()
                done += len(first.ids)
                if waiting and not cache.has_room(len(waiting[0])):
                    cache.evict_to_share(layer, ids[done:])
        finally:
            self._prefetched_arrived(ids, prefetched)
            for begun in under_way:
                self._give_up(layer, begun)
            cache.evict_to_share(layer)
            self._managed += self._lap()

    def _resident_batch(self, layer: int, ids: Int32) -> Batches:
        """Yields a single batch with all selected neurons, for a layer whose neurons are all in memory."""
        self._prefetcher.arrived()
        placement = self._cache.acquire(layer, ids)
        self._managed += self._lap()
        yield ids, placement.addresses
        self._since = time.perf_counter()
        self._cache.evict_to_share(layer)
        self._managed += self._lap()

    def _manage_cache(self, tokens: int) -> None:
        """Prepare the cache for a pass over `tokens` tokens: divide the slots among layers, and continue
        cache warm-up.
        """
        self._prefetcher.next_pass()
        # A long chunk needs nearly every neuron, so neurons of warm-up would be read twice.
        is_long = tokens > PREFETCH_TOKENS
        if is_long:
            self._warm_up.stop()
        else:
            self._warm_up.collect()
        self._cache.divide(tokens, keep=self._warm_up.under_way)
        if self._fill_ahead and not is_long:
            self._warm_up.begin()

    def _observe(self, layer: int, scores: Float32, batch: ForwardBatch) -> None:
        """Tell the cache the scores of accepted tokens now, and keep the scores of draft tokens until
        `accept`.
        """
        self._cache.observe(layer, scores[batch.text_rows] if batch.drafted else scores)
        if batch.drafted:
            with np.errstate(over="ignore"):
                self._draft_scores[layer][: len(batch.drafted)] = scores[batch.drafted]

    def _wait(self, reads: RecordReads, missing: int) -> None:
        self._managed += self._lap()
        try:
            reads.finish()
        finally:
            waited = self._lap()
            self._waited += waited
        self._read_seconds += READ_WEIGHT * (waited / missing - self._read_seconds)

    def _prefetched_arrived(self, ids: Int32, prefetched: Int32) -> bool:
        """Wait for the prefetched neurons. Returns False if a read failed; then they are absent again."""
        if not len(prefetched):
            return self._prefetcher.arrived()
        self._managed += self._lap()
        arrived = self._prefetcher.arrived()
        waited = self._lap()
        self._waited += waited
        used = 0
        if arrived:
            wanted = np.zeros(self._widest, dtype=bool)
            wanted[ids] = True
            used = int(np.count_nonzero(wanted[prefetched]))
        self._prefetched_hits += used
        self._prefetcher.count(len(prefetched), used, waited, self._read_seconds)
        return arrived

    def _begin(self, layer: int, ids: Int32) -> _Batch:
        placement = self._cache.acquire(layer, ids)
        missing = placement.missing
        if not len(missing):
            return _Batch(ids, placement, None)
        reads = self._reads[0]
        self._reads.rotate()
        file, started = self._layers[layer].source.file, False
        try:
            reads.start(file, ids[missing], placement.addresses[missing])
            started = True
        finally:
            if not started:
                self._cache.evict(layer, ids[missing])
        return _Batch(ids, placement, reads)

    def _give_up(self, layer: int, batch: _Batch) -> None:
        if batch.reads is not None:
            with suppress(FlashReadError, ValueError):
                batch.reads.finish()
            self._cache.evict(layer, batch.ids[batch.placement.missing])

    def _cut(self, ids: Int32) -> Iterator[Int32]:
        """Yields pieces of at most `batch` ids. A block of 64 neurons is never split, because it is summed as
        one.
        """
        start = 0
        while start < len(ids):
            stop = min(start + self._batch, len(ids))
            if stop < len(ids):
                stop = int(np.searchsorted(ids, ids[stop] // BLOCK_NEURONS * BLOCK_NEURONS))
            yield ids[start:stop]
            start = stop
