"""The parts of a model's weights. Each part declares how it is read and how it is loaded, in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

from ondevice.backends.base import Backend, Bytes, Float32, RowChunk
from ondevice.backends.cpu_matrices import FlashMatrix, TilePlace
from ondevice.backends.tiled_source import TileChunk
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout, TiledMatrix
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.config import RowFormat
from ondevice.model.tensor_file import TaskResults
from ondevice.records import dataclass

CHUNK_BYTES = 4 << 20
"""Most bytes of codes (or records) in a RowChunk, or of tiles, unless one row or tile is longer."""

Rows = Callable[[int, int], RowChunk]
"""Reads rows (row0, count) of one matrix."""
Tiles = Callable[[int, int], Bytes]
"""Reads tiles (first, count) of one matrix: (count, tile_bytes)."""


class Part(Protocol):
    """A weight to load: the tasks that read it, and a function that loads the results of these tasks in the
    same order.
    """

    @property
    def field(self) -> str: ...

    def tasks(self) -> Iterator[Callable[[], Any]]: ...

    def load(self, backend: Backend, ahead: TaskResults) -> Any: ...


def part_tasks(parts: Iterable[Part], cancelled: IsCancelled) -> Iterator[Callable[[], Any]]:
    """Yields the reading tasks of `parts`, in order. Raises Cancelled if `cancelled()` holds between two of
    them.
    """
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

    def load(self, backend: Backend, ahead: TaskResults) -> Any:
        return backend.load_vector(ahead.next())


@dataclass(frozen=True)
class MatrixPart:
    """A matrix of `num_rows` rows and `cols` logical columns, stored row by row and read in chunks."""

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

    def load(self, backend: Backend, ahead: TaskResults) -> Any:
        bias = None if self.bias is None else ahead.next()
        return backend.load_linear(_ReadLinear(self, bias, ahead))


class _ReadLinear:
    """`LinearSource` of a matrix whose chunks are the next results of `ahead`."""

    def __init__(self, matrix: MatrixPart, bias: Float32 | None, ahead: TaskResults) -> None:
        self.rows = matrix.num_rows
        self.cols = matrix.cols
        self.stored = matrix.stored
        self.bias = bias
        self._count = len(matrix.starts)
        self._ahead = ahead

    def chunks(self) -> Iterator[RowChunk]:
        for _ in range(self._count):
            yield self._ahead.next()


@dataclass(frozen=True)
class TiledSection:
    """A matrix that is stored as tiles and read in chunks. place: where its tiles lie on flash."""

    matrix: TiledMatrix
    read: Tiles
    place: TilePlace

    @property
    def stored(self) -> FlashMatrix:
        return FlashMatrix(self.matrix, self.place)

    def rows(self, first: int, matrix: TiledMatrix) -> TiledSection:
        """The section of only the rows of `matrix`, which begin at row `first`, a multiple of 16."""
        tile, (file, offset, stride) = first // TILE_ROWS, self.place
        place = TilePlace(file, offset + tile * stride, stride)
        return TiledSection(matrix, lambda start, count: self.read(tile + start, count), place)

    @property
    def starts(self) -> range:
        """First tile of each chunk."""
        return range(0, self.matrix.tiles, max(1, CHUNK_BYTES // self.matrix.tile_bytes))

    def tasks(self) -> Iterator[Callable[[], TileChunk]]:
        for first in self.starts:
            yield partial(self._chunk, first, min(self.starts.step, self.matrix.tiles - first))

    def _chunk(self, first: int, count: int) -> TileChunk:
        return TileChunk(first, self.read(first, count))


@dataclass(frozen=True)
class TilesPart:
    """A matrix to load, made of the rows of all sections in order."""

    field: str
    sections: tuple[TiledSection, ...]
    bias: Callable[[], Float32] | None = None

    def tasks(self) -> Iterator[Callable[[], Any]]:
        if self.bias is not None:
            yield self.bias
        for section in self.sections:
            yield from section.tasks()

    def load(self, backend: Backend, ahead: TaskResults) -> Any:
        bias = None if self.bias is None else ahead.next()
        return backend.load_tiles([ReadTiles(section, ahead) for section in self.sections], bias)


@dataclass(frozen=True)
class StreamedPart:
    """A matrix that stays on flash until a pass needs it. unit: number of the group of matrices read
    together.
    """

    part: TilesPart
    unit: int

    @property
    def field(self) -> str:
        return self.part.field

    def tasks(self) -> Iterator[Callable[[], Any]]:
        if self.part.bias is not None:
            yield self.part.bias

    def load(self, backend: Any, ahead: TaskResults) -> Any:
        bias = None if self.part.bias is None else ahead.next()
        return backend.load_streamed(self.unit, [section.stored for section in self.part.sections], bias)


class ReadTiles:
    """`TiledSource` of a section whose chunks are the next results of `ahead`."""

    def __init__(self, section: TiledSection, ahead: TaskResults) -> None:
        self.matrix = section.matrix
        self._count = len(section.starts)
        self._ahead = ahead

    def chunks(self) -> Iterator[TileChunk]:
        for _ in range(self._count):
            yield self._ahead.next()
