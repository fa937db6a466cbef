"""Neurons that nobody has asked for yet, read while others are multiplied or while nothing is asked at all,
into slots that would stay empty.

A cache with room fills sooner than the text asks for its neurons, the likeliest first; where every neuron
fits, all are there after as many passes as the model has layers. These reads give way to those that a pass
waits for, and what they bring counts only once all of it has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.backends.base import Int32
from ondevice.backends.cpu import CpuFeedForward
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.record_reads import Parts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Claim:
    layer: int
    ids: Int32
    slots: Int32


class Warming:
    """Fills what is spare in `cache`, one layer per pass, in turn.

    parts: what is read of their records. pass_bytes: read per pass, or in a step while nothing is asked, at
    most.
    """

    def __init__(
        self,
        layers: Sequence[CpuFeedForward],
        reader: FlashReader,
        cache: NeuronCache,
        parts: Parts,
        pass_bytes: int,
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._parts = parts
        self._pass_neurons = max(1, pass_bytes // cache.slot_bytes)
        self._reads = _native.RecordBatch(reader.native, urgent=False)
        self._claim: _Claim | None = None
        self._next = 0

    @property
    def under_way(self) -> bool:
        """Whether slots are claimed: the layers' shares must stay as they are."""
        return self._claim is not None

    def collect(self) -> bool:
        """Take in what has been read beside the last passes, if all of it is there. False if it failed."""
        return self._claim is None or not self._reads.done() or self.stop()

    def fill(self) -> bool:
        """While nothing is asked: take in what is there, and go on. False where that leads no further."""
        if not self.collect():
            return False
        self.begin()
        return self._claim is not None

    def begin(self) -> None:
        """Outside of passes: begin with the next layer that has room, if nothing is under way."""
        if self._claim is not None:
            return
        for _ in self._layers:
            layer, self._next = self._next, (self._next + 1) % len(self._layers)
            ids = self._cache.likeliest(layer, self._pass_neurons)
            if len(ids):
                break
        else:
            return
        try:
            slots, addresses = self._cache.claim(layer, len(ids))
        except MemoryError as error:
            log.info("no memory to read ahead into: %s", error)
            return
        self._claim = _Claim(layer, ids, slots)
        started = False
        try:
            file, parts = self._layers[layer].source.file, self._parts
            self._reads.start(file, parts.first, parts.count, ids, addresses, 0)
            started = True
        finally:
            if not started:
                self._cache.release(layer, slots)
                self._claim = None

    def stop(self) -> bool:
        """Take in what is under way, waiting for it; slots may move or go after that. False if it failed."""
        claim, self._claim = self._claim, None
        if claim is None:
            return True
        arrived = False
        try:
            self._reads.finish()
            arrived = True
        except FlashReadError as error:
            # Nobody asked for these; whoever does will read them again and be told.
            log.info("reading ahead failed: %s", error)
        finally:
            if arrived:
                _, spare = self._cache.adopt(claim.layer, claim.ids, claim.slots)
                self._cache.release(claim.layer, spare)
            else:
                self._cache.release(claim.layer, claim.slots)
        return arrived

    def close(self) -> None:
        """End the reads under way; their slots are given back with the cache."""
        self._reads.close()
        self._claim = None
