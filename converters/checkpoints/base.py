"""Checkpoints as every reader gives them to the converter: config, tokenizer, and tensors read in blocks.

No file is mapped, and no tensor is read whole unless asked for, so memory doesn't grow with the model.
Legend: R rows, C columns of a matrix as stored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.manifest import TokenizerInfo
from ondevice.config import RowFormat
from ondevice.converters.quantize import EncodedColumns, SourceCodes, Weights, to_float32
from ondevice.errors import CheckpointError, reading_failed
from ondevice.model_config import ModelConfig

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of files that may be pickles. Opening a pickle can run code, so they never are opened."""

StoredType = Literal["F32", "F16", "BF16"]
NUMPY_TYPES: dict[StoredType, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


_MIN_AHEAD, _MAX_AHEAD = 256 << 10, 4 << 20
"""Bytes of a read after which the system reads ahead as much again, and the most that it reads ahead."""


class SourceFile:
    """One file of a checkpoint, opened on first use and read by position, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(
                f"{path} can't be read ({error.strerror}); is the download complete?"
            ) from error
        self.nbytes = status.st_size
        self.modified_ns = status.st_mtime_ns
        self._descriptor = -1

    def open(self) -> None:
        """Raises CheckpointError if the file can't be opened."""
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                refused = CheckpointError(f"{self.path} can't be opened: {error.strerror}")
                raise reading_failed(error, refused) from error

    def read_into(self, offset: int, out: NDArray[Any]) -> None:
        """Fill the contiguous array `out` from byte `offset`. Raises CheckpointError if bytes are missing."""
        self.open()
        view = memoryview(out.data).cast("B")
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{self.path.name} ends at byte {offset + done}, too early; download it again"
                    )
                done += count
            self._read_ahead(offset + done, len(view))
        except OSError as error:
            raise CheckpointError(f"reading {self.path} failed: {error.strerror}") from error

    def _read_ahead(self, offset: int, nbytes: int) -> None:
        """Ask the system to read ahead as much as was just read, most often a tensor's next block."""
        if nbytes >= _MIN_AHEAD and hasattr(os, "posix_fadvise"):
            nbytes = min(nbytes, _MAX_AHEAD)
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from byte `offset`."""
        out = np.empty(nbytes, dtype=np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def read_columns(self, offset: int, stride: int, out: NDArray[Any]) -> None:
        """Fill the rows of `out` (R, n) from byte `offset`, `offset + stride` and so on."""
        for row in range(len(out)):
            self.read_into(offset + row * stride, out[row])

    def sample(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes, or a hash, that distinguish the content at byte `offset` from others."""
        return self.read(offset, nbytes)

    def expect(self, tensors: Mapping[str, tuple[int, int]]) -> None:
        """Declare which bytes [start, stop) belong to which tensor, so that a remote file can plan its reads.

        This one needs no plan.
        """

    def interrupt(self) -> None:
        """End reads of other threads soon, with an error. Reads from a disk end by themselves."""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SourceTensor(Protocol):
    """A tensor of a checkpoint, whatever its format: a matrix read in blocks of rows or columns, or a vector.

    Legend: R rows, C columns.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str:
        """The type of its values as stored, for messages and the fingerprint."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the checkpoint."""
        ...

    @property
    def values_nbytes(self) -> int:
        """Bytes of all its values in the types of `rows`, by which blocks are sized."""
        ...

    @property
    def code_bits(self) -> int:
        """Bits of a code; 0 for floating-point values."""
        ...

    @property
    def row_unit(self) -> int:
        """Rows that are reordered together, such as a head's; blocks of whole units are read once."""
        ...

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files that hold it."""
        ...

    def rows(self, start: int, stop: int) -> Weights:
        """Rows [start, stop) of a matrix, (stop - start, C): float32, float16, or bfloat16 as uint16."""
        ...

    def columns(self, start: int, stop: int) -> Weights:
        """Columns [start, stop) of a matrix, (R, stop - start), in the types of `rows`."""
        ...

    @property
    def code_format(self) -> RowFormat | None:
        """The narrowest row format that holds its codes unchanged, or None."""
        ...

    @property
    def tile_format(self) -> RowFormat | None:
        """The tile format that holds its values exactly; `code_format` where tiles hold no more."""
        ...

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        """The codes of rows [start, stop) in the format `stored`, or None where they can't be kept.

        None is the answer for the whole tensor: it doesn't depend on the rows. No row is read if `stop` is
        `start`.
        """
        ...

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> EncodedColumns | None:
        """Columns [start, stop), ready to be rounded to `stored` without decoding first, or None.

        None is the answer for the whole tensor. No column is read if `stop` is `start`.
        """
        ...

    def vector(self) -> NDArray[np.float32]:
        """A one-dimensional tensor as float32. Raises CheckpointError if a value isn't finite."""
        ...

    def sample(self, start: int, nbytes: int) -> bytes:
        """Up to `nbytes` stored bytes from byte `start` on, which distinguish it from other tensors."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """A `SourceTensor` of plain floating-point values: row-major, at byte `offset` of `file`.

    interleaved_head_dim: 0, or the head size of a matrix whose rows pair (2i, 2i + 1) for rotary embedding,
    or of the bias that is added to its results. Its rows are then returned in rotate-half order, (i, i +
    head_dim / 2), as every bundle stores them.
    """

    name: str
    dtype: StoredType
    shape: tuple[int, ...]
    file: SourceFile
    offset: int
    interleaved_head_dim: int = 0

    @property
    def nbytes(self) -> int:
        return self._itemsize * prod(self.shape)

    @property
    def values_nbytes(self) -> int:
        return self.nbytes

    @property
    def code_bits(self) -> int:
        return 0

    @property
    def row_unit(self) -> int:
        return self.interleaved_head_dim or 1

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return (self.file,)

    def rows(self, start: int, stop: int) -> Weights:
        if not self.interleaved_head_dim:
            return self._contiguous(start, stop)
        size = self.interleaved_head_dim
        first, last = start // size * size, -(-stop // size) * size
        return in_halves(self._contiguous(first, last), size)[start - first : stop - first]

    def columns(self, start: int, stop: int) -> Weights:
        rows, cols = self.shape
        if (start, stop) == (0, cols):
            return self._contiguous(0, rows)
        out = np.empty((rows, stop - start), dtype=NUMPY_TYPES[self.dtype])
        self.file.read_columns(self.offset + self._itemsize * start, self._itemsize * cols, out)
        return out

    @property
    def code_format(self) -> RowFormat | None:
        return None

    @property
    def tile_format(self) -> RowFormat | None:
        return None

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        return None

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> EncodedColumns | None:
        return None

    def vector(self) -> NDArray[np.float32]:
        out = np.empty(self.shape, dtype=NUMPY_TYPES[self.dtype])
        self.file.read_into(self.offset, out)
        values = to_float32(out)
        if not np.isfinite(values).all():
            raise not_finite(self)
        return in_halves(values, self.interleaved_head_dim) if self.interleaved_head_dim else values

    def sample(self, start: int, nbytes: int) -> bytes:
        return self.file.sample(self.offset + start, min(nbytes, self.nbytes - start))

    @property
    def _itemsize(self) -> int:
        return NUMPY_TYPES[self.dtype].itemsize

    def _contiguous(self, start: int, stop: int) -> Weights:
        cols = self.shape[1]
        out = np.empty((stop - start, cols), dtype=NUMPY_TYPES[self.dtype])
        self.file.read_into(self.offset + self._itemsize * start * cols, out)
        return out


def in_halves(rows: Weights, head_dim: int) -> Weights:
    """Rows of whole heads, (R, C) or (R,), from the order of pairs (2i, 2i + 1) to (i, i + head_dim / 2)."""
    heads = rows.reshape(len(rows) // head_dim, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def printable(name: str) -> str:
    """The name of a file or folder, with characters replaced that a manifest can't hold."""
    return "".join(c if c.isprintable() else "?" for c in name)[:200] or "checkpoint"


def plain(name: str) -> str:
    """A name from a checkpoint as short ASCII for a message."""
    return ascii(name[:80])[1:-1][:80]


def some_of(names: list[str]) -> str:
    """The first three of a checkpoint's names, for a message."""
    return ", ".join(map(plain, names[:3])) + (", ..." if len(names) > 3 else "")


def not_finite(tensor: SourceTensor) -> CheckpointError:
    """The error for a vector with NaN or infinity."""
    return CheckpointError(
        f"{tensor.files[0].path.name}: {tensor.name} holds NaN or infinity; the checkpoint is damaged, "
        "download it again"
    )


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer's entry of a bundle's manifest, and its files, by their names in the bundle."""

    info: TokenizerInfo = field(default_factory=TokenizerInfo)
    blobs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors have all been found and have the shapes its config asks for.

    tensors: by Hugging Face's names for a Llama, for every source format.
    """

    name: str
    source_format: str
    config: ModelConfig
    tensors: Mapping[str, SourceTensor]
    tokenizer: TokenizerFiles
    generation: Mapping[str, float]
    notes: tuple[str, ...] = ()
    """Notes for users about what was left out."""

    @property
    def source_files(self) -> list[SourceFile]:
        """Files that hold tensors, each once, sorted by path."""
        files = {file.path: file for tensor in self.tensors.values() for file in tensor.files}
        return [files[path] for path in sorted(files)]

    def interrupt(self) -> None:
        """Make reads on other threads end soon, with an error. The checkpoint can only be closed then."""
        for file in self.source_files:
            file.interrupt()

    def close(self) -> None:
        for file in self.source_files:
            file.close()
