"""Prefetch: reads neurons of the next layer, chosen by the input of this layer's feed-forward.

The residual stream changes little from one layer to the next (Deja Vu, arXiv 2310.17157), so the next layer's
gate or predictor, applied to the current stream, predicts most of its selection. The highest-scoring absent
neurons are read while this layer and the next one's attention are computed, at a lower priority than reads
that a pass waits for. Once the true selection is known, reads that haven't begun are cancelled. No result
depends on prefetch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ondevice.backends.base import Float32, Int32
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.flash.reader import FlashReader
from ondevice.records import dataclass
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import fires
from ondevice.sparsity.record_reads import Parts
from ondevice.sparsity.reserved_reads import Reservation, ReservedReads

log = logging.getLogger(__name__)

PREFETCH_TOKENS = 16
"""Most tokens of a pass that prefetches. Wider passes read so much of every layer that reads never pause."""
TRIAL_PASSES = 8
"""Passes with prefetch after which its cost is compared with its gain."""
BACK_OFF_PASSES = 120
"""Passes without prefetch before it is tried again."""


@dataclass(frozen=True)
class PrefetchQuality:
    """How much prefetching has gained and cost so far. Neurons are counted once per pass and layer."""

    begun: int = 0
    """Neurons whose prefetch began."""
    used: int = 0
    """Prefetched neurons that were then selected."""
    wasted_bytes: int = 0
    """Bytes of the prefetched neurons that weren't selected."""
    hidden_seconds: float = 0.0
    """Reading time that passes didn't wait for, at the rate of the reads that they waited for."""
    spent_seconds: float = 0.0
    """Time to choose neurons, to wait for prefetches, and to read wasted neurons, as if each wasted read had
    delayed a read that a pass waited for."""


@dataclass
class _Prefetch:
    """The reservation of one layer, and its reads. read: number of its first neurons that will arrive, once
    it is halted.
    """

    reservation: Reservation
    reads: ReservedReads
    read: int | None = None

    def halt(self) -> int:
        """Begin no more reads. Returns the number of neurons that are read or being read."""
        if self.read is None:
            self.read = self.reads.halt()
        return self.read


class Prefetcher:
    """Prefetches a model's neurons, for at most two layers at once.

    A prefetch begins in `prefetch`, starts no more reads once its layer is computed (`commit`), and has ended
    when `arrived` returns.

    Args:
        layers: the model's layers, in order.
        reader: over the bundle's files.
        cache: the cache in which slots are reserved.
        parts: the parts of each record that are read.
        gap_bytes: records with at most this many bytes between them are one read.
        most: most neurons of a layer.
    """

    def __init__(
        self,
        layers: Sequence[FeedForwardLayer],
        reader: FlashReader,
        cache: NeuronCache,
        *,
        parts: Parts,
        gap_bytes: int,
        most: int,
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._most = most
        self._idle = [ReservedReads(reader, cache, parts, gap_bytes) for _ in range(2)]
        self._prefetches: list[_Prefetch] = []
        """Prefetches for the next layer, and for the one after it."""
        self._arriving: _Prefetch | None = None
        """The committed prefetch. Its reservation has the neurons that count as held, and spare slots."""
        self._expected: dict[int, Float32] = {}
        """Highest scores (F,) that drafting computed since the layer was last prefetched, by layer."""
        self._passes = 0
        self._on = True
        self._judged = PrefetchQuality()
        self._chosen_seconds = 0.0
        self.quality = PrefetchQuality()

    @property
    def on(self) -> bool:
        """Whether prefetch is enabled: it backs off when it costs more time than it hides."""
        return self._on

    def wants(self, layer: int, tokens: int) -> bool:
        """Whether `prefetch` would use the scores of this many tokens."""
        return self._on and tokens <= PREFETCH_TOKENS and not self._cache.holds_layer(layer)

    def prefetch(self, layer: int, tokens: int, scores: Callable[[], Float32]) -> None:
        """Begin to read the neurons of a layer with the highest of scores() (T, F) above zero.

        Called before the previous layer selects. That layer's prefetch starts no more reads; those that have
        begun still complete.
        """
        expected = self._expected.pop(layer, None)
        if self._prefetches:
            # A cancelled pass leaves prefetches of other layers.
            for stale in [one for one in self._prefetches if one.reservation.layer != layer - 1]:
                self._prefetches.remove(stale)
                self._release(stale)
        if not self.wants(layer, tokens):
            return
        started = time.perf_counter()
        highest = scores().max(axis=0)
        ids = self._likeliest(layer, highest if expected is None else np.maximum(highest, expected))
        for prefetch in self._prefetches:
            prefetch.halt()
        if len(ids):
            self._begin(layer, ids)
        self._chosen_seconds += time.perf_counter() - started

    def awaits(self, layer: int) -> bool:
        """Whether neurons are being prefetched for the layer that is about to be computed."""
        return bool(self._prefetches) and self._prefetches[0].reservation.layer == layer

    def expect(self, layer: int, scores: Float32) -> None:
        """Record the scores (T, F) of drafting: the next pass will probably need the neurons with a score
        above zero.
        """
        highest, before = scores.max(axis=0), self._expected.get(layer)
        self._expected[layer] = highest if before is None else np.maximum(highest, before)

    def begin_expected(self) -> None:
        """Prefetch the first layer's neurons that drafting selected. Called before a pass."""
        if 0 in self._expected:
            self.prefetch(0, 1, lambda: np.full((1, self._layers[0].source.num_neurons), -np.inf, np.float32))

    def commit(self, layer: int) -> Int32:
        """Give the layer's prefetched neurons their slots, and return their ids.

        They count as held from now on, but `arrived` must return True before one of them is multiplied.
        """
        if not self.awaits(layer):
            return np.zeros(0, dtype=np.int32)
        prefetch = self._prefetches.pop(0)
        reservation, read = prefetch.reservation, prefetch.halt()
        self._cache.release(layer, reservation.slots[read:])
        # A neuron that cache warm-up read meanwhile has two slots; the second is still being written to.
        ids, spare = self._cache.commit(layer, reservation.ids[:read], reservation.slots[:read])
        self._arriving = replace(prefetch, reservation=Reservation(layer, ids, spare))
        return ids

    def arrived(self) -> bool:
        """Wait for the committed neurons. Returns False if a read failed; then all of them are
        absent again.
        """
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return True
        arrived = self._ends(arriving)
        self._cache.release(arriving.reservation.layer, arriving.reservation.slots)
        if not arrived:
            self._cache.evict(arriving.reservation.layer, arriving.reservation.ids)
        return arrived

    def count(self, begun: int, used: int, waited: float, read_seconds: float) -> None:
        """Record the outcome of a layer's prefetch.

        Args:
            begun: neurons prefetched.
            used: those that were selected.
            waited: seconds spent waiting for them.
            read_seconds: recent waiting time per neuron that wasn't prefetched.
        """
        so_far, wasted = self.quality, begun - used
        self.quality = PrefetchQuality(
            so_far.begun + begun,
            so_far.used + used,
            so_far.wasted_bytes + wasted * self._cache.slot_bytes,
            so_far.hidden_seconds + used * read_seconds,
            so_far.spent_seconds + self._chosen_seconds + waited + wasted * read_seconds,
        )
        self._chosen_seconds = 0.0

    def next_pass(self) -> None:
        """Compare, every so often, the cost of prefetch with the reading time that it hid. Called before each
        pass.
        """
        self._passes += 1
        if self._passes < (TRIAL_PASSES if self._on else BACK_OFF_PASSES):
            return
        self._passes = 0
        if not self._on:
            self._on = True
        else:
            hidden = self.quality.hidden_seconds - self._judged.hidden_seconds
            spent = self.quality.spent_seconds - self._judged.spent_seconds
            self._on = hidden >= spent
            if not self._on:
                log.info("prefetching is disabled: it hid %.3f s and took %.3f s", hidden, spent)
        self._judged = self.quality

    def drop(self) -> None:
        """Cancel the prefetches under way and discard the neurons read."""
        while self._prefetches:
            self._release(self._prefetches.pop())

    def close(self) -> None:
        """End the reads under way; their slots are freed with the cache."""
        under_way = [*self._prefetches, *([] if self._arriving is None else [self._arriving])]
        for reads in (*self._idle, *(prefetch.reads for prefetch in under_way)):
            reads.close()

    def _likeliest(self, layer: int, scores: Float32) -> Int32:
        """Ascending ids of absent neurons: those with the highest scores above zero, at most `most`."""
        ids = self._cache.absent(layer)
        ids = ids[fires(scores[ids])]
        if len(ids) > self._most:
            ids = np.sort(ids[np.argpartition(-scores[ids], self._most)[: self._most]])
        return ids.astype(np.int32)

    def _begin(self, layer: int, ids: Int32) -> None:
        reads = self._idle[-1]
        reservation = reads.begin(self._layers[layer].source.file, layer, ids)
        if reservation is not None:
            self._prefetches.append(_Prefetch(reservation, self._idle.pop()))

    def _release(self, prefetch: _Prefetch) -> None:
        prefetch.halt()
        try:
            self._ends(prefetch)
        finally:
            self._cache.release(prefetch.reservation.layer, prefetch.reservation.slots)

    def _ends(self, prefetch: _Prefetch) -> bool:
        """Wait for the reads that have begun. Returns False if one failed."""
        try:
            return prefetch.reads.ends()
        finally:
            self._idle.append(prefetch.reads)
