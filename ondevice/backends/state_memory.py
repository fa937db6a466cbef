"""Memory of recurrent layers' states: one block of bytes for all layers, or a backend's arrays.

A buffer holds one state of every layer, or the inputs of the tokens that run ahead. `model/` allocates,
copies and frees buffers, which are opaque to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.recurrent import StateLayout

Buffer: TypeAlias = Any
"""A buffer of a `StateMemory`. It has a size, `nbytes`."""
Bytes: TypeAlias = NDArray[np.uint8]


class StateMemory(Protocol):
    """The buffers of a model's texts."""

    def new_buffer(self, allocate: Callable[[int], Any], nbytes: int) -> Buffer:
        """A new buffer, whose bytes are accounted for by `allocate`. Raises MemoryError, and what `allocate`
        raises.
        """

    def clear(self, buffer: Buffer) -> None:
        """Set all states to zero."""

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy `source` to `target`."""

    def state(self, buffer: Buffer, layer: int) -> Any:
        """A layer's state, in the form that ops read and write."""

    def inputs(self, buffer: Buffer, layer: int, count: int) -> tuple[Any, Any]:
        """A layer's inputs for the first `count` tokens, in the form that ops take."""

    def move_inputs(self, buffer: Buffer, sources: Sequence[int]) -> None:
        """Move the inputs of the tokens `sources`, ascending, to the start of the buffer."""

    def data(self, buffer: Buffer) -> Bytes:
        """The states in their file format, (layout.nbytes,): a view or a copy."""

    def load(self, buffer: Buffer, read: Callable[[Bytes], None]) -> None:
        """Set the states to the bytes that `read` fills in, in the format of `data`."""


class HostStates:
    """`StateMemory` in blocks of bytes; states and inputs are numpy views."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout

    def new_buffer(self, allocate: Callable[[int], Any], nbytes: int) -> Bytes:
        buffer: Bytes = allocate(nbytes)
        return buffer

    def clear(self, buffer: Bytes) -> None:
        buffer.fill(0)

    def copy(self, source: Bytes, target: Bytes) -> None:
        target[:] = source

    def state(self, buffer: Bytes, layer: int) -> Any:
        return self._layout.of(buffer, layer)

    def inputs(self, buffer: Bytes, layer: int, count: int) -> tuple[Any, Any]:
        return self._layout.inputs_of(buffer, layer, count)

    def move_inputs(self, buffer: Bytes, sources: Sequence[int]) -> None:
        for layer in self._layout.config.recurrent_layers:
            for rows in self.inputs(buffer, layer, sources[-1] + 1):
                rows[: len(sources)] = rows[list(sources)]

    def data(self, buffer: Bytes) -> Bytes:
        return buffer

    def load(self, buffer: Bytes, read: Callable[[Bytes], None]) -> None:
        read(buffer)
