"""One layer's neurons as backends under a budget see them: a resident prefix, and a source of the rest.

The layer owns neither the memory nor the reads: `sparsity` moves neurons in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ondevice.backends.base import Bytes, FeedForwardSource, Selector
from ondevice.backends.neuron_source import NeuronSource, Segment
from ondevice.config import GROUP_SIZE

BLOCK_NEURONS = GROUP_SIZE
"""Neurons in a block, the unit of packing, allocation and reading."""


class PieceMemory:
    """Memory that pieces of neurons are read into, and the rule when it may be overwritten."""

    pieces_read = 0
    """Number of latest pieces that may still be in use when the next one is asked for."""

    def allocate(self, nbytes: int) -> Bytes | None:
        """(nbytes,) from a page boundary on, or None: reads have buffers of their own. Raises MemoryError."""
        return None

    def free(self) -> None:
        """Free the allocated memory, which nothing writes to any more."""

    @property
    def slot_allocator(self) -> Callable[[int], Bytes] | None:
        """Allocates (nbytes,) from a page boundary on, for experts, freed with the array; None: natively."""
        return None

    def asked(self) -> Any:
        """The computations on pieces that began since the last call; an argument for `wait`."""
        return None

    def wait(self, asked: Any) -> None:
        """Wait until these computations have ended, so that their neurons may be overwritten."""


class FirstNeurons:
    """`FeedForwardSource` of the first `count` neurons of another: those that aren't an expert's."""

    def __init__(self, source: FeedForwardSource, count: int) -> None:
        self._source = source
        self.num_neurons = count
        self.file = source.file
        self.hidden_size = source.hidden_size
        self.layout = source.layout
        self.experts = source.experts

    def read(self, first: int, count: int) -> Bytes:
        return self._source.read(first, count)

    def check_gates(self, first: int, records: Bytes) -> None:
        self._source.check_gates(first, records)


class FeedForwardLayer:
    """One layer's neurons, in ascending order: a resident prefix in segments, the rest from `neurons`.

    With a `selector`, only the neurons that it selects are multiplied, and all of them come from `neurons`.
    """

    def __init__(
        self, index: int, source: FeedForwardSource, segment_neurons: int, selector: Selector | None
    ) -> None:
        self.index = index
        self.selector = selector
        self.neurons = NeuronSource()
        """Set once by the manager of the model's memory, and replaced when that memory is freed."""
        self.source = source
        self.segment_neurons = segment_neurons
        self.segments: list[Segment] = []
        self.high_planes: list[Segment] = []
        """High planes of the segments that follow, where `high_bytes` isn't 0."""
        self.piece_memory = PieceMemory()
        """A pool that streams several layers uses only the first layer's."""

    @property
    def high_bytes(self) -> int:
        """Bytes of a segment's high plane, 0 if the layer multiplies whole segments alone."""
        return 0

    def expert_arrived(self, address: int) -> None:
        """Prepare an expert that has just been read to `address`. Raises MemoryError."""

    def hold_experts(self, wanted: bool) -> None:
        """Hold all the layer's experts from its next turn on, if its backend can, or free them."""

    @property
    def held_experts_bytes(self) -> int:
        """Bytes of the experts that the layer holds itself."""
        return 0

    @property
    def resident_neurons(self) -> int:
        """Number of neurons held whole, in segments: those with ids 0 .. resident_neurons - 1."""
        return min(len(self.segments) * self.segment_neurons, self.source.num_neurons)

    @property
    def num_segments(self) -> int:
        """Number of segments that hold all neurons."""
        return -(-self.source.num_neurons // self.segment_neurons)

    def segment_range(self, index: int) -> range:
        """The neurons that segment `index` of this layer holds."""
        first = index * self.segment_neurons
        return range(first, min(first + self.segment_neurons, self.source.num_neurons))

    def new_segment(self, high_plane: bool = False) -> Segment:
        """An empty segment for `segment_neurons` neurons, or for their high plane alone.

        Any thread may call it. Raises MemoryError.
        """
        raise NotImplementedError

    def pack(self, segment: Segment, index: int, first: int, records: Bytes) -> None:
        """Pack the records (n, stride) of neurons first .. first + n into segment `index`; first % 64 == 0.

        Into a segment for a high plane goes that alone.

        Raises MemoryError, for the first records only; the segment then stays empty.
        """
        raise NotImplementedError
