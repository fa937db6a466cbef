"""Low-priority reads of neurons into reserved slots: for prefetch and cache warm-up."""

from __future__ import annotations

import logging

from ondevice.backends.base import Int32
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.records import dataclass
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.record_reads import Parts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reservation:
    """Neurons of one layer, ascending, and the slots that they get once read."""

    layer: int
    ids: Int32
    slots: Int32


class ReservedReads:
    """Reads one reservation at a time, with a lower priority than reads that a pass waits for.

    parts: the parts of each record that are read. gap_bytes: records with at most this many bytes between
    them are one read.
    """

    def __init__(self, reader: FlashReader, cache: NeuronCache, parts: Parts, gap_bytes: int) -> None:
        self._reads = _native.RecordBatch(reader.native, urgent=False)
        self._cache = cache
        self._parts = parts
        self._gap_bytes = gap_bytes

    def begin(self, file: int, layer: int, ids: Int32) -> Reservation | None:
        """Reserve slots for absent neurons of a layer and begin to read them. Returns None if there is no
        memory.
        """
        try:
            slots, addresses = self._cache.reserve(layer, len(ids))
        except MemoryError as error:
            log.info("no memory to read ahead into: %s", error)
            return None
        started = False
        try:
            self._reads.start(file, self._parts.first, self._parts.count, ids, addresses, self._gap_bytes)
            started = True
        finally:
            if not started:
                self._cache.release(layer, slots)
        return Reservation(layer, ids, slots)

    def done(self) -> bool:
        """Whether all reads have ended, so that `ends` returns without waiting."""
        return self._reads.done()

    def halt(self) -> int:
        """Begin no more reads. Returns how many of the first neurons are read or being read."""
        return self._reads.halt()

    def ends(self) -> bool:
        """Wait for the reads that have begun; afterwards no slot is written to. Returns False if a read
        failed.
        """
        try:
            self._reads.finish()
        except FlashReadError as error:
            # A pass that needs these neurons reads them again, and raises.
            log.info("reading ahead failed: %s", error)
            return False
        return True

    def close(self) -> None:
        """End the reads under way; their slots are freed with the cache."""
        self._reads.close()
