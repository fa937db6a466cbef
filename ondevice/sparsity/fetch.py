"""Selected neurons, from the cache or from flash, in batches that are in memory when they are handed out.

While one batch is multiplied, the next one's records are read. A record that can't be read gives its slots
back: nothing is ever multiplied that hasn't arrived whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from ondevice.backends.base import Float32, Int32
from ondevice.backends.cpu import BLOCK_NEURONS, CpuFeedForward
from ondevice.errors import FlashReadError, OndeviceError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.sparsity.neuron_cache import Addresses, NeuronCache, Placement
from ondevice.sparsity.policies import selected
from ondevice.sparsity.warming import Warming

WHOLE_RECORD, UP_AND_DOWN = 0, 1
"""The part of a neuron's record from which on it is read. Where gates select, gate rows are in memory."""
GAP_BYTES = 16 << 10
"""Bytes between two records up to which reading through costs less than a second read."""
BATCHES = 2


@dataclass(frozen=True)
class _Batch:
    ids: Int32
    placement: Placement
    reads: _native.RecordBatch | None


class NeuronFetcher:
    """Feeds the layers of a model from `cache`, at most `batch` neurons at a time."""

    def __init__(
        self, layers: Sequence[CpuFeedForward], reader: FlashReader, cache: NeuronCache, batch: int
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._batch = batch
        self._reads = deque(_native.RecordBatch(reader.native, urgent=True) for _ in range(BATCHES))
        predicted = any(layer.selector is not None and layer.selector.predicted for layer in layers)
        self._first_part = WHOLE_RECORD if predicted else UP_AND_DOWN
        self._warming = Warming(layers, reader, cache, self._first_part)
        for index, layer in enumerate(layers):
            layer.selected = partial(self._selected, index)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that exist."""
        return self._cache.nbytes

    @property
    def lookups(self) -> int:
        """Neurons that passes have multiplied, counted once per pass and layer."""
        return self._cache.lookups

    @property
    def hits(self) -> int:
        """Those of them that were in memory when the pass came to their layer."""
        return self._cache.hits

    def resize(self, lent: Sequence[int]) -> None:
        """Keep to so many segments in all: those above go back at once, those below come when needed."""
        self._warming.stop()
        self._cache.resize(sum(lent))

    def close(self) -> None:
        """Give back the slots, after the reads under way. The layers then refuse to be multiplied."""
        self._warming.close()
        for reads in self._reads:
            reads.close()
        self._cache.close()
        for layer in self._layers:
            layer.selected = _closed

    def _selected(self, index: int, scores: Float32) -> Iterator[tuple[Int32, Addresses]]:
        """Neurons with a score above zero for any token of scores (T, F): ascending ids, where they lie.

        Each batch is valid until the next.
        """
        cache = self._cache
        if index == 0:
            self._warming.collect()
            cache.divide(len(scores), keep=self._warming.under_way)
            self._warming.begin()
        cache.observe(index, scores)
        waiting = deque(self._cut(selected(scores)))
        under_way: deque[_Batch] = deque()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < BATCHES:
                    under_way.append(self._begin(index, waiting.popleft()))
                batch = under_way[0]
                if batch.reads is not None:
                    batch.reads.finish()
                under_way.popleft()
                yield batch.ids, batch.placement.addresses
                cache.settle(index, under_way[0].ids if under_way else None)
        finally:
            for batch in under_way:
                self._give_up(index, batch)
            cache.settle(index)

    def _begin(self, index: int, ids: Int32) -> _Batch:
        placement = self._cache.place(index, ids)
        missing = placement.missing
        if not len(missing):
            return _Batch(ids, placement, None)
        reads = self._reads[0]
        self._reads.rotate()
        file, started = self._layers[index].source.file, False
        try:
            reads.start(file, self._first_part, ids[missing], placement.addresses[missing], GAP_BYTES)
            started = True
        finally:
            if not started:
                self._cache.forget(index, ids[missing])
        return _Batch(ids, placement, reads)

    def _give_up(self, index: int, batch: _Batch) -> None:
        if batch.reads is not None:
            with suppress(FlashReadError, ValueError):
                batch.reads.finish()
            self._cache.forget(index, batch.ids[batch.placement.missing])

    def _cut(self, ids: Int32) -> Iterator[Int32]:
        """Pieces of at most `batch` ids; a block of 64 neurons is never cut, as it is summed as one."""
        start = 0
        while start < len(ids):
            stop = min(start + self._batch, len(ids))
            if stop < len(ids):
                stop = int(np.searchsorted(ids, ids[stop] // BLOCK_NEURONS * BLOCK_NEURONS))
            yield ids[start:stop]
            start = stop


def _closed(scores: Float32) -> Iterator[tuple[Int32, Addresses]]:
    raise OndeviceError("the model's feed-forward memory was given back: it is closed")
