"""One layer's neurons as the engines that run under a budget see them: who is resident, who feeds the rest.

It says what is where, and leaves it to `sparsity` to bring neurons and to take them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, EmbeddingSource, FeedForwardSource, Float32, Int32, Selector
from ondevice.bundle.layout import RowLayout
from ondevice.config import GROUP_SIZE
from ondevice.errors import OndeviceError

BLOCK_NEURONS = GROUP_SIZE
"""Neurons are packed, allocated and streamed in whole blocks of this many."""
Segment: TypeAlias = Any
"""Memory for a range of one layer's neurons, packed as its engine multiplies them."""


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


class StreamMemory:
    """Where an engine has streamed neurons land, and when that may be written to again."""

    pieces_read = 0
    """Pieces, the latest, that may still be read when the next one is asked for."""

    def allocate(self, nbytes: int) -> Bytes | None:
        """(nbytes,) from a page boundary on; None: the stream has memory of its own. Raises MemoryError."""
        return None

    def free(self) -> None:
        """What was allocated is written to no more."""

    def asked(self) -> Any:
        """What has been asked for of streamed neurons since the last call, to `wait` for it."""
        return None

    def wait(self, asked: Any) -> None:
        """Until that is computed, and what it was computed from is read no more."""


class FedLayer:
    """One layer's neurons in ascending id: a resident prefix in segments, the rest as `streamed` gives it.

    With a `selector`, only those it selects are multiplied, from where `selected` says they lie. It owns
    neither the memory nor what is read: `sparsity` provides both.
    """

    def __init__(self, source: FeedForwardSource, segment_neurons: int, selector: Selector | None) -> None:
        self.selector = selector
        self.turn: Callable[[int], Whole | None] = _not_whole
        """Told that the layer's turn has come with so many num_exact_rows tokens, if any; then `selected` is
        asked for the neurons, unless all are in memory."""
        self.selected: Selected = _unfed
        self.prefetch: Callable[[int, Callable[[], Float32]], None] | None = None
        """Told, before the layer's turn, how many tokens are to come and what scores them by a guess."""
        self.wants_prefetch: Callable[[int], bool] = wants_none
        """Whether `prefetch` would ask for the scores of so many tokens."""
        self.source = source
        self.segment_neurons = segment_neurons
        self.segments: list[Segment] = []
        self.stream_memory = StreamMemory()
        """Of the layers that a pool streams, the first one's counts."""
        self.streamed: Callable[[], Iterable[Bytes | Segment]] = tuple
        """What segments don't hold of the layer whose turn has come; an empty tuple if they hold all."""

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

    def new_segment(self) -> Segment:
        """Memory for `segment_neurons` neurons, or what `pack` makes it of; any thread may ask.

        Raises MemoryError.
        """
        raise NotImplementedError

    def pack(self, segment: Segment, index: int, first: int, records: Bytes) -> None:
        """Put records (n, stride) of neurons first .. first + n into segment `index`; first % 64 == 0.

        MemoryError, for the first of them: the segment stays empty.
        """
        raise NotImplementedError


def _not_whole(num_exact_rows: int) -> None:
    """Whoever provides neurons has something to say of it."""


def wants_none(tokens: int) -> bool:
    """Nobody prefetches."""
    return False


def _unfed(scores: Float32, num_exact_rows: int) -> Batches:
    """Neurons that nobody provides must not read as zeros."""
    raise OndeviceError("nothing provides the neurons that are selected")


class EmbeddingTable:
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


class EmbeddingHolder:
    """The part of a backend that has the embedding table. resident: hold it in memory, to begin."""

    def __init__(self, resident: bool) -> None:
        self._resident = resident
        self._embedding: EmbeddingTable | None = None

    def load_embedding(self, source: EmbeddingSource) -> EmbeddingTable:
        self._embedding = EmbeddingTable(source)
        self.hold_embedding(self._resident)
        return self._embedding

    def hold_embedding(self, resident: bool) -> None:
        """Hold the embedding table in memory, or give it back: its rows then come from flash."""
        if self._embedding is not None:
            self._embedding.hold(resident)
