"""The dense `NeuronSource`: layers hold segments of neurons up to a quota, and all other neurons come from
flash.

A segment is a contiguous range of one layer's neurons, in the form that the backend multiplies. A layer's
segments hold its first neurons. Of the slices after them, a layer may hold only the high planes: then a pass
reads only their low planes. Every pass reads all other neurons from flash, in stored order and ahead of use.
The memory plan decides the number of segments; the pool owns them.

Passes fill the segments with neurons that they read anyway. A thread of the pool gets memory for the segments
from the operating system, and passes wait for it. Segments that are made and freed one by one are separate
mappings. A layer's high planes are in one mapping, and so are all of its segments if it may hold all of its
neurons: the system gives large pages only to large mappings, and neurons in them are multiplied 1.05 times as
fast.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ondevice.backends.base import Bytes
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import ClosedNeurons, NeuronSource, Planes, Segment
from ondevice.bundle.layout import DATA_OFFSET
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from ondevice.sparsity.prefetch import PrefetchQuality
from ondevice.stats import PassTimes

log = logging.getLogger(__name__)

SEGMENTS_AHEAD = 4
"""Empty segments waiting for neurons from which on no more memory is requested."""


class SegmentPiece(NamedTuple):
    """Neurons first .. stop of a layer, which are read at once and belong to one segment.

    plane: index of the layer's high plane in memory, so that only the low one is read; None without one.
    """

    segment: int
    first: int
    stop: int
    extent: Extent
    plane: int | None


class LayerQuota(NamedTuple):
    """How many segments a layer may hold, and how many high planes after them."""

    segments: int
    high_planes: int

    @staticmethod
    def of(layer: FeedForwardLayer, count: int) -> LayerQuota:
        """A layer's quota, given `count`, in which each plane of a segment counts (as in `SegmentShape`)."""
        if not layer.high_bytes:
            return LayerQuota(count, 0)
        segments = max(0, count - layer.num_segments)
        return LayerQuota(segments, min(count, layer.num_segments) - segments)

    def is_one_mapping(self, layer: FeedForwardLayer) -> bool:
        """Whether the high planes, or without any the segments, are made together: if they are all that the
        layer can hold.
        """
        return layer.shares_mappings and sum(self) == layer.num_segments


class SegmentKind(NamedTuple):
    """The segments of one layer, or the high planes of one layer."""

    layer: int
    are_planes: bool


class RequestedSegments(NamedTuple):
    """Segments that the pool's thread makes together."""

    segments: int
    memory: Future[list[Segment]]


class SegmentPool(NeuronSource):
    """Allocates segments to layers, and reads the neurons that have no segment.

    Args:
        layers: the model's layers, in order; each gets this object as its `neurons`.
        reader: over the bundle's files.
        segment_bytes: size of a segment of each layer.
        piece_neurons: neurons in a piece that is read.
        slot_bytes: size of a read-ahead buffer.
        slots: number of read-ahead buffers.
    """

    def __init__(
        self,
        layers: Sequence[FeedForwardLayer],
        reader: FlashReader,
        *,
        segment_bytes: Sequence[int],
        piece_neurons: int,
        slot_bytes: int,
        slots: int,
    ) -> None:
        self._layers = layers
        self._reader = reader
        self._segment_bytes = segment_bytes
        self._piece_neurons = piece_neurons
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._quota = [LayerQuota(0, 0)] * len(layers)
        self._allocator: ThreadPoolExecutor | None = None
        self._requested: dict[SegmentKind, deque[RequestedSegments]] = {}
        self._empty: dict[SegmentKind, list[Segment]] = {}
        """Segments that wait for neurons, last first."""
        self._ahead: ReadAhead | None = None
        self._memory = layers[0].piece_memory
        self._held: deque[Any] = deque()
        """The computations on each piece that hasn't been released to the read-ahead."""
        self._position = 0
        self._pieces: list[list[SegmentPiece]] = []
        """The pieces of the schedule, by layer. Empty if residency has changed since then."""
        self._scheduled: list[tuple[int, int]] = []
        """`_held_segments` when the pieces were scheduled."""
        self._starts: list[int] = []
        self._complete = False
        """Whether the last pass had every neuron resident. Stays true until the next `resize`."""
        self._waited = 0.0
        self.lookups = 0
        """Neurons that passes have multiplied, counted once per pass and layer."""
        self.hits = 0
        """Multiplied neurons that were in memory when the pass came to their layer. Neurons with only their
        high plane in memory count by the share of bytes that it has."""
        for layer in layers:
            layer.neurons = self

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that exist, filled or still empty."""
        return self.filled_bytes + sum(
            self._waiting(kind) * self._size(kind) for kind in self._requested.keys() | self._empty.keys()
        )

    @property
    def filled_bytes(self) -> int:
        """Bytes of the segments that hold neurons. Safe from any thread."""
        sizes = zip(self._layers, self._segment_bytes, strict=True)
        return sum(
            len(layer.segments) * nbytes + len(layer.high_planes) * layer.high_bytes
            for layer, nbytes in sizes
        )

    @property
    def times(self) -> PassTimes:
        """Seconds of waiting only, because segments are filled while passes compute."""
        return PassTimes(waited=self._waited)

    @property
    def prefetching(self) -> PrefetchQuality:
        """All zeros, because dense mode reads every neuron and prefetches none."""
        return PrefetchQuality()

    def fill(self) -> bool:
        """Return False: there is no idle work, because passes fill the segments."""
        return False

    def resize(self, quota: Sequence[int]) -> None:
        """Let layer i hold quota[i] segments. Surplus segments are freed at once; passes fill missing ones.

        Segments, or high planes, that were made together are freed together. If a layer's number of segments
        changes, its high planes are freed too.
        """
        before = self._quota
        self._quota = [LayerQuota.of(layer, count) for layer, count in zip(self._layers, quota, strict=True)]
        self._complete = False
        for index, (layer, former, allowed) in enumerate(zip(self._layers, before, self._quota, strict=True)):
            if allowed.segments == former.segments and allowed.high_planes >= former.high_planes:
                continue
            self._drop_empty(index)
            together = former.is_one_mapping(layer)
            if together or allowed.segments != former.segments:
                layer.high_planes.clear()
            del layer.high_planes[allowed.high_planes :]
            if together and not former.high_planes:
                layer.segments.clear()
            del layer.segments[allowed.segments :]

    def hold(self, cancelled: IsCancelled = never_cancelled) -> bool:
        """Fill the quota now, before any pass. Raises FlashReadError, MemoryError.

        Returns False if `cancelled()` holds before some piece. `close` must still be called then.
        """
        for layer, (count, _) in zip(self._layers, self._quota, strict=True):
            while len(layer.segments) < min(count, layer.num_segments):
                for filling in layer.new_segments(self._made_together(layer, count)):
                    index = len(layer.segments)
                    neurons = layer.segment_range(index)
                    for first in range(neurons.start, neurons.stop, self._piece_neurons):
                        if cancelled():
                            return False
                        piece = min(self._piece_neurons, neurons.stop - first)
                        layer.pack(filling, index, first, layer.source.read(first, piece))
                    layer.segments.append(filling)
        return True

    def keep_dense(self, quota: Sequence[int]) -> None:
        """Do nothing: there are no experts."""

    def close(self) -> None:
        """Free the buffers and the segments, and end the thread. Layers then raise if they are multiplied."""
        self._stop_reading()
        self._quota = [LayerQuota(0, 0)] * len(self._layers)
        self._complete = False
        for index in range(len(self._layers)):
            self._drop_empty(index)
        if self._allocator is not None:
            self._allocator.shutdown()
            self._allocator = None
        for layer in self._layers:
            layer.segments.clear()
            layer.high_planes.clear()
            # Breaks the cycle of pool and layer, so that memory is freed without the garbage collector.
            layer.neurons = ClosedNeurons()

    @staticmethod
    def _made_together(layer: FeedForwardLayer, allowed: int) -> int:
        """Number of a layer's next segments that are made together, if the layer may hold `allowed` segments
        in all.
        """
        may_hold_all = allowed >= layer.num_segments > len(layer.segments)
        return layer.num_segments - len(layer.segments) if layer.shares_mappings and may_hold_all else 1

    def _waiting(self, kind: SegmentKind) -> int:
        """Number of segments of a kind that wait for neurons, made or only requested."""
        requested = sum(of.segments for of in self._requested.get(kind, ()))
        return requested + len(self._empty.get(kind, ()))

    def _size(self, kind: SegmentKind) -> int:
        """Bytes of a segment of a kind."""
        return self._layers[kind.layer].high_bytes if kind.are_planes else self._segment_bytes[kind.layer]

    def _missing(self, start: int) -> Iterator[tuple[SegmentKind, int]]:
        """Yields the segments that the quota allows but that aren't requested yet: their kind, and how many
        are made together.

        They come in the order in which passes fill them, from layer `start` on.
        """
        for index in [*range(start, len(self._layers)), *range(start)]:
            layer, quota = self._layers[index], self._quota[index]
            kind = SegmentKind(index, are_planes=False)
            together = self._made_together(layer, quota.segments)
            for _ in range((quota.segments - len(layer.segments) - self._waiting(kind)) // together):
                yield kind, together
            kind = SegmentKind(index, are_planes=True)
            planes = quota.high_planes - len(layer.high_planes) - self._waiting(kind)
            together = max(1, planes) if quota.is_one_mapping(layer) else 1
            for _ in range(planes // together):
                yield kind, together

    def _request_ahead(self, start: int) -> None:
        """Request memory for the next segments that passes will fill, from layer `start` on."""
        ahead = sum(map(self._waiting, self._requested.keys() | self._empty.keys()))
        for kind, count in self._missing(start):
            if ahead >= SEGMENTS_AHEAD or not self._request(kind, count):
                return
            ahead += count

    def _request(self, kind: SegmentKind, count: int) -> bool:
        """Request memory for `count` segments of a kind. Returns False if no thread can be started for it."""
        if self._allocator is None:
            self._allocator = ThreadPoolExecutor(1, "ondevice-segments")
        make = self._layers[kind.layer].new_segments
        try:
            requested = RequestedSegments(count, self._allocator.submit(make, count, kind.are_planes))
        except RuntimeError as error:
            # The system has no thread left, or the program is exiting: passes go on from flash.
            log.info("no thread to allocate feed-forward segments: %s", error)
            self._allocator = None
            return False
        self._requested.setdefault(kind, deque()).append(requested)
        return True

    def _drop_empty(self, layer: int) -> None:
        """Drop a layer's empty segments, and those that aren't made yet."""
        for kind in (SegmentKind(layer, are_planes=False), SegmentKind(layer, are_planes=True)):
            self._empty.pop(kind, None)
            for requested in self._requested.pop(kind, ()):
                if not requested.memory.cancel():
                    # The memory is freed with the future; an error of its allocation no longer matters.
                    requested.memory.exception()

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
            self._pieces = []
        self._held.clear()
        self._memory.free()

    def _schedule(self) -> None:
        """Plan the reads of a pass over all layers, within segments."""
        self._pieces = []
        self._starts = []
        self._scheduled = self._held_segments()
        for layer in self._layers:
            self._starts.append(sum(len(pieces) for pieces in self._pieces))
            pieces = []
            for segment in range(len(layer.segments), layer.num_segments):
                plane = segment - len(layer.segments)
                in_memory = plane if plane < len(layer.high_planes) else None
                neurons = layer.segment_range(segment)
                for first in range(neurons.start, neurons.stop, self._piece_neurons):
                    stop = min(first + self._piece_neurons, neurons.stop)
                    extent = _extent(
                        layer, first, stop, skipped_bytes=0 if in_memory is None else layer.high_bytes
                    )
                    pieces.append(SegmentPiece(segment, first, stop, extent, in_memory))
            self._pieces.append(pieces)

    def _held_segments(self) -> list[tuple[int, int]]:
        """The numbers of segments and of high planes in memory, for each layer."""
        return [(len(layer.segments), len(layer.high_planes)) for layer in self._layers]

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes | Segment]:
        """Yields a layer's neurons that aren't resident: records, segments that were just filled,
        or planes.
        """
        if batch.resident_only:
            return ()
        held = self._layers[layer]
        neurons, resident = held.source.num_neurons, held.resident_neurons
        self.lookups += neurons
        self.hits += resident
        if resident == neurons:
            return ()
        high = min(len(held.high_planes) * held.segment_neurons, neurons - resident)
        self.hits += high * held.high_bytes // held.source.layout.stride
        return self._read(layer)

    def _read(self, index: int) -> Iterator[Bytes | Segment]:
        layer = self._layers[index]
        ahead = self._reading_at(index)
        end = self._starts[index] + len(self._pieces[index])
        filling: Segment | None = None
        resident = len(layer.segments)
        for segment, first, stop, _, plane in self._pieces[index]:
            neurons = layer.segment_range(segment)
            # The position is unknown until the piece is released, so an error here restarts the reading.
            self._position = -1
            started = time.perf_counter()
            arrived = ahead.next()
            self._waited += time.perf_counter() - started
            if plane is not None:
                yield Planes(layer.high_planes[plane], arrived)
                self._let_go(ahead, self._memory.pieces_read)
                continue
            records = arrived.reshape(-1, layer.source.layout.stride)
            if segment < resident:
                # This pass has run the layer before, and filled the segment then.
                self._let_go(ahead, self._memory.pieces_read)
                continue
            layer.source.check_gates(first, records)
            if first == neurons.start:
                filling = self._next_empty(index, segment)
            if filling is not None and not _packed(layer, filling, segment, first, records):
                filling = None
            high_plane = segment >= self._quota[index].segments
            if filling is None or high_plane:
                yield records
            self._let_go(ahead, self._memory.pieces_read)
            if filling is not None and stop == neurons.stop:
                self._empty[SegmentKind(index, high_plane)].pop()
                (layer.high_planes if high_plane else layer.segments).append(filling)
                if not high_plane:
                    yield filling
        self._position = end % (self._starts[-1] + len(self._pieces[-1]))

    def _let_go(self, ahead: ReadAhead, keep: int) -> None:
        """Release all pieces except the latest `keep`, which may still be in use."""
        self._held.append(self._memory.take_pending())
        while len(self._held) > keep:
            self._memory.wait(self._held.popleft())
            ahead.release()

    def _next_empty(self, index: int, segment: int) -> Segment | None:
        """An empty segment for the next range of a layer, if its quota allows one and there is memory.

        It stays among the empty ones until it is filled.
        """
        layer, quota = self._layers[index], self._quota[index]
        if segment != len(layer.segments) + len(layer.high_planes) or segment >= sum(quota):
            return None
        kind = SegmentKind(index, are_planes=segment >= quota.segments)
        if not self._empty.get(kind):
            if not self._requested.get(kind):
                count = next((count for missing, count in self._missing(index) if missing == kind), 0)
                if not count or not self._request(kind, count):
                    return None
            requested = self._requested[kind].popleft()
            # Memory comes sooner than the next pass could read the neurons again.
            if (error := requested.memory.exception()) is not None:
                # The system has no memory to spare now: this pass continues from flash.
                log.warning("no memory for a feed-forward segment: %s", error)
                return None
            self._empty[kind] = requested.memory.result()[::-1]
            self._request_ahead(index)
        return self._empty[kind][-1]

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Drop newly resident neurons from the schedule, and request memory for missing segments.

        If nothing is left to read, frees the buffers.
        """
        if self._complete:
            return
        held = self._held_segments()
        if held != self._quota:
            self._request_ahead(0)
        if self._scheduled != held:
            self._pieces = []
        self._complete = all(len(layer.segments) == layer.num_segments for layer in self._layers)
        if self._complete:
            self._stop_reading()

    def _reading_at(self, index: int) -> ReadAhead:
        """The read-ahead, positioned at the first piece of a layer."""
        if self._ahead is None or not self._pieces:
            self._schedule()
            extents = [piece.extent for pieces in self._pieces for piece in pieces]
            if self._ahead is None:
                memory = self._memory.allocate(self._slots * self._slot_bytes)
                self._ahead = ReadAhead(
                    self._reader, extents, self._slot_bytes, self._slots, cyclic=True, memory=memory
                )
            else:
                self._forget_held()
                self._ahead.reschedule(extents)
            self._position = 0
        if self._position != self._starts[index]:
            self._forget_held()
            self._ahead.rewind()
            for _ in range(self._starts[index]):
                self._ahead.next()
                self._ahead.release()
        return self._ahead

    def _forget_held(self) -> None:
        """Wait until no computation uses the buffers that reads are about to overwrite."""
        self._held.append(self._memory.take_pending())
        while self._held:
            self._memory.wait(self._held.popleft())


def _extent(layer: FeedForwardLayer, first: int, stop: int, skipped_bytes: int) -> Extent:
    """The records of a layer's neurons first .. stop, without the first `skipped_bytes` bytes."""
    source, layout = layer.source, layer.source.layout
    start = DATA_OFFSET + first // layout.neurons * layout.stride
    return Extent(source.file, start + skipped_bytes, layout.nbytes(stop - first) - skipped_bytes)


def _packed(layer: FeedForwardLayer, filling: Segment, segment: int, first: int, records: Bytes) -> bool:
    """Pack a piece into a segment. Returns False if the system has no memory for it."""
    try:
        layer.pack(filling, segment, first, records)
    except MemoryError as error:
        log.warning("no memory for a feed-forward segment: %s", error)
        return False
    return True
