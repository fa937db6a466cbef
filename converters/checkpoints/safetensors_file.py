"""The tensors of one safetensors file. Header and bytes are read by position, and checked.

The file is not mapped: a mapped file that shrinks kills the process, and a mapping counts against a memory
cgroup. The safetensors library maps files, so the header is checked here, by the same rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.strict_json import unique_keys
from ondevice.converters.checkpoints.base import SourceFile, StoredTensor, StoredType, plain
from ondevice.errors import CheckpointError, UnsupportedModelError, json_fault

MAX_HEADER_BYTES = 8 << 20
"""Most bytes of a header: 50,000 tensors. Models that can be converted have a thousand, of 150 bytes each."""
MAX_DIMENSIONS = 8
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of a value, by the type's name in the format."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor of any type of the format. Its bytes begin at byte `offset` of `file`, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: SourceFile
    offset: int

    @property
    def nbytes(self) -> int:
        return BITS[self.dtype] * prod(self.shape) // 8

    @property
    def row_nbytes(self) -> int:
        """Bytes of a matrix's row."""
        return BITS[self.dtype] * self.shape[1] // 8

    def row_bytes(self, start: int, stop: int, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
        """Bytes [first, last) of each of a matrix's rows [start, stop), (stop - start, last - first)."""
        last = self.row_nbytes if last is None else last
        out = np.empty((stop - start, last - first), dtype=np.uint8)
        if last - first == self.row_nbytes:
            self.file.read_into(self.offset + start * self.row_nbytes, out)
            return out
        self.file.read_columns(self.offset + start * self.row_nbytes + first, self.row_nbytes, out)
        return out


def read_tensors(file: SourceFile) -> dict[str, RawTensor]:
    """Every tensor of `file`, by name.

    Raises CheckpointError if the file is truncated or its header is invalid.
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.path.name} isn't a safetensors file: its header would be {length} bytes"
        )
    header = _header(file, length)
    spans = {name: _span(name, entry, file) for name, entry in header.items()}
    end = 0
    for name in sorted(spans, key=lambda name: spans[name]):
        start, stop = spans[name]
        if start != end:
            raise _unsound(file, f"{plain(name)} begins at byte {start} of the data, not at {end}")
        end = stop
    if file.nbytes != 8 + length + end:
        raise _unsound(file, f"it has {file.nbytes} bytes, and its header asks for {8 + length + end}")
    first = 8 + length
    file.expect({name: (first + start, first + stop) for name, (start, stop) in spans.items()})
    return {
        name: RawTensor(name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + spans[name][0])
        for name, entry in header.items()
    }


def floating(tensor: RawTensor) -> StoredTensor:
    """The tensor as floating-point values. Raises UnsupportedModelError for another type."""
    dtype: Any = tensor.dtype
    if dtype not in get_args(StoredType):
        raise UnsupportedModelError(
            f"{tensor.file.path.name}: {plain(tensor.name)} is stored as {dtype}; only F32, F16 and BF16 can "
            "be converted, so start from the checkpoint before it was quantised"
        )
    return StoredTensor(tensor.name, dtype, tensor.shape, tensor.file, tensor.offset)


def _header(file: SourceFile, length: int) -> dict[str, dict[str, Any]]:
    try:
        header = json.loads(file.read(8, length).decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _unsound(file, f"its header isn't sound JSON: {json_fault(error)}") from error
    if not isinstance(header, dict):
        raise _unsound(file, "its header isn't an object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not isinstance(entry, dict):
            raise _unsound(file, f"{plain(name)} isn't an object")
    return header


def _span(name: str, entry: dict[str, Any], file: SourceFile) -> tuple[int, int]:
    """The start and the stop of a tensor in the data. Raises CheckpointError if they don't fit its type and
    shape.
    """
    bits: int | None = BITS.get(str(entry.get("dtype")))
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    named = plain(name)
    if bits is None:
        raise _unsound(file, f"{named} is of the unknown type {entry.get('dtype')!a:.40}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _unsound(file, f"{named} has the shape {shape!a:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _unsound(file, f"{named} has the data_offsets {offsets!a:.80}")
    start, stop = offsets
    if 8 * (stop - start) != bits * prod(shape):
        raise _unsound(file, f"{named} has {stop - start} bytes, which aren't those of {shape!a:.80}")
    return start, stop


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _unsound(file: SourceFile, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path.name} is truncated or isn't a safetensors file ({reason}); download it again"
    )
