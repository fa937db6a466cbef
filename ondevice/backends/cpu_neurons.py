"""Feed-forwards in records of neurons, as the native kernels multiply them."""

from __future__ import annotations

from ondevice.backends.base import NO_BIASES, Biases, Bytes, FeedForwardSource, Float32, Selector
from ondevice.backends.cpu_matrices import CpuLinear
from ondevice.backends.cpu_slices import native_matrices
from ondevice.backends.expert_records import ExpertRecords
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS, FeedForwardLayer
from ondevice.bundle.layout import RecordLayout
from ondevice.kernels import _native


class CpuFeedForward(FeedForwardLayer):
    """One layer's neurons, packed for the kernels: segments are `_native.Segment`."""

    def __init__(
        self,
        runner: _native.Runner,
        index: int,
        source: FeedForwardSource,
        segment_neurons: int,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: CpuLinear | None = None,
    ) -> None:
        super().__init__(index, source, segment_neurons, selector)
        self.gates = gates
        layout = source.layout
        assert isinstance(layout, RecordLayout)
        gate, *up, down = layout.row_offsets
        self.native = _native.FeedForward(
            source.hidden_size,
            layout.rows[0].stored,
            layout.stride,
            gate,
            up[0] if up else None,
            down,
            biases.gates,
        )
        self.expert = _native_expert(source.hidden_size, source.experts)
        self.output_bias: Float32 | None = biases.output
        self._runner = runner

    def hold_all(self, read_bytes: int) -> None:
        """Read all neurons into one segment, which holds them; `read_bytes` bytes, or a block, at a time."""
        segment, source = self.new_segment(), self.source
        step = max(1, read_bytes // (source.layout.stride * BLOCK_NEURONS)) * BLOCK_NEURONS
        for first in range(0, source.num_neurons, step):
            self.pack(segment, 0, first, source.read(first, min(step, source.num_neurons - first)))
        self.segments.append(segment)

    def new_segment(self, high_plane: bool = False) -> _native.Segment:
        return _native.Segment(self.native.segment_bytes(self.segment_neurons // BLOCK_NEURONS))

    def pack(self, segment: _native.Segment, index: int, first: int, records: Bytes) -> None:
        neurons = self.segment_range(index)
        blocks = -(-len(neurons) // BLOCK_NEURONS)
        block0 = (first - neurons.start) // BLOCK_NEURONS
        self.native.pack(self._runner, segment, blocks, block0, records)


def _native_expert(hidden: int, records: ExpertRecords | None) -> _native.Expert | None:
    """What the kernels know of a layer's experts, if they are stored as matrices."""
    if records is None or records.layout is None:
        return None
    return native_matrices(hidden, records.layout)
