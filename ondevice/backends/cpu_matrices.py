"""Matrices of the CPU kernels: in memory, or read from flash before a pass multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ondevice.backends.base import Float32, Int32
from ondevice.bundle.matrix_layout import TiledMatrix
from ondevice.bundle.matrix_units import draft_head_units
from ondevice.config import RowFormat
from ondevice.errors import OndeviceError
from ondevice.kernels import _native
from ondevice.records import dataclass


@dataclass(frozen=True)
class CpuLinear:
    """A packed matrix; bias: (N,) or None."""

    matrix: _native.Matrix
    bias: Float32 | None

    @property
    def held(self) -> _native.Matrix:
        """The packed matrix. It is always in memory, unlike that of a `StreamedLinear`."""
        return self.matrix

    def look_up(self, runner: _native.Runner, tokens: Int32, out: Float32) -> bool:
        """Write the dequantised rows of token ids (T,) to out (T, padded_cols). Always returns True."""
        return _native.look_up(runner, [self.matrix], self.matrix.rows, tokens, out)


class TilePlace(NamedTuple):
    """Where a matrix's tiles lie: index of the file in the reader, offset of the first tile, bytes from one
    tile to the next.
    """

    file: int
    offset: int
    stride: int


class FlashMatrix(NamedTuple):
    """A matrix on flash."""

    matrix: TiledMatrix
    place: TilePlace


class MatrixSource(Protocol):
    """Reads matrices into memory; `sparsity.matrix_stream` implements it."""

    def bring(self, unit: int) -> None:
        """Set `held` of every matrix of a unit. It stays valid at least until another unit is brought.

        Raises FlashReadError and MemoryError.
        """


class NoMatrixSource:
    """A source without matrices, used before `sparsity` connects one and after the model is closed."""

    def bring(self, unit: int) -> None:
        raise OndeviceError("the model's matrices were given back: it is closed")


class StreamedLinear:
    """A matrix that is read from flash: the rows of one or several stored matrices, in order. bias: (N,) or
    None.

    unit: number of the group of matrices that are read together. held: the matrix while it is in memory.
    """

    def __init__(self, unit: int, stored: Sequence[FlashMatrix], bias: Float32 | None) -> None:
        self.unit = unit
        self.stored = tuple(stored)
        self.rows = sum(it.matrix.rows for it in stored)
        self.bias = bias
        self.held: _native.Matrix | None = None
        self.source: MatrixSource = NoMatrixSource()

    @property
    def kind(self) -> tuple[tuple[tuple[int, RowFormat], ...], int]:
        """The rows and format of each section, and the number of columns. Matrices of the same kind share
        memory.
        """
        sections = tuple((it.matrix.rows, it.matrix.row.stored) for it in self.stored)
        return sections, self.stored[0].matrix.row.cols

    @property
    def nbytes(self) -> int:
        return sum(it.matrix.nbytes for it in self.stored)

    @property
    def matrix(self) -> _native.Matrix:
        """The matrix in memory, read if it isn't held. Raises what `MatrixSource.bring` raises."""
        if self.held is None:
            self.source.bring(self.unit)
        assert self.held is not None
        return self.held


class StreamedHead:
    """The output head in units of consecutive rows; the last unit may have fewer rows."""

    def __init__(self, units: Sequence[StreamedLinear]) -> None:
        self.units = tuple(units)
        self.rows = sum(unit.rows for unit in units)

    @property
    def is_held(self) -> bool:
        """Whether every unit is in memory."""
        return all(unit.held is not None for unit in self.units)

    def draft_head(self) -> StreamedHead:
        """The units of the head whose rows are the tokens that drafts may use. Shares memory with
        this head.
        """
        return StreamedHead(self.units[: draft_head_units(len(self.units))])

    def look_up(self, runner: _native.Runner, tokens: Int32, out: Float32) -> bool:
        """Write the dequantised rows of token ids (T,) to out (T, padded_cols). Returns False if the head
        isn't in memory.
        """
        held = [unit.held for unit in self.units]
        return _native.look_up(runner, held, self.units[0].rows, tokens, out)
