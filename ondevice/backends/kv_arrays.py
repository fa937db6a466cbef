"""Keys and values in a backend's arrays, instead of a cache's blocks."""

from __future__ import annotations

from typing import Protocol

from ondevice.backends.base import Bytes
from ondevice.backends.state_memory import StateMemory


class KVArrays(Protocol):
    """Keys and values of a cache whose backend doesn't write to blocks."""

    @property
    def states(self) -> StateMemory:
        """The memory of recurrent layers' states."""

    def resize(self, blocks: int) -> None:
        """Make room for this many blocks; stored keys and values that still fit stay. Raises MemoryError."""

    def fork(self, blocks: int) -> KVArrays:
        """An independent copy with room for this many blocks. Raises MemoryError."""

    def part_sizes(self, positions: int) -> list[int]:
        """The bytes of each part of a cache that holds this many positions."""

    def part(self, index: int, start: int, stop: int) -> Bytes:
        """A copy of part `index` at positions start .. stop - 1: (nbytes,) uint8."""

    def load_part(self, index: int, start: int, stop: int, data: Bytes) -> None:
        """Store bytes that `part` returned, at the same positions. There must be room for them. Raises
        MemoryError.
        """
