"""The tensors of a GGUF file: plain ones, and quantised ones, which are decoded block by block.

Legend: R rows, C columns, B blocks of a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.matrix_layout import RowLayout
from ondevice.config import RowFormat
from ondevice.converters.checkpoints.base import (
    SourceFile,
    SourceTensor,
    StoredTensor,
    StoredType,
    in_halves,
    not_finite,
)
from ondevice.converters.checkpoints.gguf_codecs import CODE_FORMATS, DECODERS, TILE_FORMATS, decode
from ondevice.converters.checkpoints.gguf_file import TensorEntry, TensorType
from ondevice.converters.quantize import QuantizedRows, SourceCodes, padded_codes
from ondevice.errors import UnsupportedModelError
from ondevice.kernels import _native

_READ_BYTES = 1 << 20
"""Stored bytes read before they are decoded."""


def source_tensor(
    name: str, file: SourceFile, stored_name: str, entry: TensorEntry, interleaved_head_dim: int = 0
) -> SourceTensor:
    """The tensor `stored_name` of `file`, under the name that the converter uses for it.

    interleaved_head_dim: see `StoredTensor`. Raises UnsupportedModelError, which names the type, for values
    that can't be decoded.
    """
    kind = entry.type
    if kind.name in get_args(StoredType):
        return StoredTensor(
            name, cast(StoredType, kind.name), entry.shape, file, entry.offset, interleaved_head_dim
        )
    if kind.name not in DECODERS:
        raise UnsupportedModelError(
            f"{file.path.name}: {stored_name} is stored as {kind.name}; what can be converted is F32, F16, "
            f"BF16, {', '.join(DECODERS)}, so take another quantisation of the model, such as Q4_K_M or Q8_0"
        )
    return QuantizedTensor(name, kind, entry.shape, file, entry.offset, interleaved_head_dim)


@dataclass(frozen=True)
class QuantizedTensor:
    """A `SourceTensor` whose rows are stored in quantised blocks and returned as float32.

    interleaved_head_dim: see `StoredTensor`.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: SourceFile
    offset: int
    interleaved_head_dim: int = 0

    @property
    def dtype(self) -> str:
        return self.type.name

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.block * self.type.nbytes

    @property
    def values_nbytes(self) -> int:
        return 4 * prod(self.shape)

    @property
    def code_bits(self) -> int:
        digits = re.search(r"\d", self.type.name)
        return int(digits[0]) if digits else 0

    @property
    def row_unit(self) -> int:
        return self.interleaved_head_dim or 1

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return (self.file,)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        size = self.interleaved_head_dim or 1
        first, last = start // size * size, -(-stop // size) * size
        out = np.empty((last - first, self.shape[-1]), dtype=np.float32)
        self._decode_rows(first, out)
        return in_halves(out, size)[start - first : stop - first] if size > 1 else out

    def columns(self, start: int, stop: int) -> NDArray[np.float32]:
        """Columns of all rows, (R, n), decoded from the blocks that contain them, a few rows at a time."""
        rows, cols = self.shape
        if (start, stop) == (0, cols):
            return self.rows(0, rows)
        block = self.type.block
        first, last = start // block, -(-stop // block)
        out = np.empty((rows, stop - start), dtype=np.float32)
        step = max(1, _READ_BYTES // ((last - first) * self.type.nbytes))
        stored = np.empty((min(step, rows), (last - first) * self.type.nbytes), dtype=np.uint8)
        values = np.empty((min(step, rows), (last - first) * block), dtype=np.float32)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            at = self.offset + row * self._row_bytes + first * self.type.nbytes
            self.file.read_columns(at, self._row_bytes, stored[:count])
            self._decode(stored[:count], values[:count])
            out[row : row + count] = values[:count, start - first * block : stop - first * block]
        return out

    @property
    def code_format(self) -> RowFormat | None:
        return CODE_FORMATS.get(self.type.name)

    @property
    def tile_format(self) -> RowFormat | None:
        return TILE_FORMATS.get(self.type.name, self.code_format)

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        """The codes of rows in groups of 32, with their number of bits or, as the same numbers, with more
        bits. None for other formats.

        Codes of MXFP4 are kept only in that format, and codes of tile formats only in theirs.
        """
        if stored.tiles_only:
            return self._tile_rows(start, stop, stored) if stored == self.tile_format else None
        source = self.code_format
        if source is None or stored.bits == 16 or source.bits > stored.bits or stored.group_size != 32:
            return None
        if (stored.implied_bias and not source.implied_bias) or stored.mxfp4 != source.mxfp4:
            return None
        if start == stop:
            return SourceCodes(*(np.empty((0, 0), dtype=np.uint8) for _ in range(3)))
        read = self._stored_rows(start, stop)
        rows, cols = len(read), self.shape[-1]
        codes = np.empty((rows, cols * stored.bits // 8), dtype=np.uint8)
        # A block of 32 has a scale, and a bias that isn't implied, in float16.
        halves = self.type.block == 32 and stored.implied_bias == source.implied_bias
        dtype = np.float16 if halves else np.float32
        scales = np.empty((rows, cols // 32), dtype=np.uint8 if source.mxfp4 else dtype)
        biases = np.empty((rows, cols // 32 if stored.has_biases else 0), dtype=dtype)
        if source.mxfp4:
            _native.copy_mxfp4_blocks(read, codes, scales)
        elif halves:
            bits = scales.view(np.uint16), biases.view(np.uint16)
            _native.copy_gguf_codes_and_halves(self.type.name, read, stored, codes, *bits)
        else:
            _native.copy_gguf_codes(self.type.name, read, stored, codes, scales, biases)
        codes, scales, biases = (self._in_order(part, start, stop) for part in (codes, scales, biases))
        return padded_codes(codes, scales, biases, RowLayout(cols, *stored))

    def _tile_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes:
        """Rows [start, stop) in the tile format of the tensor's type."""
        read, cols = self._stored_rows(start, stop), self.shape[-1]
        codes = np.empty((len(read), cols * stored.bits // 8), dtype=np.uint8)
        of_block = stored.header_bytes if stored.two_levels else 2
        scales = np.empty((len(read), cols // self.type.block * of_block), dtype=np.uint8)
        _native.copy_gguf_rows(self.type.name, read, codes, scales)
        codes, scales = (self._in_order(part, start, stop) for part in (codes, scales))
        none = np.empty((stop - start, 0), dtype=np.float16)
        if stored.two_levels:
            return SourceCodes(codes, scales, none)
        return padded_codes(codes, scales.view(np.float16), none, RowLayout(cols, *stored))

    def _stored_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The blocks (n, bytes) of rows [start, stop), and of other rows that belong to the same heads."""
        size = self.row_unit
        first, last = start // size * size, -(-stop // size) * size
        read = np.empty((last - first, self._row_bytes), dtype=np.uint8)
        self.file.read_into(self.offset + first * self._row_bytes, read)
        return read

    def _in_order(self, values: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of values computed from `_stored_rows`, in the order of a bundle."""
        if not self.interleaved_head_dim:
            return values
        first = start // self.interleaved_head_dim * self.interleaved_head_dim
        return in_halves(values, self.interleaved_head_dim)[start - first : stop - first]

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> GgufColumns | None:
        """The stored blocks of columns [start, stop); None if the kernels don't know the type.

        At 4 bits they take an eighth of the memory of decoded values.
        """
        if self.code_format is None or stored.bits == 16 or self.interleaved_head_dim:
            return None
        block, nbytes = self.type.block, self.type.nbytes
        first, last = start // block, -(-stop // block)
        data = np.empty((self.shape[0], (last - first) * nbytes), dtype=np.uint8)
        if data.shape[1] == self._row_bytes:
            self.file.read_into(self.offset, data)
        elif data.size:
            self.file.read_columns(self.offset + first * nbytes, self._row_bytes, data)
        return GgufColumns(self.type, data, start - first * block, stop - first * block)

    def vector(self) -> NDArray[np.float32]:
        values = np.empty((1, self.shape[0]), dtype=np.float32)
        self._decode_rows(0, values)
        if not np.isfinite(values).all():
            raise not_finite(self)
        return in_halves(values[0], self.interleaved_head_dim) if self.interleaved_head_dim else values[0]

    def sample(self, start: int, nbytes: int) -> bytes:
        return self.file.sample(self.offset + start, min(nbytes, self.nbytes - start))

    @property
    def _row_bytes(self) -> int:
        return self.shape[-1] // self.type.block * self.type.nbytes

    def _decode_rows(self, first: int, out: NDArray[np.float32]) -> None:
        """Decode the rows from `first` on into `out` (n, C)."""
        step = max(1, _READ_BYTES // self._row_bytes)
        for row in range(0, len(out), step):
            values = out[row : row + step]
            stored = np.empty((len(values), self._row_bytes), dtype=np.uint8)
            self.file.read_into(self.offset + (first + row) * self._row_bytes, stored)
            self._decode(stored, values)

    def _decode(self, stored: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Decode rows of full blocks, from (n, B * bytes) to (n, B * values), both contiguous."""
        blocks = stored.reshape(-1, self.type.nbytes)
        decode(self.type.name, blocks, out.reshape(-1, self.type.block))


@dataclass(frozen=True)
class GgufColumns:
    """Columns [start, stop) of the blocks `data`, (C, B * bytes), as an `EncodedColumns`. start: a multiple
    of 16.
    """

    type: TensorType
    data: NDArray[np.uint8]
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.stop - self.start, len(self.data))

    def taken(self, start: int, stop: int) -> GgufColumns:
        return GgufColumns(self.type, self.data, self.start + start, self.start + stop)

    def quantised(self, runner: _native.Runner, stored: RowFormat) -> QuantizedRows | None:
        rows, cols = self.shape
        layout = RowLayout(cols, *stored)
        codes = np.empty((rows, layout.codes_bytes), dtype=np.uint8)
        scales, biases = (np.empty((rows, layout.scales_bytes // 2), dtype=np.uint16) for _ in range(2))
        if not _native.quantize_gguf_columns(
            runner, self.type.name, self.data, self.start, layout.stored, codes, scales, biases
        ):
            return None
        return QuantizedRows(codes, scales.view(np.float16), biases.view(np.float16))

    def decoded(self, picks: NDArray[np.int64]) -> NDArray[np.float32]:
        out = np.empty((len(picks), len(self.data)), dtype=np.float32)
        for row, pick in zip(out, picks.tolist(), strict=True):
            _native.decode_gguf_column(self.type.name, self.data, self.start + pick, row)
        return out
