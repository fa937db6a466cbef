"""The base class of backends under a budget: the embedding table, and layers with neuron sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ondevice.backends.base import EmbeddingSource
from ondevice.backends.embedding_table import EmbeddingTable
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch


class OffloadingBackend:
    """Base class of the `cpu` and `mlx` backends. resident_embedding: whether the embedding table starts in
    memory.
    """

    looks_up = False
    """Whether rows of the embedding are looked up in a head with the same rows."""

    def __init__(self, resident_embedding: bool) -> None:
        self.feed_forwards: list[FeedForwardLayer] = []
        self._resident_embedding = resident_embedding
        self._embedding: EmbeddingTable | None = None

    def load_embedding(
        self, source: EmbeddingSource, offloaded: bool = False, head: Any = None
    ) -> EmbeddingTable:
        if offloaded:
            return EmbeddingTable(source)
        if head is not None and self.looks_up:
            return EmbeddingTable(source, head)
        self._embedding = EmbeddingTable(source)
        self.hold_embedding(self._resident_embedding)
        return self._embedding

    def hold_embedding(self, resident: bool) -> None:
        """Hold the embedding table in memory, or free it and read its rows from flash."""
        if self._embedding is not None:
            self._embedding.hold(resident)

    def begin_pass(self, batch: ForwardBatch) -> None:
        if self.feed_forwards and not batch.resident_only:
            self.feed_forwards[0].neurons.begin_pass(batch)

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        if self.feed_forwards:
            self.feed_forwards[0].neurons.accept(batch, rows)
