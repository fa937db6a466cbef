"""What the CPU engine multiplies with: packed matrices, one layer's neurons, the embedding table.

It says what is where, and leaves it to `sparsity` to bring neurons and to take them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, EmbeddingSource, FeedForwardSource, Float32, Int32, Selector
from ondevice.bundle.layout import RowLayout
from ondevice.config import GROUP_SIZE
from ondevice.errors import OndeviceError
from ondevice.kernels import _native

BLOCK_NEURONS = GROUP_SIZE
"""Neurons are packed, lent and streamed in whole blocks of this many."""


@dataclass(frozen=True)
class CpuLinear:
    """A packed matrix; bias: (N,) or None."""

    matrix: _native.Matrix
    bias: Float32 | None


class Whole(NamedTuple):
    """All of a layer is in memory: neuron i in slots[i], (F,), and slot s at addresses[s]."""

    slots: Int32
    addresses: NDArray[np.uint64]
    multiplied: Callable[[int], None]
    """To be told, once they have been, how many neurons were."""


Batches: TypeAlias = Iterator[tuple[Int32, NDArray[np.uint64]]]
"""Ascending ids of neurons, addresses of what is read of them; each valid until the next."""
Selected: TypeAlias = Callable[[Float32, int], Batches]
"""Scores (T, F) -> the neurons with a score above zero; of the tokens from the second argument on, only those
that are in memory."""


class CpuFeedForward:
    """One layer's neurons in ascending id: a resident prefix in segments, the rest as `streamed` gives it.

    With a `selector`, only those it selects are multiplied, from where `selected` says they lie. It owns
    neither the memory nor what is read: `sparsity` lends both.
    """

    def __init__(
        self,
        engine: _native.Engine,
        source: FeedForwardSource,
        segment_neurons: int,
        selector: Selector | None = None,
    ) -> None:
        self.selector = selector
        self.turn: Callable[[int], Whole | None] = _not_whole
        """Told that the layer's turn has come with so many certain tokens, if any; then `selected` is asked
        for the neurons, unless all are in memory."""
        self.selected: Selected = _unfed
        self.foresee: Callable[[int, Callable[[], Float32]], None] | None = None
        """Told, before the layer's turn, how many tokens are to come and what scores them by a guess."""
        row = RowLayout(source.hidden_size, source.bits)
        first, second = source.layout.part_offsets
        self.source = source
        self.segment_neurons = segment_neurons
        self.segments: list[_native.Segment] = []
        self.streamed: Callable[[], Iterable[Bytes | _native.Segment]] = tuple
        """What segments don't hold of the layer whose turn has come; an empty tuple if they hold all."""
        self.native = _native.FeedForward(
            source.hidden_size, source.bits, source.layout.stride, first, second, second + row.nbytes
        )
        self._engine = engine

    @property
    def resident_neurons(self) -> int:
        """Neurons 0 .. resident_neurons - 1 are held in segments."""
        return min(len(self.segments) * self.segment_neurons, self.source.num_neurons)

    @property
    def num_segments(self) -> int:
        """Segments that hold all neurons."""
        return -(-self.source.num_neurons // self.segment_neurons)

    def segment_range(self, index: int) -> range:
        """The neurons that segment `index` of this layer holds."""
        first = index * self.segment_neurons
        return range(first, min(first + self.segment_neurons, self.source.num_neurons))

    def pack(self, segment: _native.Segment, index: int, first: int, records: Bytes) -> None:
        """Put records (n, stride) of neurons first .. first + n into segment `index`; first % 64 == 0."""
        neurons = self.segment_range(index)
        blocks = -(-len(neurons) // BLOCK_NEURONS)
        block0 = (first - neurons.start) // BLOCK_NEURONS
        self.native.pack(self._engine, segment, blocks, block0, records)


def _not_whole(certain: int) -> None:
    """Whoever provides neurons has something to say of it."""


def _unfed(scores: Float32, certain: int) -> Batches:
    """Neurons that nobody provides must not read as zeros."""
    raise OndeviceError("nothing provides the neurons that are selected")


class CpuEmbedding:
    """The embedding table, on flash or held in memory, behind the same interface."""

    def __init__(self, source: EmbeddingSource) -> None:
        self.file = source.file
        self.vocab_size = source.vocab_size
        self.hidden_size = source.hidden_size
        self.bits = source.bits
        self.layout = source.layout
        self._source = source
        self.padded_cols = RowLayout(source.hidden_size, source.bits).padded_cols
        self._records: Bytes | None = None

    def read(self, tokens: Int32) -> Bytes:
        if self._records is None:
            return self._source.read(tokens)
        records: Bytes = self._records.take(tokens, axis=0)
        return records

    def hold(self, resident: bool) -> None:
        if not resident:
            self._records = None
        elif self._records is None:
            self._records = self._source.read(np.arange(self.vocab_size, dtype=np.int32))
