"""The part of a backend beside its ops that a loaded model needs: memory that follows a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ondevice.backends.base import Backend, Block, KVLayout
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.kv_arrays import KVArrays


class BudgetedBackend(Backend, Protocol):
    """A backend that runs under a budget.

    All backends implement this protocol. A method does nothing if its backend has nothing to do.
    """

    @property
    def target(self) -> str:
        """The target that multiplies: an instruction set, `mlx-gpu`, `mlx-cpu` or `numpy`."""
        ...

    @property
    def feed_forwards(self) -> Sequence[FeedForwardLayer]:
        """The layers whose neurons get memory by the plan; empty if the backend holds every neuron itself."""
        ...

    @property
    def synchronisations(self) -> int:
        """Number of times that the host has waited for the device."""
        ...

    @property
    def synchronised_seconds(self) -> float:
        """Seconds that the host has waited for the device."""
        ...

    def allocate_block(self, nbytes: int) -> Block:
        """Memory for one block of keys and values, or for recurrent states. Raises MemoryError."""
        ...

    def new_arrays(self, layout: KVLayout) -> KVArrays | None:
        """Empty arrays for a new cache's keys and values; None if these are in its blocks."""
        ...

    def hold_embedding(self, resident: bool) -> None:
        """Hold the embedding table in memory, or free it; its rows are then read from flash."""
        ...

    def keep_to(self, budget_bytes: int) -> None:
        """Set the backend's own limits to a budget."""
        ...

    def trim(self) -> None:
        """Free scratch memory; the next pass allocates what it needs. Invalidates all results of ops."""
        ...

    def close(self) -> None:
        """Free all memory. Idempotent."""
        ...
