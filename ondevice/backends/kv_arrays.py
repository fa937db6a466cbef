"""Keys and values that a backend keeps in arrays of its own, in the place of a cache's blocks."""

from __future__ import annotations

from typing import Protocol

from ondevice.backends.base import Bytes
from ondevice.backends.state_memory import StateMemory


class KVArrays(Protocol):
    """Keys and values of a cache whose backend doesn't write to blocks, with room for all blocks held."""

    @property
    def states(self) -> StateMemory:
        """What the states of recurrent layers are kept in beside them."""
        ...

    def resize(self, blocks: int) -> None:
        """Make room for this many blocks; stored keys and values that still fit stay. Raises MemoryError."""
        ...

    def fork(self, blocks: int) -> KVArrays:
        """An independent copy with room for this many blocks. Raises MemoryError."""
        ...

    def part_sizes(self, positions: int) -> list[int]:
        """Bytes of each part of what is stored at this many positions."""
        ...

    def part(self, index: int, start: int, stop: int) -> Bytes:
        """A copy of a part of what is stored at positions start .. stop - 1, (its bytes,) uint8."""
        ...

    def load_part(self, index: int, start: int, stop: int, data: Bytes) -> None:
        """Store what `part` gave, at the same positions, for which there is room. Raises MemoryError."""
        ...
