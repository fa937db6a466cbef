"""What the CPU backend multiplies with: packed matrices, one layer's neurons."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.backends.base import Bytes, FeedForwardSource, Float32, Selector
from ondevice.backends.fed_layer import BLOCK_NEURONS, FedLayer
from ondevice.bundle.layout import RowLayout
from ondevice.kernels import _native


@dataclass(frozen=True)
class CpuLinear:
    """A packed matrix; bias: (N,) or None."""

    matrix: _native.Matrix
    bias: Float32 | None


class CpuFeedForward(FedLayer):
    """One layer's neurons, packed for the kernels: segments are `_native.Segment`."""

    def __init__(
        self,
        engine: _native.Engine,
        source: FeedForwardSource,
        segment_neurons: int,
        selector: Selector | None = None,
    ) -> None:
        super().__init__(source, segment_neurons, selector)
        row = RowLayout(source.hidden_size, source.bits)
        first, second = source.layout.part_offsets
        self.native = _native.FeedForward(
            source.hidden_size, source.bits, source.layout.stride, first, second, second + row.nbytes
        )
        self._engine = engine

    def new_segment(self) -> _native.Segment:
        return _native.Segment(self.native.segment_bytes(self.segment_neurons // BLOCK_NEURONS))

    def pack(self, segment: _native.Segment, index: int, first: int, records: Bytes) -> None:
        neurons = self.segment_range(index)
        blocks = -(-len(neurons) // BLOCK_NEURONS)
        block0 = (first - neurons.start) // BLOCK_NEURONS
        self.native.pack(self._engine, segment, blocks, block0, records)
