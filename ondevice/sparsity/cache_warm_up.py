"""Neurons that nobody has asked for yet, read while others are multiplied or while nothing is asked at all,
into slots that would stay empty.

A cache with room fills sooner than the text asks for its neurons, the likeliest first; where every neuron
fits, all are there after as many passes as the model has layers. These reads give way to those that a pass
waits for, and what they bring counts only once all of it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.flash.reader import FlashReader
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.record_reads import Parts
from ondevice.sparsity.reserved_reads import Reservation, ReservedReads


class CacheWarmUp:
    """Fills what is spare in `cache`, one layer per pass, in turn.

    parts: what is read of their records. pass_bytes: read per pass, or in a step while nothing is asked, at
    most.
    """

    def __init__(
        self,
        layers: Sequence[FeedForwardLayer],
        reader: FlashReader,
        cache: NeuronCache,
        parts: Parts,
        pass_bytes: int,
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._pass_neurons = max(1, pass_bytes // cache.slot_bytes)
        self._reads = ReservedReads(reader, cache, parts, gap_bytes=0)
        self._reservation: Reservation | None = None
        self._next = 0

    @property
    def under_way(self) -> bool:
        """Whether slots are claimed: the layers' shares must stay as they are."""
        return self._reservation is not None

    def collect(self) -> bool:
        """Take in what has been read beside the last passes, if all of it is there. False if it failed."""
        return self._reservation is None or not self._reads.done() or self.stop()

    def fill(self) -> bool:
        """While nothing is asked: take in what is there, and go on. False where that leads no further."""
        if not self.collect():
            return False
        self.begin()
        return self._reservation is not None

    def begin(self) -> None:
        """Outside of passes: begin with the next layer that has room, if nothing is under way."""
        if self._reservation is not None or self._cache.is_full:
            return
        for _ in self._layers:
            layer, self._next = self._next, (self._next + 1) % len(self._layers)
            ids = self._cache.likeliest(layer, self._pass_neurons)
            if len(ids):
                self._reservation = self._reads.begin(self._layers[layer].source.file, layer, ids)
                return

    def stop(self) -> bool:
        """Take in what is under way, waiting for it; slots may move or go after that. False if it failed."""
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return True
        arrived, spare = False, reservation.slots
        try:
            arrived = self._reads.ends()
        finally:
            if arrived:
                _, spare = self._cache.commit(reservation.layer, reservation.ids, reservation.slots)
            self._cache.release(reservation.layer, spare)
        return arrived

    def close(self) -> None:
        """End the reads under way; their slots are given back with the cache."""
        self._reads.close()
        self._reservation = None
