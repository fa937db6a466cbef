"""Feed-forwards of the CPU backend: layers stored as records of neurons, or in slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ondevice.backends.base import NO_BIASES, Biases, Bytes, FeedForwardSource, Float32, Selector
from ondevice.backends.cpu_matrices import CpuLinear
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS, FeedForwardLayer
from ondevice.bundle.layout import ExpertLayout, RecordLayout, SliceLayout
from ondevice.kernels import _native
from ondevice.model_config import ACTIVATIONS, FeedForwardSpec

Form: TypeAlias = tuple[int, float, bool, float, float]
"""The arithmetic between gates and down projection, as the kernels take it."""


class CpuFeedForward(FeedForwardLayer):
    """One layer's neurons, packed for the kernels. A segment is a `_native.Segment`."""

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
        experts = None if source.experts is None else source.experts.layout
        self.expert = None if experts is None else native_matrices(source.hidden_size, experts)
        self.output_bias: Float32 | None = biases.output
        self._runner = runner

    def hold_all(self, read_bytes: int) -> None:
        """Read all neurons into one resident segment, about `read_bytes` bytes at a time, but at least a
        block.
        """
        (segment,), source = self.new_segments(1), self.source
        step = max(1, read_bytes // (source.layout.stride * BLOCK_NEURONS)) * BLOCK_NEURONS
        for first in range(0, source.num_neurons, step):
            self.pack(segment, 0, first, source.read(first, min(step, source.num_neurons - first)))
        self.segments.append(segment)

    def new_segments(self, count: int, high_planes: bool = False) -> list[_native.Segment]:
        nbytes = self.native.segment_bytes(self.segment_neurons // BLOCK_NEURONS)
        return [_native.Segment(nbytes) for _ in range(count)]

    def pack(self, segment: _native.Segment, index: int, first: int, records: Bytes) -> None:
        neurons = self.segment_range(index)
        blocks = -(-len(neurons) // BLOCK_NEURONS)
        block0 = (first - neurons.start) // BLOCK_NEURONS
        self.native.pack(self._runner, segment, blocks, block0, records)


class CpuSlices(FeedForwardLayer):
    """One layer's slices. A segment is a slice's tiles, or only its high plane, (bytes,)."""

    shares_mappings = True

    def __init__(
        self, runner: _native.Runner, index: int, source: FeedForwardSource, biases: Biases = NO_BIASES
    ) -> None:
        layout = source.layout
        assert isinstance(layout, SliceLayout)
        super().__init__(index, source, layout.neurons, None)
        self.slices = layout
        self.native = native_matrices(source.hidden_size, layout.tiles, layout.places)
        self._runner = runner
        self.output_bias: Float32 | None = biases.output
        self.gate_bias: Float32 | None = None
        """(slices * neurons of a slice,), zero-padded."""
        if biases.gates is not None:
            self.gate_bias = np.zeros(self.num_segments * layout.neurons, dtype=np.float32)
            self.gate_bias[: len(biases.gates)] = biases.gates

    @property
    def high_bytes(self) -> int:
        return self.slices.partial_bytes

    def new_segments(self, count: int, high_planes: bool = False) -> list[Bytes]:
        nbytes = self.slices.high_bytes if high_planes else self.slices.tiles.stride
        # Pages are mapped on the calling thread, not while a pass fills them.
        return list(_native.allocate(count * nbytes, populated=True).reshape(count, nbytes))

    def pack(self, segment: Bytes, index: int, first: int, records: Bytes) -> None:
        high, low = np.split(records[0], [self.slices.high_bytes])
        # Without low planes, a slice's tiles may have as many bytes as its record, at other places.
        if self.high_bytes and len(segment) == len(high):
            segment[:] = high
        else:
            self.native.join(self._runner, high, low, segment)


def native_matrices(
    hidden: int, layout: ExpertLayout, planes: Sequence[tuple[int, int | None]] = ()
) -> _native.Expert:
    """The kernels' description of records of matrices. planes: `SliceLayout.places` of slices."""
    gate, *up, down = layout.places
    return _native.Expert(hidden, layout.neurons, gate, up[0] if up else None, down, planes)


def native_form(spec: FeedForwardSpec) -> Form:
    """The kernels' description of the arithmetic between the gates and the down projection."""
    index, relu_up = ACTIVATIONS.index(spec.activation), spec.up_activation == "relu"
    return index, spec.threshold, relu_up, spec.clamp, spec.slope
