"""Parts of a model's weights: each declares its reads and its loading together.

So reading ahead follows the order of loading, in bounded pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ondevice.backends.base import Backend, Float32, RowChunk
from ondevice.bundle.layout import RowLayout
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.config import RowFormat
from ondevice.model.tensor_file import ReadAhead

CHUNK_BYTES = 4 << 20
"""Most bytes of codes (or records) in a RowChunk, unless a single row is longer."""

Rows = Callable[[int, int], RowChunk]
"""Reader of one matrix: takes (row0, count), returns those rows."""


class Part(Protocol):
    """A weight to load: its reads, and the loading that consumes their results in the same order."""

    @property
    def field(self) -> str: ...

    def tasks(self) -> Iterator[Callable[[], Any]]: ...

    def load(self, backend: Backend, ahead: ReadAhead) -> Any: ...


def part_tasks(parts: Iterable[Part], cancelled: IsCancelled) -> Iterator[Callable[[], Any]]:
    """The reads of `parts`, in order. Raises Cancelled if `cancelled()` holds between two of them."""
    for part in parts:
        for task in part.tasks():
            if cancelled():
                raise Cancelled
            yield task


@dataclass(frozen=True)
class VectorPart:
    """A float32 vector, read in one piece."""

    field: str
    read: Callable[[], Float32]

    def tasks(self) -> Iterator[Callable[[], Float32]]:
        yield self.read

    def load(self, backend: Backend, ahead: ReadAhead) -> Any:
        return backend.load_vector(ahead.next())


@dataclass(frozen=True)
class MatrixPart:
    """A stored matrix of `num_rows` rows and `cols` logical columns, read in chunks of rows."""

    field: str
    num_rows: int
    cols: int
    stored: RowFormat
    rows: Rows
    bias: Callable[[], Float32] | None = None
    read_bytes: int = 0
    """Bytes read per row, if more than its codes."""

    @property
    def starts(self) -> range:
        """First row of each chunk."""
        row_bytes = max(self.read_bytes, RowLayout(self.cols, *self.stored).codes_bytes)
        return range(0, self.num_rows, max(1, CHUNK_BYTES // row_bytes))

    def tasks(self) -> Iterator[Callable[[], Any]]:
        if self.bias is not None:
            yield self.bias
        for row0 in self.starts:
            yield partial(self.rows, row0, min(self.starts.step, self.num_rows - row0))

    def load(self, backend: Backend, ahead: ReadAhead) -> Any:
        bias = None if self.bias is None else ahead.next()
        return backend.load_linear(_ReadLinear(self, bias, ahead))


class _ReadLinear:
    """`LinearSource` of a matrix whose chunks are the next results of `ahead`."""

    def __init__(self, matrix: MatrixPart, bias: Float32 | None, ahead: ReadAhead) -> None:
        self.rows = matrix.num_rows
        self.cols = matrix.cols
        self.stored = matrix.stored
        self.bias = bias
        self._count = len(matrix.starts)
        self._ahead = ahead

    def chunks(self) -> Iterator[RowChunk]:
        for _ in range(self._count):
            yield self._ahead.next()
