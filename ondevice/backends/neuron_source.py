"""The interface through which backends get a layer's neurons; `sparsity` implements it.

A backend's `feed_forward` calls the `neurons` of its layer: a `sparsity.segments.SegmentPool` in dense mode,
a `sparsity.fetch.NeuronFetcher` if neurons are selected, a `sparsity.experts.ExpertFetcher` in models with
experts, which on `cpu` has a SegmentPool for the other neurons.

Legend: R rows of a forward pass, F neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32, Int32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.routing import Routing
from ondevice.errors import OndeviceError

Segment: TypeAlias = Any
"""Memory for a range of one layer's neurons, packed for its backend."""
Batches: TypeAlias = Iterator[tuple[Int32, NDArray[np.uint64]]]
"""Ascending ids of neurons and the addresses of their records; each pair is valid until the next."""


class Planes(NamedTuple):
    """A slice's resident high plane, and its low plane, (bytes,) each, read from flash."""

    high: Bytes
    low: Bytes


class ResidentLayer(NamedTuple):
    """A layer whose neurons are all in memory: neuron i is in slot slots[i], (F,), and slot s is at
    addresses[s].
    """

    slots: Int32
    addresses: NDArray[np.uint64]
    count_multiplied: Callable[[int], None]
    """Adds a number of multiplied neurons to the stats."""


class NeuronSource:
    """Provides the neurons of all layers of one model; `layer` is a layer's index.

    In a pass, layers come in order. A source overrides the methods that its layers call: `offloaded` if every
    neuron is multiplied, the others if neurons or experts are chosen. The defaults raise or do nothing.
    """

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Prepare for a pass, before its first layer. Not called for `resident_only`."""

    def wants_prefetch(self, layer: int, rows: int) -> bool:
        """Whether `prefetch` would use the scores of `rows` rows."""
        return False

    def prefetch(self, layer: int, rows: int, scores: Callable[[], Float32]) -> None:
        """Begin to read the neurons that scores(), (R, F), select, while an earlier layer runs.

        The scores are an estimate from the previous layer's input; no result depends on them.
        """

    def prefetch_experts(self, layer: int, chosen: Callable[[], Int32]) -> None:
        """Begin to read the experts chosen(), (R, k), while an earlier layer runs.

        Called before the previous layer, if `wants_prefetch`. They are an estimate from that layer's input;
        no result depends on them.
        """

    def begin_layer(self, layer: int, batch: ForwardBatch) -> ResidentLayer | None:
        """Begin a layer. Returns its neurons' addresses if all are in memory; if it returns None, call
        `select`.
        """
        return None

    def select(self, layer: int, scores: Float32, batch: ForwardBatch) -> Batches:
        """The neurons with a score above zero in any row of scores (R, F).

        Rows from `batch.num_exact_rows` on select only among the neurons in memory.
        """
        raise OndeviceError("nothing provides the neurons that are selected")

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes | Segment]:
        """The layer's neurons that its segments don't hold, ascending.

        They come as records (n, stride), planes, or filled segments. Each is valid until the next, unless the
        layer's `PieceMemory` says otherwise. An empty tuple if the segments hold all neurons, and for batches
        without exact rows: backends multiply these neurons only for exact rows.
        """
        raise OndeviceError("nothing provides the neurons that aren't resident")

    def experts(
        self, layer: int, routing: Routing, batch: ForwardBatch, needs_expert_order: bool
    ) -> Iterator[tuple[int, int]]:
        """Yields each expert of `routing.experts` with its address in memory, which is valid until the next
        one.

        needs_expert_order: whether they come in ascending order; otherwise those in memory come first.
        """
        raise OndeviceError("nothing provides the experts")

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the source which tokens of the last pass's `batch` were accepted, as in `Backend.accept`."""


class ClosedNeurons(NeuronSource):
    """The source of layers whose memory is freed. Each call raises, since missing neurons must not count as
    zeros.
    """

    def begin_layer(self, layer: int, batch: ForwardBatch) -> ResidentLayer | None:
        raise _closed()

    def select(self, layer: int, scores: Float32, batch: ForwardBatch) -> Batches:
        raise _closed()

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes | Segment]:
        raise _closed()

    def experts(
        self, layer: int, routing: Routing, batch: ForwardBatch, needs_expert_order: bool
    ) -> Iterator[tuple[int, int]]:
        raise _closed()


def _closed() -> OndeviceError:
    return OndeviceError("the model's feed-forward memory was given back: it is closed")
