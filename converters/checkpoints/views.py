"""Tensors computed from other tensors: rows in another order, values scaled, shifted, transposed
or joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.config import SUPER_SIZE, RowFormat
from ondevice.converters.checkpoints.base import SourceFile, SourceTensor
from ondevice.converters.quantize import EncodedColumns, SourceCodes, Weights, to_float32

GAP_BYTES = 4 << 20
"""Largest gap in bytes between two wanted rows that is read along."""


class View:
    """A `SourceTensor` that reads the files of `source`. It has the type of `source`, unless a subclass says
    otherwise.
    """

    source: SourceTensor
    name: str

    @property
    def dtype(self) -> str:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def nbytes(self) -> int:
        return self.source.nbytes * prod(self.shape) // max(1, prod(self.source.shape))

    @property
    def values_nbytes(self) -> int:
        return self.source.values_nbytes * prod(self.shape) // max(1, prod(self.source.shape))

    @property
    def code_bits(self) -> int:
        return self.source.code_bits

    @property
    def code_format(self) -> RowFormat | None:
        return self.source.code_format

    @property
    def tile_format(self) -> RowFormat | None:
        return self.source.tile_format

    @property
    def row_unit(self) -> int:
        return self.source.row_unit

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return self.source.files

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> EncodedColumns | None:
        return None

    def sample(self, start: int, nbytes: int) -> bytes:
        return self.source.sample(start, nbytes)


class ComputedView(View):
    """A view with computed values, which doesn't have the codes of its source."""

    @property
    def code_format(self) -> RowFormat | None:
        return None

    @property
    def tile_format(self) -> RowFormat | None:
        return None

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        return None


@dataclass(frozen=True)
class RowsOf(View):
    """The rows `picks` of a matrix, or the values `picks` of a vector.

    A block of rows is read together with the rows that lie between its first and its last one in `source`,
    except for gaps of more than GAP_BYTES. So neighbouring rows should lie near each other in `source`. unit:
    number of rows that change places only among themselves.
    """

    name: str
    source: SourceTensor
    picks: NDArray[np.int64]
    unit: int = 1

    @property
    def row_unit(self) -> int:
        return self.unit

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.picks), *self.source.shape[1:])

    def rows(self, start: int, stop: int) -> Weights:
        picks = self.picks[start:stop]
        known = np.unique(picks)
        row_bytes = self.source.nbytes // self.source.shape[0]
        runs = np.split(known, np.flatnonzero(np.diff(known) * row_bytes > GAP_BYTES) + 1)
        if len(runs) == 1:
            return self._run(picks)
        return np.concatenate([self._run(run) for run in runs])[np.searchsorted(known, picks)]

    def _run(self, picks: NDArray[np.int64]) -> Weights:
        first = int(picks.min())
        return self.source.rows(first, int(picks.max()) + 1)[picks - first]

    def columns(self, start: int, stop: int) -> Weights:
        return self.source.columns(start, stop)[self.picks]

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        picks = self.picks[start:stop]
        first = int(picks.min())
        rows = self.source.quantized_rows(first, int(picks.max()) + 1, stored)
        if rows is None:
            return None
        taken = picks - first
        return SourceCodes(rows.codes[taken], rows.scales[taken], rows.biases[taken])

    def vector(self) -> NDArray[np.float32]:
        return self.source.vector()[self.picks]


def passed_nbytes(tensor: SourceTensor) -> int:
    """The number of bytes between a tensor's first and last row that reading the tensor skips.

    They belong to its neighbours in a fused projection. Over a network they are sent nevertheless, up to the
    projection's end.
    """
    if isinstance(tensor, Scaled):
        return passed_nbytes(tensor.source)
    if not isinstance(tensor, RowsOf):
        return 0
    picks, source = tensor.picks, tensor.source
    while isinstance(source, RowsOf):
        picks, source = source.picks[picks.min() : picks.max() + 1], source.source
    if len(source.shape) < 2:
        return source.nbytes - tensor.nbytes
    row_bytes = source.nbytes // source.shape[0]
    known = np.unique(picks)
    if known[-1] - known[0] == len(known) - 1:
        return 0
    gaps = np.diff(np.append(known, source.shape[0])) - 1
    return int(gaps[gaps * row_bytes < GAP_BYTES].sum()) * row_bytes


@dataclass(frozen=True)
class Transposed(ComputedView):
    """The matrix `source`, transposed."""

    name: str
    source: SourceTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1]

    @property
    def row_unit(self) -> int:
        return 1

    def rows(self, start: int, stop: int) -> Weights:
        return self.source.columns(start, stop).T

    def columns(self, start: int, stop: int) -> Weights:
        return self.source.rows(start, stop).T

    def vector(self) -> NDArray[np.float32]:
        raise ValueError(f"{self.name} is a matrix")


@dataclass(frozen=True)
class ColumnsOf(View):
    """All columns of a matrix in the order `picks`. Runs of `unit` columns stay together."""

    name: str
    source: SourceTensor
    picks: NDArray[np.int64]
    unit: int

    @property
    def code_format(self) -> RowFormat | None:
        source_format = self.source.code_format
        return (
            source_format if source_format is not None and self.unit % source_format.group_size == 0 else None
        )

    @property
    def tile_format(self) -> RowFormat | None:
        source_format = self.source.tile_format
        return (
            source_format
            if source_format is not None and self.unit % _columns_together(source_format) == 0
            else None
        )

    def rows(self, start: int, stop: int) -> Weights:
        return self.source.rows(start, stop)[:, self.picks]

    def columns(self, start: int, stop: int) -> Weights:
        picks = self.picks[start:stop]
        first = int(picks.min())
        return self.source.columns(first, int(picks.max()) + 1)[:, picks - first]

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        """The codes and scales of rows [start, stop), with full groups of columns reordered; None if codes
        can't be kept.
        """
        size = _columns_together(stored)
        rows = None if self.unit % size else self.source.quantized_rows(start, stop, stored)
        if rows is None:
            return None
        groups = rows.codes.shape[1] * 8 // (stored.bits * size)
        order = np.arange(groups)
        order[: len(self.picks) // size] = self.picks[::size] // size

        def ordered(values: NDArray[Any]) -> NDArray[Any]:
            return values.reshape(len(values), groups, -1)[:, order].reshape(values.shape)

        biases = ordered(rows.biases) if rows.biases.shape[1] else rows.biases
        return SourceCodes(ordered(rows.codes), ordered(rows.scales), biases)

    def vector(self) -> NDArray[np.float32]:
        raise ValueError(f"{self.name} is a matrix")


@dataclass(frozen=True)
class HeadsTransposed(ComputedView):
    """The first `count` rows of each of `heads` equal parts of a matrix (R, C), each part transposed.

    The shape is (heads * C, count).
    """

    name: str
    source: SourceTensor
    heads: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.heads * self.source.shape[1], self.count)

    @property
    def row_unit(self) -> int:
        return self.source.shape[1]

    def rows(self, start: int, stop: int) -> Weights:
        unit = self.row_unit
        first, last = start // unit, -(-stop // unit)
        heads = np.concatenate([self._head(head, 0, self.count) for head in range(first, last)])
        return heads[start - first * unit : stop - first * unit]

    def columns(self, start: int, stop: int) -> Weights:
        return np.concatenate([self._head(head, start, stop) for head in range(self.heads)])

    def vector(self) -> NDArray[np.float32]:
        raise ValueError(f"{self.name} is a matrix")

    def _head(self, head: int, start: int, stop: int) -> Weights:
        first = head * (self.source.shape[0] // self.heads)
        return self.source.rows(first + start, first + stop).T


@dataclass(frozen=True)
class Scaled(ComputedView):
    """The values of `source`, multiplied by `factor` and then increased by `shift`, in float32."""

    name: str
    source: SourceTensor
    factor: float = 1.0
    shift: float = 0.0

    @property
    def dtype(self) -> str:
        return "F32"

    def rows(self, start: int, stop: int) -> Weights:
        return self._scaled(self.source.rows(start, stop))

    def columns(self, start: int, stop: int) -> Weights:
        return self._scaled(self.source.columns(start, stop))

    def vector(self) -> NDArray[np.float32]:
        return self._scaled(self.source.vector())

    def _scaled(self, values: Weights) -> NDArray[np.float32]:
        scaled = to_float32(values) * np.float32(self.factor) + np.float32(self.shift)
        return scaled.astype(np.float32)


@dataclass(frozen=True)
class Joined(View):
    """The vectors `parts`, of one type, concatenated."""

    name: str
    parts: tuple[SourceTensor, ...]

    @property
    def source(self) -> SourceTensor:  # type: ignore[override]
        return self.parts[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(prod(part.shape) for part in self.parts),)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(dict.fromkeys(file for part in self.parts for file in part.files))

    def rows(self, start: int, stop: int) -> Weights:
        return self.vector()[start:stop]

    def columns(self, start: int, stop: int) -> Weights:
        raise ValueError(f"{self.name} is a vector; it has no columns")

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        return None

    def vector(self) -> NDArray[np.float32]:
        return np.concatenate([part.vector() for part in self.parts])

    def sample(self, start: int, nbytes: int) -> bytes:
        return _sample(self.parts, start, nbytes)


@dataclass(frozen=True)
class Matrices(View):
    """The matrices `parts`, which have the same type, stacked by rows, (R of all, C), or by columns, (R, C of
    all).

    beside: whether they are stacked by columns, side by side.
    """

    name: str
    parts: tuple[SourceTensor, ...]
    by_columns: bool = False

    @property
    def source(self) -> SourceTensor:  # type: ignore[override]
        return self.parts[0]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The index of the first row, or column, of each part, and the end of the last part."""
        return np.cumsum([0, *(part.shape[self.by_columns] for part in self.parts)])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.parts[0].shape
        end = int(self._starts[-1])
        return (rows, end) if self.by_columns else (end, columns)

    @cached_property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def values_nbytes(self) -> int:
        return sum(part.values_nbytes for part in self.parts)

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(dict.fromkeys(file for part in self.parts for file in part.files))

    @property
    def code_bits(self) -> int:
        return self.parts[-1].code_bits

    @property
    def code_format(self) -> RowFormat | None:
        """The format of the last part. None if parts are stacked by columns or have several types, since no
        codes are kept then.
        """
        return None if self.by_columns or not self._has_one_type else self.parts[-1].code_format

    @property
    def tile_format(self) -> RowFormat | None:
        return None if self.by_columns or not self._has_one_type else self.parts[-1].tile_format

    @cached_property
    def _has_one_type(self) -> bool:
        return len({part.dtype for part in self.parts}) == 1

    def rows(self, start: int, stop: int) -> Weights:
        if self.by_columns:
            return np.concatenate([part.rows(start, stop) for part in self.parts], axis=1)
        return np.concatenate([part.rows(*span) for part, span in self._spans(start, stop)])

    def columns(self, start: int, stop: int) -> Weights:
        if not self.by_columns:
            return np.concatenate([part.columns(start, stop) for part in self.parts])
        return np.concatenate([part.columns(*span) for part, span in self._spans(start, stop)], axis=1)

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        if self.by_columns or not self._has_one_type:
            return None
        parts = [part.quantized_rows(*span, stored) for part, span in self._spans(start, stop)]
        codes = [it for it in parts if it is not None]
        if len(codes) < len(parts):
            return None
        return SourceCodes(
            *(np.concatenate([getattr(it, name) for it in codes]) for name in ("codes", "scales", "biases"))
        )

    def vector(self) -> NDArray[np.float32]:
        raise ValueError(f"{self.name} is a matrix")

    def sample(self, start: int, nbytes: int) -> bytes:
        return _sample(self.parts, start, nbytes)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[SourceTensor, tuple[int, int]]]:
        """Yields the parts that contain [start, stop), with the range in each, counted from the
        part's start.
        """
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for index in range(max(0, first), len(self.parts)):
            begin, end = int(self._starts[index]), int(self._starts[index + 1])
            if begin >= stop:
                return
            if end > start:
                yield self.parts[index], (max(start, begin) - begin, min(stop, end) - begin)


def _columns_together(stored: RowFormat) -> int:
    """Number of columns that share a scale of either level."""
    return SUPER_SIZE if stored.two_levels else stored.group_size


def _sample(parts: Sequence[SourceTensor], start: int, nbytes: int) -> bytes:
    """Some bytes of consecutive parts, as in `SourceTensor.sample`."""
    data = b""
    for part in parts:
        if len(data) == nbytes:
            break
        if start < part.nbytes:
            data += part.sample(start, nbytes - len(data))
        start = max(0, start - part.nbytes)
    return data


def head_rows(heads: int, order: Sequence[int]) -> NDArray[np.int64]:
    """The row indices of a projection with `heads` heads, in which each head's rows are in `order`."""
    rows: NDArray[np.int64] = np.arange(heads)[:, None] * len(order) + np.array(order)
    return rows.reshape(-1)
