"""The header of one GGUF file: metadata, and the place, shape and type of every tensor.

The layout (little-endian): `GGUF`, uint32 version, uint64 number of tensors, uint64 number of metadata pairs,
the pairs, the tensors' entries, and from the next multiple of the alignment on the tensors' values. The file
is read by position and never mapped. Every count and length is compared with the file's size and with the
limits below before anything is allocated for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.checkpoints.base import SourceFile, plain
from ondevice.errors import CheckpointError, UnsupportedModelError

MAX_HEADER_BYTES = 64 << 20
"""Most bytes of a header. A vocabulary of 256,000 tokens with 500,000 merges takes 20 MB."""
MAX_ITEMS = 1 << 21
"""Most items in all arrays of a header."""
MAX_PAIRS = 1 << 12
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 4 << 20
"""Most bytes of a string; the longest are chat templates, of 20 kB."""
MAX_ALIGNMENT = 1 << 16
MAX_DIMENSIONS = 4
VERSIONS = (2, 3)

Array: TypeAlias = "list[bytes] | NDArray[Any]"
Value: TypeAlias = "bool | int | float | bytes | Array"
"""A metadata value. Strings are stored bytes, which needn't be UTF-8."""

_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
"""Numpy types of metadata types that are single numbers, by type number."""
_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20
"""Bytes of the first read. Each further read is half of what is already there, as each may be a request."""


@dataclass(frozen=True)
class TensorType:
    """A type of stored values: `block` values of a row take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


TENSOR_TYPES = {
    number: TensorType(name, block, nbytes)
    for number, name, block, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (28, "F64", 1, 8), (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip
"""Types by their number in the format."""


@dataclass(frozen=True)
class TensorEntry:
    """The header's entry for a tensor. shape: as in numpy, rows first. offset: from the start of the file."""

    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.block * self.type.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: metadata by key, and tensors by name, all of which lie inside the file.

    file: the file's name, for messages.
    """

    file: str
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]

    def text(self, key: str) -> str | None:
        """A string; None if the key is missing. Raises CheckpointError for another type, or if it isn't
        UTF-8.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, bytes):
            raise self.wrong(key, "a string")
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(key, "UTF-8 text") from error

    def integer(self, key: str) -> int | None:
        """An integer; None if the key is missing."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not int:
            raise self.wrong(key, "a whole number")
        return value

    def boolean(self, key: str) -> bool | None:
        """A boolean; None if the key is missing."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str] | None:
        """An array of strings; None if the key is missing."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(key, "an array of strings")
        try:
            return [item.decode("utf-8") for item in value]
        except UnicodeDecodeError as error:
            raise self.wrong(key, "UTF-8 texts") from error

    def numbers(self, key: str) -> NDArray[Any] | None:
        """An array of numbers; None if the key is missing."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            raise self.wrong(key, "an array of numbers")
        return value

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """The error for a value of the wrong kind."""
        return CheckpointError(
            f"{self.file}: {plain(key)} must be {wanted}; the file is damaged or wasn't written properly"
        )


def read_header(file: SourceFile) -> GgufHeader:
    """The header of `file`, read and vetted.

    Raises CheckpointError if the file is truncated or its header is invalid, UnsupportedModelError for
    another version or byte order, and for an unknown type of tensor.
    """
    reader = _HeaderReader(file)
    if reader.take(4) != b"GGUF":
        raise CheckpointError(f"{file.path.name} isn't a GGUF file: it doesn't begin with GGUF")
    version = reader.number("<u4")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "big-endian" if swapped else f"of GGUF version {version}"
        raise UnsupportedModelError(
            f"{file.path.name} is {what}; versions 2 and 3, little-endian, can be converted, so make it "
            "again with a current llama.cpp"
        )
    tensor_count = reader.count(MAX_TENSORS, "tensors")
    pair_count = reader.count(MAX_PAIRS, "metadata pairs")
    metadata: dict[str, Value] = {}
    for _ in range(pair_count):
        key = reader.name("key")
        if key in metadata:
            raise reader.unsound(f"it has the key {plain(key)} twice")
        metadata[key] = reader.value(key)
    alignment: Any = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.unsound(
            f"general.alignment is {alignment!r:.40}; it must be a power of two up to {MAX_ALIGNMENT}"
        )
    entries = {}
    for _ in range(tensor_count):
        name = reader.name("tensor name")
        if name in entries:
            raise reader.unsound(f"it has the tensor {plain(name)} twice")
        entries[name] = reader.tensor(name)
    placed = _placed(reader, entries, alignment)
    file.expect({name: (entry.offset, entry.offset + entry.nbytes) for name, entry in placed.items()})
    return GgufHeader(file.path.name, version, metadata, placed)


def _placed(reader: _HeaderReader, entries: dict[str, TensorEntry], alignment: int) -> dict[str, TensorEntry]:
    """The entries with offsets from the start of the file.

    Raises CheckpointError unless tensors follow each other without gaps, aligned.
    """
    data = -(-reader.at // alignment) * alignment
    expected = 0
    placed = {}
    for name, entry in entries.items():
        if entry.offset != expected:
            raise reader.unsound(
                f"{plain(name)} begins at byte {entry.offset} of the data, not at {expected}"
            )
        if data + expected + entry.nbytes > reader.file.nbytes:
            raise reader.unsound(
                f"it has {reader.file.nbytes} bytes, and {plain(name)} would end at byte "
                f"{data + expected + entry.nbytes}"
            )
        placed[name] = TensorEntry(entry.type, entry.shape, data + expected)
        expected += -(-entry.nbytes // alignment) * alignment
    return placed


class _HeaderReader:
    """Reads a header from front to back. `at` is the offset of the next byte in the file."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.at = 0
        self._limit = min(file.nbytes, MAX_HEADER_BYTES)
        self._data = bytearray()
        self._items = 0

    def unsound(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path.name} is truncated or isn't a sound GGUF file ({reason}); download it again"
        )

    def need(self, nbytes: int, what: str) -> int:
        """Read until the next `nbytes` bytes are in memory, and move past them. Returns their offset in
        memory.
        """
        start, end = self.at, self.at + nbytes
        if end > self._limit:
            raise self.unsound(
                f"{what} would end at byte {end} of its header, which ends at {self._limit} or before"
            )
        if end > len(self._data):
            wanted = max(end - len(self._data), _READ_BYTES, len(self._data) // 2)
            more = min(wanted, self._limit - len(self._data))
            self._data += self.file.read(len(self._data), more)
        self.at = end
        return start

    def take(self, nbytes: int, what: str = "its beginning") -> bytes:
        start = self.need(nbytes, what)
        return bytes(self._data[start : start + nbytes])

    def number(self, kind: str, what: str = "its beginning") -> int:
        return int.from_bytes(self.take(np.dtype(kind).itemsize, what), "little")

    def count(self, most: int, what: str) -> int:
        number = self.number("<u8", f"the number of {what}")
        if number > most:
            raise self.unsound(f"it would have {number} {what}; the limit is {most}")
        return number

    def string(self, most: int, what: str) -> bytes:
        start = self.need(8, what)
        (length,) = _LENGTH.unpack_from(self._data, start)
        if length > most:
            raise self.unsound(f"{what} would have {length} bytes; the limit is {most}")
        return self.take(length, what)

    def name(self, what: str) -> str:
        encoded = self.string(MAX_NAME_BYTES, f"a {what}")
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.unsound(f"the {what} {ascii(encoded)[:80]} isn't UTF-8") from error

    def value(self, key: str) -> Value:
        what = f"the value of {plain(key)}"
        kind = self.number("<u4", what)
        if kind == _STRING:
            return self.string(MAX_STRING_BYTES, what)
        if kind == _ARRAY:
            return self._array(what)
        return self._scalar(self._numbers(kind, 1, what), kind)

    def _array(self, what: str) -> Array:
        kind = self.number("<u4", what)
        if kind == _ARRAY:
            raise self.unsound(f"{what} is an array of arrays, which no model has")
        length = self.number("<u8", what)
        self._items += length
        if self._items > MAX_ITEMS:
            raise self.unsound(
                f"with {what}, its arrays would have {self._items} items; {MAX_ITEMS} is the limit"
            )
        if kind == _STRING:
            return self._strings(length, what)
        return self._numbers(kind, length, what)

    def _strings(self, count: int, what: str) -> list[bytes]:
        """The next `count` strings. If they are in memory they take a faster path, because there can be
        100,000s.
        """
        strings, data = [], self._data
        for _ in range(count):
            start = self.at + 8
            if start <= len(data) and (end := start + _LENGTH.unpack_from(data, self.at)[0]) <= len(data):
                strings.append(bytes(data[start:end]))
                self.at = end
            else:
                strings.append(self.string(MAX_STRING_BYTES, what))
        return strings

    def _numbers(self, kind: int, length: int, what: str) -> NDArray[Any]:
        if kind not in _NUMBERS:
            raise self.unsound(f"{what} is of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        values = np.frombuffer(self.take(length * dtype.itemsize, what), dtype=dtype)
        if kind == _BOOL:
            if values.max(initial=0) > 1:
                raise self.unsound(f"{what} is neither true nor false")
            return values.astype(bool)
        return values

    @staticmethod
    def _scalar(values: NDArray[Any], kind: int) -> Value:
        """The single value of `values`. A float32 becomes the shortest decimal that rounds to it: 1e-5 stays
        1e-5.
        """
        if kind == _FLOAT32:
            return float(str(values[0]))
        value: Value = values[0].item()
        return value

    def tensor(self, name: str) -> TensorEntry:
        """The entry of the next tensor, with its offset within the data."""
        what = f"the entry of {plain(name)}"
        dimensions = self.number("<u4", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.unsound(
                f"{plain(name)} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
            )
        sizes = [self.number("<u8", what) for _ in range(dimensions)]
        number = self.number("<u4", what)
        offset = self.number("<u8", what)
        if number not in TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{self.file.path.name}: {plain(name)} is stored in GGUF's type {number}, which isn't known "
                "here; take another quantisation of the model, such as Q4_K_M or Q8_0"
            )
        kind = TENSOR_TYPES[number]
        # Each value takes an eighth of a byte or more, so that sound sizes are limited by the file's.
        if not all(0 < size <= 8 * self.file.nbytes for size in sizes) or sizes[0] % kind.block:
            raise self.unsound(f"{plain(name)} has the dimensions {sizes} of type {kind.name}")
        return TensorEntry(kind, tuple(reversed(sizes)), offset)
