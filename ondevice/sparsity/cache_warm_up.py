"""Cache warm-up: reads the likeliest neurons into empty slots, during passes or while the model is idle.

If every neuron fits, all are in memory after as many passes as the model has layers. Reads that a pass waits
for have a higher priority. Neurons of a reservation count as held once all of them have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.flash.reader import FlashReader
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.record_reads import Parts
from ondevice.sparsity.reserved_reads import Reservation, ReservedReads


class CacheWarmUp:
    """Fills spare slots of `cache`, one layer per pass, layer after layer.

    Args:
        layers: the model's layers, in order.
        reader: opened over the bundle's files.
        cache: the cache to fill.
        parts: the parts of each record that are read.
        pass_bytes: most bytes read per pass, or per step while the model is idle.
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
        """Whether a reservation is open. The layers' shares must then not change."""
        return self._reservation is not None

    def collect(self) -> bool:
        """Commit the open reservation if all of its reads have ended. Returns False if a read failed."""
        return self._reservation is None or not self._reads.done() or self.stop()

    def fill(self) -> bool:
        """Do a step of idle work: commit neurons that have arrived, and begin to read more. Returns False if
        all is done.
        """
        if not self.collect():
            return False
        self.begin()
        return self._reservation is not None

    def begin(self) -> None:
        """Begin to read neurons of the next layer that has room, unless a reservation is open."""
        if self._reservation is not None or self._cache.is_full:
            return
        for _ in self._layers:
            layer, self._next = self._next, (self._next + 1) % len(self._layers)
            ids = self._cache.likeliest(layer, self._pass_neurons)
            if len(ids):
                self._reservation = self._reads.begin(self._layers[layer].source.file, layer, ids)
                return

    def stop(self) -> bool:
        """Wait for the open reservation and commit it; slots may be freed afterwards. Returns False if a read
        failed.
        """
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
        """End the reads under way. Their slots are freed with the cache."""
        self._reads.close()
        self._reservation = None
