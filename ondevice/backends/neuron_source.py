"""Where a layer's neurons come from: the interface that backends ask, and that `sparsity` implements.

A forward pass reaches flash through it: `feed_forward` of a backend calls the `neurons` of its layer. They
are `sparsity.segments.SegmentPool` in dense mode, `sparsity.fetch.NeuronFetcher` where neurons are selected.

Legend: R rows of a forward pass, F neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32, Int32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.errors import OndeviceError

Segment: TypeAlias = Any
"""Memory for a range of one layer's neurons, packed as its backend multiplies them."""
Batches: TypeAlias = Iterator[tuple[Int32, NDArray[np.uint64]]]
"""Ascending ids of neurons and the addresses of their records; each pair is valid until the next."""


class ResidentLayer(NamedTuple):
    """A layer that is wholly in memory: neuron i is in slot slots[i], (F,), and slot s at addresses[s]."""

    slots: Int32
    addresses: NDArray[np.uint64]
    count_multiplied: Callable[[int], None]
    """Takes the number of neurons that were multiplied, for the statistics."""


class NeuronSource:
    """Provides the neurons of all layers of one model; `layer` is a layer's index.

    In a pass, layers come in order. A source overrides what its layers call: `stream` where every neuron is
    multiplied, the others where a selector chooses. What it doesn't override refuses, or does nothing.
    """

    def begin_pass(self, batch: ForwardBatch) -> None:
        """A pass that reads neurons is about to enter the first layer. Not called for `resident_only`."""

    def wants_prefetch(self, layer: int, rows: int) -> bool:
        """Whether `prefetch` would use the scores of so many rows."""
        return False

    def prefetch(self, layer: int, rows: int, scores: Callable[[], Float32]) -> None:
        """Begin to read what scores() (R, F) select of a layer, before its turn comes.

        The scores are an estimate, made from the input of the layer before; no result depends on them.
        """

    def begin_layer(self, layer: int, batch: ForwardBatch) -> ResidentLayer | None:
        """The layer's turn has come. None: ask `select`, which is to see the scores."""
        return None

    def select(self, layer: int, scores: Float32, batch: ForwardBatch) -> Batches:
        """The neurons with a score above zero for any row of scores (R, F).

        For rows from `batch.num_exact_rows` on, only those of them that are in memory.
        """
        raise OndeviceError("nothing provides the neurons that are selected")

    def stream(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes | Segment]:
        """The layer's neurons that its segments don't hold, ascending: records (n, stride) or a segment.

        Each is valid until the next is asked for, unless the layer's `StreamMemory` says otherwise. An empty
        tuple where the segments hold all of them, and for `resident_only`.
        """
        raise OndeviceError("nothing provides the neurons that aren't resident")

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """After the pass over `batch`, which had draft tokens: the text has the tokens in `rows`."""


class ClosedNeurons(NeuronSource):
    """The source of layers whose memory was given back: absent neurons must not read as zeros."""

    def begin_layer(self, layer: int, batch: ForwardBatch) -> ResidentLayer | None:
        raise _closed()

    def select(self, layer: int, scores: Float32, batch: ForwardBatch) -> Batches:
        raise _closed()

    def stream(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes | Segment]:
        raise _closed()


def _closed() -> OndeviceError:
    return OndeviceError("the model's feed-forward memory was given back: it is closed")
