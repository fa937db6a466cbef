"""The methods of a backend that keep its memory within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ondevice.backends.base import Backend, Block
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.kv_arrays import KVArrays
from ondevice.backends.kv_layout import KVLayout


class BudgetedBackend(Backend, Protocol):
    """A backend that runs under a budget.

    All backends implement this protocol. A method does nothing if its backend has nothing to do.
    """

    @property
    def target(self) -> str:
        """The compute target: an instruction set, `mlx-gpu`, `mlx-cpu` or `numpy`."""

    @property
    def feed_forwards(self) -> Sequence[FeedForwardLayer]:
        """The layers whose neurons the plan allocates; empty if the backend holds every neuron itself."""

    @property
    def synchronisations(self) -> int:
        """Number of times the host has waited for the device."""

    @property
    def synchronised_seconds(self) -> float:
        """Seconds the host has waited for the device."""

    def allocate_block(self, nbytes: int) -> Block:
        """Memory for one block of keys and values, or for recurrent states. Raises MemoryError."""

    def new_arrays(self, layout: KVLayout) -> KVArrays | None:
        """Empty arrays for the keys and values of a new cache. None if the backend keeps them in the cache's
        blocks.
        """

    def hold_embedding(self, resident: bool) -> None:
        """Hold the embedding table in memory, or free it and read its rows from flash."""

    def keep_to(self, budget_bytes: int) -> None:
        """Adapt the backend's memory limits to a budget in bytes."""

    def trim(self) -> None:
        """Free scratch memory, which the next pass allocates again. Invalidates all results of ops."""

    def close(self) -> None:
        """Free all memory. Idempotent."""
