"""What a loaded model needs of a backend beside its ops: memory that follows a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ondevice.backends.base import Backend, Block, KVArrays, KVLayout
from ondevice.backends.feed_forward_layer import FeedForwardLayer


class BudgetedBackend(Backend, Protocol):
    """A backend that runs under a budget.

    All backends meet it. Where a backend has nothing to do, its methods do nothing.
    """

    @property
    def target(self) -> str:
        """What multiplies: an instruction set, `mlx-gpu`, `mlx-cpu` or `numpy`."""
        ...

    @property
    def feed_forwards(self) -> Sequence[FeedForwardLayer]:
        """The layers whose neurons get memory by the plan; none where a backend holds every neuron itself."""
        ...

    @property
    def synchronisations(self) -> int:
        """Times that the host has waited for the device."""
        ...

    @property
    def synchronised_seconds(self) -> float:
        """Seconds that the host has waited for the device."""
        ...

    def allocate_block(self, layout: KVLayout) -> Block:
        """Memory for one block of keys and values. Raises MemoryError."""
        ...

    def new_arrays(self, layout: KVLayout) -> KVArrays | None:
        """Where a new cache's keys and values will be; None where they are in its blocks."""
        ...

    def hold_embedding(self, resident: bool) -> None:
        """Hold the embedding table in memory, or give it back: its rows then come from flash."""
        ...

    def keep_to(self, budget_bytes: int) -> None:
        """Set the backend's own limits to a budget."""
        ...

    def trim(self) -> None:
        """Give scratch memory back; the next pass takes what it needs. No result of an op is valid after."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...
