"""Weights of Hugging Face folders that are stored as 8-bit floats, as in DeepSeek V3.

They are `NAME.weight` in E4M3, and `NAME.weight_scale_inv` with a factor for each block of 128 x 128 weights,
or of another size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ondevice.config import RowFormat
from ondevice.converters.architectures.config_reader import SAME_REPOSITORY, shown
from ondevice.converters.checkpoints.base import SourceFile, SourceTensor, plain
from ondevice.converters.checkpoints.mlx_folder import COPY_KEY, UNQUANTISED
from ondevice.converters.checkpoints.safetensors_file import RawTensor, floating
from ondevice.converters.quantize import EncodedColumns, SourceCodes, Weights
from ondevice.errors import CheckpointError, UnsupportedModelError

METHOD = "fp8"
CODES = "F8_E4M3"
SCALES = "_scale_inv"
MAX_BLOCK = 1 << 16
_HARMLESS = frozenset(
    (
        "quant_method",
        "activation_scheme",
        "scale_fmt",
        "modules_to_not_convert",
        "ignored_layers",
        "dequantize",
    )
)
"""Keys that the tensors imply, or that say how weights are run elsewhere."""


def read_fp8(values: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block, if `config.json` says that weights are in E4M3 with block scales;
    otherwise None.

    Raises UnsupportedModelError for an unknown setting.
    """
    section = values.get(COPY_KEY)
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        return None
    unknown = sorted(set(section) - _HARMLESS - {"fmt", "weight_block_size"})
    if unknown:
        raise UnsupportedModelError(
            f"config.json: {COPY_KEY} has {plain(unknown[0])}, which isn't known here; {UNQUANTISED}"
        )
    block = section.get("weight_block_size")
    if section.get("fmt", "e4m3") != "e4m3" or not _is_block(block):
        raise UnsupportedModelError(
            f"config.json: {COPY_KEY} has fmt {shown(section.get('fmt'))} and weight_block_size "
            f"{shown(block)}; only e4m3 with blocks of rows and columns can be converted; {UNQUANTISED}"
        )
    rows, columns = block
    return rows, columns


def _is_block(block: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 1 <= size <= MAX_BLOCK for size in block)
    )


def scaled_tensors(tensors: Mapping[str, RawTensor], block: tuple[int, int]) -> dict[str, SourceTensor]:
    """The tensors of a folder by name, each matrix of codes joined with its scales.

    Raises CheckpointError for codes and scales that don't belong together.
    """
    sources: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) in tensors:
            continue
        sources[name] = floating(tensor) if tensor.dtype != CODES else _scaled(tensor, tensors, block)
    return sources


def _scaled(codes: RawTensor, tensors: Mapping[str, RawTensor], block: tuple[int, int]) -> Fp8Tensor:
    scales, shape = tensors.get(f"{codes.name}{SCALES}"), codes.shape
    if len(shape) != 2 or not prod(shape):
        raise CheckpointError(f"{plain(codes.name)} has shape {list(shape)}; {CODES} is of matrices here")
    wanted = tuple(-(-size // by) for size, by in zip(shape, block, strict=True))
    if scales is None:
        raise CheckpointError(f"{plain(codes.name)} has no {SCALES} beside it; is the download complete?")
    if scales.shape != wanted or scales.dtype != "F32":
        raise CheckpointError(
            f"{plain(scales.name)} has shape {list(scales.shape)} and type {scales.dtype}; it must be F32 of "
            f"{list(wanted)}; {SAME_REPOSITORY}"
        )
    return Fp8Tensor(codes, scales, block)


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix of 8-bit floats, each multiplied by its block's scale: a `SourceTensor` of float32 values.

    codes: (R, C) E4M3. scales: (ceil(R / rows of a block), ceil(C / columns of a block)) float32.
    """

    codes: RawTensor
    scales: RawTensor
    block: tuple[int, int]

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def dtype(self) -> str:
        return self.codes.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    @property
    def values_nbytes(self) -> int:
        return 4 * prod(self.shape)

    @property
    def code_bits(self) -> int:
        return 0

    @property
    def code_format(self) -> RowFormat | None:
        return None

    @property
    def tile_format(self) -> RowFormat | None:
        return None

    @property
    def row_unit(self) -> int:
        return 1

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(dict.fromkeys((self.codes.file, self.scales.file)))

    def rows(self, start: int, stop: int) -> Weights:
        return self._values(start, stop, 0, self.shape[1])

    def columns(self, start: int, stop: int) -> Weights:
        return self._values(0, self.shape[0], start, stop)

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        return None

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> EncodedColumns | None:
        return None

    def vector(self) -> NDArray[np.float32]:
        raise ValueError(f"{self.name} is a matrix")

    def sample(self, start: int, nbytes: int) -> bytes:
        return self.codes.file.sample(self.codes.offset + start, min(nbytes, self.nbytes - start))

    def _values(self, start: int, stop: int, first: int, last: int) -> NDArray[np.float32]:
        """Rows [start, stop), columns [first, last)."""
        (tall, wide), size = self.block, self.scales.shape[1] * 4
        above, below, left, right = start // tall, -(-stop // tall), first // wide, -(-last // wide)
        scales = self.scales.row_bytes(above, below, 4 * left, min(4 * right, size)).view("<f4")
        of_rows = np.arange(start, stop) // tall - above
        of_columns = np.arange(first, last) // wide - left
        values = values_of_codes()[self.codes.row_bytes(start, stop, first, last)]
        for row, row_scales in enumerate(scales[:, of_columns]):
            values[of_rows == row] *= row_scales
        return values


@cache
def values_of_codes() -> NDArray[np.float32]:
    """The value that each byte has as E4M3: a sign, a 4-bit exponent minus 7 and a 3-bit fraction.

    There are no infinities; 0x7f and 0xff are NaN (arXiv 2209.05433, table 1).
    """
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    sizes = np.where(
        exponents > 0, np.ldexp(1.0 + fractions / 8.0, exponents - 7), np.ldexp(fractions / 8.0, -6)
    )
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)
