"""One layer's neurons in a backend under a budget: the first ones resident, and a source of the rest.

`sparsity` owns the memory and the reads, and moves neurons in and out.
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
    """The memory that pieces of neurons are read into. It also knows when this memory may be overwritten."""

    pieces_read = 0
    """Number of latest pieces that may still be in use when the next one is requested."""

    def allocate(self, nbytes: int) -> Bytes | None:
        """Memory of (nbytes,), beginning at a page boundary. None if each read brings its buffer. Raises
        MemoryError.
        """
        return None

    def free(self) -> None:
        """Free the allocated memory. No read may still write to it."""

    @property
    def slot_allocator(self) -> Callable[[int], Bytes] | None:
        """A function that allocates (nbytes,) bytes for experts at a page boundary, freed with the array.
        None if the native allocator does it.
        """
        return None

    def take_pending(self) -> Any:
        """The computations on pieces that began since the last call, to be passed to `wait`."""
        return None

    def wait(self, pending: Any) -> None:
        """Wait until these computations have ended. After that their neurons may be overwritten."""


class FirstNeurons:
    """A `FeedForwardSource` of only the first `count` neurons of another: the dense part of a layer with
    experts.
    """

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
        """High planes of the next segments after `segments`, where `high_bytes` isn't 0."""
        self.piece_memory = PieceMemory()
        """Counts pieces in use. A pool uses its first layer's for all of its layers."""

    shares_mappings = False
    """Whether segments that were made together are freed together."""

    @property
    def high_bytes(self) -> int:
        """Bytes of a segment's high plane; 0 if the layer has no planes."""
        return 0

    def expert_arrived(self, address: int) -> None:
        """Prepare an expert that has just been read to `address`. Raises MemoryError."""

    def hold_experts(self, wanted: bool) -> None:
        """Hold all the layer's experts from its next pass on, if the backend can; with `wanted` False, free
        them.
        """

    @property
    def held_experts_bytes(self) -> int:
        """Bytes of the experts that the layer holds itself."""
        return 0

    @property
    def resident_neurons(self) -> int:
        """Number of neurons held in segments: ids 0 .. resident_neurons - 1."""
        return min(len(self.segments) * self.segment_neurons, self.source.num_neurons)

    @property
    def num_segments(self) -> int:
        """Number of segments of the layer."""
        return -(-self.source.num_neurons // self.segment_neurons)

    def segment_range(self, index: int) -> range:
        """The neurons of segment `index`."""
        first = index * self.segment_neurons
        return range(first, min(first + self.segment_neurons, self.source.num_neurons))

    def new_segments(self, count: int, high_planes: bool = False) -> list[Segment]:
        """`count` empty segments for `segment_neurons` neurons each, or for only their high planes.

        They lie in one mapping if `shares_mappings`. Any thread may call it. Raises MemoryError.
        """
        raise NotImplementedError

    def pack(self, segment: Segment, index: int, first: int, records: Bytes) -> None:
        """Pack the records (n, stride) of neurons first .. first + n into segment `index`; first % 64 == 0.

        A segment made for a high plane takes only the high plane. Only the first records of a segment can
        raise MemoryError, and then it stays empty.
        """
        raise NotImplementedError
