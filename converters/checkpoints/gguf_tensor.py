"""Tensors of a GGUF file: plain ones as every format stores them, quantised ones decoded block by block.

Legend: R rows, C columns, B blocks of a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.codes import pack
from ondevice.bundle.layout import RowLayout
from ondevice.config import RowFormat
from ondevice.converters.checkpoints.base import SourceFile, SourceTensor, StoredTensor, StoredType, in_halves
from ondevice.converters.checkpoints.gguf_codecs import CODE_FORMATS, DECODERS, decode, pack_q4_0, unpack
from ondevice.converters.checkpoints.gguf_file import TensorEntry, TensorType
from ondevice.converters.quantize import SourceCodes, padded_codes
from ondevice.errors import CheckpointError, UnsupportedModelError

_READ_BYTES = 1 << 20
"""Stored bytes that are read before they are decoded."""


def source_tensor(
    name: str, file: SourceFile, stored_name: str, entry: TensorEntry, interleaved_head_dim: int = 0
) -> SourceTensor:
    """The tensor `stored_name` of `file`, by the name that the converter uses for it.

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
    """A `SourceTensor` whose rows are stored in quantised blocks; it gives float32.

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
        """Columns of all rows. Of each row, the blocks that hold them are read, a few rows at a time."""
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

    def quantised_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        """Codes are kept in groups of 32, at their own bits or, as the same numbers, at more."""
        own = self.code_format
        if own is None or stored.bits == 16 or own.bits > stored.bits or stored.group_size != 32:
            return None
        if stored.implied_bias and not own.implied_bias:
            return None
        size = self.interleaved_head_dim or 1
        first, last = start // size * size, -(-stop // size) * size
        rows = last - first
        read = np.empty((rows, self._row_bytes), dtype=np.uint8)
        self.file.read_into(self.offset + first * self._row_bytes, read)
        blocks = read.reshape(-1, self.type.nbytes)
        codes, scales, biases = self._stored_codes(blocks, rows, own, stored)
        if size > 1:
            codes, scales, biases = (
                in_halves(part, size)[start - first : stop - first] for part in (codes, scales, biases)
            )
        return padded_codes(codes, scales, biases, RowLayout(self.shape[-1], *stored))

    def _stored_codes(
        self, blocks: NDArray[np.uint8], rows: int, own: RowFormat, stored: RowFormat
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
        """Codes, scales and biases of blocks (n, bytes), as `stored` has them."""
        if self.type.name == "Q4_0" and stored == own:
            scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32).reshape(rows, -1)
            return pack_q4_0(blocks).reshape(rows, -1), scales, scales[:, :0]
        codes, scales, biases = unpack(self.type.name, blocks)
        codes, scales = codes.reshape(rows, -1), scales.reshape(rows, -1)
        if own.implied_bias:
            codes = codes + np.uint8(stored.zero - own.zero) if stored.implied_bias else codes
            biases = np.float32(-own.zero) * scales
        assert biases is not None
        biases = biases.reshape(rows, -1)[:, : 0 if stored.implied_bias else None]
        return pack(codes, stored.bits), scales, biases

    def vector(self) -> NDArray[np.float32]:
        values = np.empty((1, self.shape[0]), dtype=np.float32)
        self._decode_rows(0, values)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.name} holds NaN or infinity; the checkpoint is damaged")
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
        """Decode rows of whole blocks: (n, B * bytes) to (n, B * values), both contiguous."""
        blocks = stored.reshape(-1, self.type.nbytes)
        decode(self.type.name, blocks, out.reshape(-1, self.type.block))
