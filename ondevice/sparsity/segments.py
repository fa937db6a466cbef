"""Feed-forward memory: equal segments lent to layers, and the stream of the neurons that have none.

Each segment is a mapping of its own and holds a contiguous range of one layer's neurons, packed as the
kernels want them; a layer's segments are a prefix of its neurons. What isn't resident is streamed from
flash in stored order on every pass, read ahead of use. The memory plan decides how many segments there are;
this is their one owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ondevice.backends.base import Bytes
from ondevice.backends.cpu import CpuFeedForward
from ondevice.bundle.layout import DATA_OFFSET
from ondevice.flash.prefetch import Extent, ExtentStream
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native


class SegmentPool:
    """Lends segments of `segment_bytes` to `layers` and streams the rest in pieces of `stream_neurons`.

    slot_bytes, slots: the buffers of the stream, which hold what is read ahead.
    """

    def __init__(
        self,
        layers: Sequence[CpuFeedForward],
        reader: FlashReader,
        *,
        segment_bytes: int,
        stream_neurons: int,
        slot_bytes: int,
        slots: int,
    ) -> None:
        self._layers = layers
        self._reader = reader
        self._segment_bytes = segment_bytes
        self._stream_neurons = stream_neurons
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._stream: ExtentStream | None = None
        self._position = 0
        self._starts = [0] * len(layers)
        self._lengths = [0] * len(layers)
        for index, layer in enumerate(layers):
            layer.streamed = lambda index=index: self._streamed(index)  # type: ignore[misc]
        self._schedule()

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that are lent."""
        return sum(len(layer.segments) for layer in self._layers) * self._segment_bytes

    def resize(self, lent: Sequence[int]) -> None:
        """Lend lent[i] segments to layer i: take back first, then fill new ones from flash.

        Raises FlashReadError; the segments that were filled by then stay lent.
        """
        if [len(layer.segments) for layer in self._layers] == list(lent):
            return
        self.close()
        for layer, count in zip(self._layers, lent, strict=True):
            del layer.segments[count:]
        try:
            self._fill(lent)
        finally:
            self._schedule()

    def close(self) -> None:
        """Stop reading ahead and give the stream's buffers back. The pool can be resized or read again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _extents(self, index: int, neurons: range) -> list[tuple[int, Extent]]:
        """(first neuron, bytes) of the pieces that cover `neurons` of a layer."""
        source = self._layers[index].source
        stride = source.layout.stride
        pieces = []
        for first in range(neurons.start, neurons.stop, self._stream_neurons):
            count = min(self._stream_neurons, neurons.stop - first)
            pieces.append((first, Extent(source.file, DATA_OFFSET + first * stride, count * stride)))
        return pieces

    def _fill(self, lent: Sequence[int]) -> None:
        wanted = [
            (layer, segment, *piece)
            for index, layer in enumerate(self._layers)
            for segment in range(len(layer.segments), lent[index])
            for piece in self._extents(index, layer.segment_range(segment))
        ]
        if not wanted:
            return
        stream = ExtentStream(
            self._reader, [piece[3] for piece in wanted], self._slot_bytes, self._slots, cyclic=False
        )
        try:
            for layer, index, first, _ in wanted:
                neurons = layer.segment_range(index)
                if first == neurons.start:
                    segment = _native.Segment(self._segment_bytes)
                records = stream.next().reshape(-1, layer.source.layout.stride)
                layer.pack(segment, index, first, records)
                stream.release()
                if first + len(records) == neurons.stop:
                    layer.segments.append(segment)
        finally:
            stream.close()

    def _schedule(self) -> None:
        """Plan the reads of a pass over all layers; they start with the first pass that needs them."""
        self.close()
        self._extents_of_pass: list[Extent] = []
        for index, layer in enumerate(self._layers):
            pieces = self._extents(index, range(layer.resident_neurons, layer.source.num_neurons))
            self._starts[index] = len(self._extents_of_pass)
            self._lengths[index] = len(pieces)
            self._extents_of_pass += [extent for _, extent in pieces]

    def _streamed(self, index: int) -> Iterator[Bytes]:
        """Records (n, stride) of a layer's neurons that aren't resident, ascending; each until the next."""
        if not self._lengths[index]:
            return
        stride = self._layers[index].source.layout.stride
        stream = self._stream_at(self._starts[index])
        for _ in range(self._lengths[index]):
            # Until the piece is released the position is unknown: what is raised here restarts the stream.
            self._position = -1
            records = stream.next().reshape(-1, stride)
            yield records
            stream.release()
        self._position = (self._starts[index] + self._lengths[index]) % len(self._extents_of_pass)

    def _stream_at(self, position: int) -> ExtentStream:
        """The stream, about to give extent `position`."""
        if self._stream is None:
            self._stream = ExtentStream(
                self._reader, self._extents_of_pass, self._slot_bytes, self._slots, cyclic=True
            )
            self._position = 0
        if self._position != position:
            self._stream.rewind()
            for _ in range(position):
                self._stream.next()
                self._stream.release()
        return self._stream
