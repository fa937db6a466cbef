"""Reads a matrix quantised by MLX: its codes, and the values that they stand for.

Affine: w = scale * q + bias, with q of 2, 3, 4, 5, 6 or 8 bits, packed low bits first without gaps along a
row. mxfp4: w = 2^(scale - 127) * e2m1(q), with q of 4 bits and scales of 8. Legend: R rows, C columns, G
groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.codes import E2M1, E8M0_NAN, pack, powers, unpack
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.config import GROUP_SIZE, MXFP4, Bits, RowFormat
from ondevice.converters.checkpoints.base import NUMPY_TYPES, SourceFile
from ondevice.converters.checkpoints.safetensors_file import RawTensor
from ondevice.converters.quantize import EncodedColumns, SourceCodes, Weights, padded_codes, to_float32
from ondevice.errors import CheckpointError

STEP_BYTES = 4 << 20
"""Bytes of float32 values made at a time; unpacking takes about as many again."""


@dataclass(frozen=True)
class MlxTensor:
    """A `SourceTensor` of R rows and C columns, quantised by MLX, whose parts are checked to agree.

    codes: uint32 (R, C * bits / 32). scales, biases: (R, C / group), floating-point; mxfp4 has uint8 scales
    and no biases. In a stack of experts' matrices, all of these are (E, R, ...); `piece` reads one expert.
    """

    name: str
    bits: int
    group: int
    codes: RawTensor
    scales: RawTensor
    biases: RawTensor | None

    @property
    def dtype(self) -> str:
        mode = "mxfp4" if self.biases is None else f"affine {self.scales.dtype}"
        return f"mlx {mode} {self.bits} bits, groups of {self.group}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def values_nbytes(self) -> int:
        return 4 * prod(self.shape)

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def row_unit(self) -> int:
        return 1

    @property
    def files(self) -> tuple[SourceFile, ...]:
        files = {part.file.path: part.file for part in self._parts}
        return tuple(files.values())

    def piece(self, name: str, number: int, count: int) -> MlxTensor:
        """Matrix `number` of a stack of `count` matrices of equal size below each other, as a tensor."""
        codes, scales = _piece(self.codes, number, count), _piece(self.scales, number, count)
        biases = None if self.biases is None else _piece(self.biases, number, count)
        return replace(self, name=name, codes=codes, scales=scales, biases=biases)

    def rows(self, start: int, stop: int) -> Weights:
        return self._values(start, stop, 0, self.scales.shape[1])

    def columns(self, start: int, stop: int) -> Weights:
        first, last = start // self.group, -(-stop // self.group)
        values = self._values(0, self.shape[0], first, last)
        return values[:, start - first * self.group : stop - first * self.group]

    @property
    def code_format(self) -> RowFormat | None:
        if self.biases is None:
            return MXFP4
        return RowFormat(cast(Bits, max(self.bits, 4)), 32 if self.group % GROUP_SIZE else 64)

    @property
    def tile_format(self) -> RowFormat | None:
        return self.code_format

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        """The codes of rows in groups of 32, 64 or 128, if they have `stored.bits` bits or, as the same
        numbers, fewer. None for other formats.

        Codes of mxfp4 are kept only in that format.
        """
        bits, size = stored.bits, stored.group_size
        if self.biases is None:
            return self._mxfp4_rows(start, stop) if stored.mxfp4 else None
        if not stored.has_biases or self.bits > bits or self.group % size:
            return None
        codes = self.codes.row_bytes(start, stop)
        if self.bits != bits:
            codes = pack(unpack(codes, self.bits), bits)
        scales, biases = (
            np.repeat(self._floats(part, start, stop, 0, self.scales.shape[1]), self.group // size, axis=1)
            for part in (self.scales, self.biases)
        )
        return padded_codes(codes, scales, biases, RowLayout(self.shape[1], *stored))

    def _mxfp4_rows(self, start: int, stop: int) -> SourceCodes:
        scales = self.scales.row_bytes(start, stop)
        none = np.zeros((len(scales), 0), dtype=np.float16)
        codes = self.codes.row_bytes(start, stop)
        return padded_codes(codes, scales, none, RowLayout(self.shape[1], *MXFP4))

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> EncodedColumns | None:
        return None

    def vector(self) -> NDArray[np.float32]:
        raise CheckpointError(
            f"{self.name} is a quantised matrix, where a vector is meant; download it again"
        )

    def sample(self, start: int, nbytes: int) -> bytes:
        """Some bytes of each part, because fine-tuning may change only the scales."""
        parts = self._parts
        sample = b""
        for part in parts:
            at = start * part.nbytes // self.nbytes
            sample += part.file.sample(part.offset + at, min(nbytes // len(parts), part.nbytes - at))
        return sample

    @property
    def _parts(self) -> tuple[RawTensor, ...]:
        return (self.codes, self.scales) if self.biases is None else (self.codes, self.scales, self.biases)

    def _values(self, start: int, stop: int, first: int, last: int) -> NDArray[np.float32]:
        """The values of rows [start, stop) and groups [first, last), dequantised a few rows at a time."""
        out = np.empty((stop - start, (last - first) * self.group), dtype=np.float32)
        group_nbytes = self.group * self.bits // 8
        step = max(1, STEP_BYTES // (4 * out.shape[1]))
        for row in range(start, stop, step):
            end = min(row + step, stop)
            q = unpack(self.codes.row_bytes(row, end, first * group_nbytes, last * group_nbytes), self.bits)
            values = out[row - start : end - start].reshape(end - row, last - first, self.group)
            # What overflows here is refused by the quantiser, which names the tensor.
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                if self.biases is None:
                    scales = self._powers(row, end, first, last)[:, :, None]
                    np.multiply(E2M1[q].reshape(values.shape), scales, out=values)
                    continue
                scales = self._floats(self.scales, row, end, first, last)[:, :, None]
                np.multiply(q.reshape(values.shape), scales, out=values, dtype=np.float32)
                values += self._floats(self.biases, row, end, first, last)[:, :, None]
        return out

    def _floats(self, part: RawTensor, start: int, stop: int, first: int, last: int) -> NDArray[np.float32]:
        """Scales or biases of rows [start, stop) and groups [first, last).

        Raises CheckpointError if one isn't finite.
        """
        dtype = NUMPY_TYPES[part.dtype]  # type: ignore[index]
        stored = part.row_bytes(start, stop, first * dtype.itemsize, last * dtype.itemsize).view(dtype)
        values = to_float32(stored)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{part.name} holds NaN or infinity; the checkpoint is damaged, download it again"
            )
        return values

    def _powers(self, start: int, stop: int, first: int, last: int) -> NDArray[np.float32]:
        """The scales of mxfp4, powers of two, of rows [start, stop) and groups [first, last).

        Raises CheckpointError for the code of NaN.
        """
        exponents = self.scales.row_bytes(start, stop, first, last)
        if (exponents == E8M0_NAN).any():
            raise CheckpointError(
                f"{self.scales.name} holds {E8M0_NAN}, which means NaN; the checkpoint is damaged, download "
                "it again"
            )
        return powers(exponents)


def _piece(part: RawTensor, number: int, count: int) -> RawTensor:
    """The rows of matrix `number` in `part`, which holds `count` matrices of equal size below each other."""
    rows, offset = prod(part.shape[:-1]) // count, part.offset + number * (part.nbytes // count)
    return replace(part, shape=(rows, part.shape[-1]), offset=offset)
