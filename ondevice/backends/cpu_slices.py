"""Feed-forwards in slices, as the native kernels multiply them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import NO_BIASES, Biases, Bytes, FeedForwardSource, Float32
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.bundle.layout import ExpertLayout, SliceLayout
from ondevice.kernels import _native


class CpuSlices(FeedForwardLayer):
    """One layer's slices. A segment is a slice's tiles, or its high plane alone, (bytes,)."""

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
        """(slices * neurons of a slice,), zeros behind the layer's last neuron."""
        if biases.gates is not None:
            self.gate_bias = np.zeros(self.num_segments * layout.neurons, dtype=np.float32)
            self.gate_bias[: len(biases.gates)] = biases.gates

    @property
    def high_bytes(self) -> int:
        return self.slices.partial_bytes

    def new_segment(self, high_plane: bool = False) -> Bytes:
        # Its pages are made on the thread that asks for it, not while a pass fills it.
        nbytes = self.slices.high_bytes if high_plane else self.slices.tiles.stride
        return _native.allocate(nbytes, populated=True)

    def pack(self, segment: Bytes, index: int, first: int, records: Bytes) -> None:
        high, low = np.split(records[0], [self.slices.high_bytes])
        if len(segment) == len(high):
            segment[:] = high
        else:
            self.native.join(self._runner, high, low, segment)


def native_matrices(
    hidden: int, layout: ExpertLayout, planes: Sequence[tuple[int, int | None]] = ()
) -> _native.Expert:
    """What the kernels know of records of matrices. planes: `SliceLayout.places` of slices."""
    gate, *up, down = layout.places
    return _native.Expert(hidden, layout.neurons, gate, up[0] if up else None, down, planes)
