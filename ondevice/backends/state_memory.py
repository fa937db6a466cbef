"""Where the states of recurrent layers are kept: in one buffer for all layers, or in a backend's own arrays.

A buffer holds one state of every layer, or the inputs of the tokens that run ahead. What it holds is known
here and to the backend's ops; `model/` allocates buffers, copies them and gives them back.
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

    def made(self, allocate: Callable[[int], Any], nbytes: int) -> Buffer:
        """A new buffer, which `allocate` accounts for. Raises what that raises, and MemoryError."""
        ...

    def clear(self, buffer: Buffer) -> None:
        """Make all states zero."""
        ...

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Give `target` what `source` has."""
        ...

    def state(self, buffer: Buffer, layer: int) -> Any:
        """A layer's state, as ops take it: to be read, or written."""
        ...

    def inputs(self, buffer: Buffer, layer: int, count: int) -> tuple[Any, Any]:
        """A layer's inputs of the first `count` tokens, as ops take them."""
        ...

    def move_inputs(self, buffer: Buffer, sources: Sequence[int]) -> None:
        """Keep the inputs of the tokens `sources`, ascending, in the place of those of the first."""
        ...

    def data(self, buffer: Buffer) -> Bytes:
        """The states as they lie in files, (layout.nbytes,): a view or a copy."""
        ...

    def load(self, buffer: Buffer, read: Callable[[Bytes], None]) -> None:
        """Let `read` fill the states, as `data` gave them."""
        ...


class HostStates:
    """`StateMemory` in blocks of bytes, as the allocator gives them; states and inputs are numpy's views."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout

    def made(self, allocate: Callable[[int], Any], nbytes: int) -> Bytes:
        found: Bytes = allocate(nbytes)
        return found

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
