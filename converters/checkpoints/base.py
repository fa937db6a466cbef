"""Checkpoints in the form that all readers return: config, tokenizer, and tensors that are read in blocks.

No file is mapped, and no tensor is read completely unless a caller wants that, so memory doesn't grow with
the model. Legend: R rows, C columns of a matrix as stored.
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
        """Open the file. Raises CheckpointError if that fails."""
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
        """Ask the system to read ahead as much as was just read, which usually is a tensor's next block."""
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
        """Bytes that distinguish the content at byte `offset` from others: `nbytes` bytes of it,
        or a hash.
        """
        return self.read(offset, nbytes)

    def expect(self, tensors: Mapping[str, tuple[int, int]]) -> None:
        """Declare which bytes [start, stop) belong to which tensor, so that a remote file can plan its reads.

        This class does nothing with it.
        """

    def interrupt(self) -> None:
        """Make reads on other threads end soon, with an error. Does nothing here, because reads from a disk
        end by themselves.
        """

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SourceTensor(Protocol):
    """A tensor of a checkpoint in any format: a matrix that is read in blocks of rows or columns, or a
    vector.

    Legend: R rows, C columns.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str:
        """The type of the stored values, for messages and the fingerprint."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Number of bytes that the tensor takes in the checkpoint."""
        ...

    @property
    def values_nbytes(self) -> int:
        """Number of bytes of all values in the types that `rows` returns. Sizes of blocks depend on it."""
        ...

    @property
    def code_bits(self) -> int:
        """Bits of a code; 0 for floating-point values."""
        ...

    @property
    def row_unit(self) -> int:
        """Number of rows that are reordered together, such as a head's. Only blocks of full units are read
        once.
        """
        ...

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files that contain the tensor."""
        ...

    def rows(self, start: int, stop: int) -> Weights:
        """Rows [start, stop) of a matrix, (stop - start, C): float32, float16, or bfloat16 as uint16."""
        ...

    def columns(self, start: int, stop: int) -> Weights:
        """Columns [start, stop) of a matrix, (R, stop - start), in the types of `rows`."""
        ...

    @property
    def code_format(self) -> RowFormat | None:
        """The narrowest row format that can hold the tensor's codes unchanged, or None."""
        ...

    @property
    def tile_format(self) -> RowFormat | None:
        """The tile format that holds the tensor's values exactly; if no tile format holds more, the same as
        `code_format`.
        """
        ...

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        """The codes of rows [start, stop) in the format `stored`, or None if they can't be kept.

        Whether it is None doesn't depend on the rows. No row is read if `stop` is `start`.
        """
        ...

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> EncodedColumns | None:
        """Columns [start, stop), ready to be rounded to `stored` without decoding first, or None.

        Whether it is None doesn't depend on the columns. No column is read if `stop` is `start`.
        """
        ...

    def vector(self) -> NDArray[np.float32]:
        """A one-dimensional tensor as float32. Raises CheckpointError if a value isn't finite."""
        ...

    def sample(self, start: int, nbytes: int) -> bytes:
        """Up to `nbytes` stored bytes from byte `start` on, which distinguish the tensor from others."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """A `SourceTensor` of plain floating-point values: row-major, at byte `offset` of `file`.

    interleaved_head_dim: 0, or the head size of a matrix in which rotary embedding pairs the rows (2i, 2i +
    1), or of the bias of such a matrix. Rows are then returned in rotate-half order, (i, i + head_dim / 2),
    which is the order in every bundle.
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
    """The rows of complete heads, (R, C) or (R,), reordered from pairs (2i, 2i + 1) to pairs (i, i + head_dim
    / 2).
    """
    heads = rows.reshape(len(rows) // head_dim, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def printable(name: str) -> str:
    """The name of a file or folder, in which characters are replaced that a manifest can't contain."""
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
    """A tokenizer's entry in a bundle's manifest, and its files, by their names in the bundle."""

    info: TokenizerInfo = field(default_factory=TokenizerInfo)
    blobs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has all the tensors that its config implies, with the right shapes.

    tensors: in every source format under the names that Hugging Face gives a Llama's tensors.
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
        """The files that contain tensors, without duplicates, sorted by path."""
        files = {file.path: file for tensor in self.tensors.values() for file in tensor.files}
        return [files[path] for path in sorted(files)]

    def interrupt(self) -> None:
        """Make reads on other threads end soon, with an error. Afterwards the checkpoint can only
        be closed.
        """
        for file in self.source_files:
            file.interrupt()

    def close(self) -> None:
        for file in self.source_files:
            file.close()
