"""Reads begun from a guess: the next layer's neurons, chosen on what enters this one's feed-forward.

The stream changes little from a layer to the next ("LLM in a flash", arXiv 2312.11514, overlaps transfer and
compute; Deja Vu, arXiv 2310.17157, found the similarity), so the next layer's own gate or predictor on the
stream of now knows most of what it will select. The surest of what isn't in memory is read while this layer
and the next one's attention are computed, behind all that somebody waits for. A guess only warms the cache:
when the true selection comes, what hasn't begun is given up, and nothing else changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ondevice.backends.base import Float32, Int32
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.flash.reader import FlashReader
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import fires
from ondevice.sparsity.record_reads import Parts
from ondevice.sparsity.reserved_reads import Reservation, ReservedReads

log = logging.getLogger(__name__)

PREFETCH_TOKENS = 16
"""Passes of more tokens need so much of every layer that their reads never pause."""
TRIAL_PASSES, REST_PASSES = 8, 120
"""Prefetcher is judged after so many passes, and tried again after so many without it."""


@dataclass(frozen=True)
class PrefetchQuality:
    """What guesses were worth so far. Neurons are counted once per pass and layer.

    begun: read from a guess; used: those of them that the true selection had. wasted_bytes: of the others.
    hidden_seconds: reading time that passes didn't wait for, at the rate of the reads that they did wait for.
    spent_seconds: choosing, waiting for guesses, and wasted reads at the same rate, as if each had kept a
    wanted one waiting.
    """

    begun: int = 0
    used: int = 0
    wasted_bytes: int = 0
    hidden_seconds: float = 0.0
    spent_seconds: float = 0.0


@dataclass
class _Prefetch:
    """One layer's reservation and its reads. Once halted, the first `read` of its neurons come."""

    reservation: Reservation
    reads: ReservedReads
    read: int | None = None

    def halt(self) -> int:
        """Begin no more reads. Returns how many neurons are in memory or on their way."""
        if self.read is None:
            self.read = self.reads.halt()
        return self.read


class Prefetcher:
    """Guesses for one model, at most `most` neurons of a layer at a time, and of two layers at once.

    parts: what is read of records. Begun by `prefetch`, halted when the layer's own turn comes (`commit`),
    and waited for by `arrived`.
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
        """Of a layer whose turn is about to come, and of the one behind it."""
        self._arriving: _Prefetch | None = None
        """Adopted: its reservation has the neurons that are held, and the slots that are claimed still."""
        self._expected: dict[int, Float32] = {}
        """By layer, the highest scores (F,) that drafting has seen since the layer was last prefetched."""
        self._passes = 0
        self._on = True
        self._judged = PrefetchQuality()
        self._chosen_seconds = 0.0
        self.quality = PrefetchQuality()

    @property
    def on(self) -> bool:
        """Whether guesses are made: not as long as they have lately cost more than they hid."""
        return self._on

    def wants(self, layer: int, tokens: int) -> bool:
        """Whether scores of so many tokens are of use to a layer."""
        return self._on and tokens <= PREFETCH_TOKENS and not self._cache.holds_layer(layer)

    def prefetch(self, layer: int, tokens: int, scores: Callable[[], Float32]) -> None:
        """Begin to read what scores() (T, F) selects of a layer, the highest scores first.

        Called before the layer ahead of it selects, whose own guess is halted: what has begun still comes.
        """
        expected = self._expected.pop(layer, None)
        if self._prefetches:
            # A pass that was given up leaves others behind.
            for stale in [one for one in self._prefetches if one.reservation.layer != layer - 1]:
                self._prefetches.remove(stale)
                self._release(stale)
        if not self.wants(layer, tokens):
            return
        started = time.perf_counter()
        highest = scores().max(axis=0)
        ids = self._surest(layer, highest if expected is None else np.maximum(highest, expected))
        for prefetch in self._prefetches:
            prefetch.halt()
        if len(ids):
            self._begin(layer, ids)
        self._chosen_seconds += time.perf_counter() - started

    def awaits(self, layer: int) -> bool:
        """Whether some of the layer's neurons, whose turn has come, are read from a guess."""
        return bool(self._prefetches) and self._prefetches[0].reservation.layer == layer

    def expect(self, layer: int, scores: Float32) -> None:
        """Drafting selects of a layer what has scores (T, F) above zero: the next pass will want it."""
        highest, before = scores.max(axis=0), self._expected.get(layer)
        self._expected[layer] = highest if before is None else np.maximum(highest, before)

    def begin_expected(self) -> None:
        """A pass is about to begin: read what it is expected to want of the first layer."""
        if 0 in self._expected:
            self.prefetch(0, 1, lambda: np.full((1, self._layers[0].source.num_neurons), -np.inf, np.float32))

    def commit(self, layer: int) -> Int32:
        """The layer's turn has come: its neurons that are read from a guess, which count as held from now on.

        `arrived` must hold before one of them is multiplied.
        """
        if not self.awaits(layer):
            return np.zeros(0, dtype=np.int32)
        prefetch = self._prefetches.pop(0)
        reservation, read = prefetch.reservation, prefetch.halt()
        self._cache.release(layer, reservation.slots[read:])
        # What was filled ahead meanwhile is there twice; the second is being written to.
        ids, spare = self._cache.commit(layer, reservation.ids[:read], reservation.slots[:read])
        self._arriving = replace(prefetch, reservation=Reservation(layer, ids, spare))
        return ids

    def arrived(self) -> bool:
        """Wait for what was adopted. False if some of it can't be read: all of it is then absent again."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return True
        arrived = self._ends(arriving)
        self._cache.release(arriving.reservation.layer, arriving.reservation.slots)
        if not arrived:
            self._cache.evict(arriving.reservation.layer, arriving.reservation.ids)
        return arrived

    def count(self, begun: int, used: int, waited: float, read_seconds: float) -> None:
        """What became of a layer's guess: read_seconds is what a wanted record has lately taken."""
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
        """A pass begins: now and then, judge what prefetching was worth."""
        self._passes += 1
        if self._passes < (TRIAL_PASSES if self._on else REST_PASSES):
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
        """Give up the guesses under way, with what they have read."""
        while self._prefetches:
            self._release(self._prefetches.pop())

    def close(self) -> None:
        """End the reads under way; their slots are given back with the cache."""
        under_way = [*self._prefetches, *([] if self._arriving is None else [self._arriving])]
        for reads in (*self._idle, *(prefetch.reads for prefetch in under_way)):
            reads.close()

    def _surest(self, layer: int, scores: Float32) -> Int32:
        """Ascending ids of the absent neurons with the highest scores above zero, `most` of them at most."""
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
        """Whether all that was begun has come."""
        try:
            return prefetch.reads.ends()
        finally:
            self._idle.append(prefetch.reads)
