"""Files of tensors, read ahead in the order of use. Each CRC block is read once."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from ondevice.backends.base import Bytes, Float32, RowChunk
from ondevice.backends.cpu_matrices import TilePlace
from ondevice.bundle.matrix_layout import TiledMatrix
from ondevice.bundle.reader import CheckedFile, TensorSpan
from ondevice.config import RowFormat
from ondevice.errors import BundleError, thread_refused
from ondevice.flash.reader import FlashReader
from ondevice.kernels import memory

READ_AHEAD = 4
"""Pieces that are being read, or are ready, while the backend packs one."""
CACHED_BLOCKS = 16
"""CRC blocks kept in memory, as neighbouring pieces share one."""


class TaskResults:
    """The results of `tasks`, in order. A few threads compute them ahead."""

    def __init__(self, tasks: Iterator[Callable[[], Any]]) -> None:
        self._tasks = tasks
        self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ondevice-load")
        self._pending: deque[Future[Any]] = deque()

    def next(self) -> Any:
        """The next task's result. Raises the task's error."""
        while len(self._pending) <= READ_AHEAD and (task := next(self._tasks, None)) is not None:
            try:
                self._pending.append(self._pool.submit(task))
            except RuntimeError as error:
                raise thread_refused(error) from error
        return self._pending.popleft().result()

    def __enter__(self) -> TaskResults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


class TensorSpans(Protocol):
    """The places of tensors, as in a `Bundle`."""

    def tensor_span(self, name: str) -> TensorSpan: ...


class TensorFile:
    """The tensors of one file, with a cache of CRC blocks. Any thread may call it.

    index: the file's index in the flash reader.
    """

    def __init__(self, spans: TensorSpans, reader: FlashReader, file: CheckedFile, index: int) -> None:
        self._spans = spans
        self._reader = reader
        self._file = file
        self._index = index
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._lock = threading.Lock()

    def vector(self, name: str) -> Float32:
        """The one-dimensional float32 tensor `name`. Raises BundleError if a value isn't finite."""
        span = self._spans.tensor_span(name)
        values: Float32 = self.read(span.offset, span.nbytes).view(np.float32)
        broken = np.flatnonzero(~np.isfinite(values))
        if broken.size:
            at = int(broken[0])
            raise BundleError(
                f"{self._file.path.name}: {name} holds values that are not finite: {values[at]} at {at}; "
                "make the file again"
            )
        return values

    def rows(self, name: str, stored: RowFormat, row0: int, count: int) -> RowChunk:
        """Rows row0 .. row0 + count of the matrix `name`, which is stored row by row."""
        codes = self._tensor_rows(f"{name}.codes", row0, count)
        scales = biases = codes[:, :0]
        if stored.bits != 16:
            scales, biases = (self._tensor_rows(f"{name}.{it}", row0, count) for it in ("scales", "biases"))
        return RowChunk(row0, codes, scales.view(np.float16), biases.view(np.float16))

    def place(self, name: str, matrix: TiledMatrix) -> TilePlace:
        """Where the tiles of the matrix `name` lie."""
        return TilePlace(self._index, self._spans.tensor_span(name).offset, matrix.tile_bytes)

    def tiles(self, name: str, tile_bytes: int, first: int, count: int) -> Bytes:
        """Tiles first .. first + count of the matrix `name`: (count, tile_bytes)."""
        start = self._spans.tensor_span(name).offset + first * tile_bytes
        return self.read(start, count * tile_bytes).reshape(count, tile_bytes)

    def read(self, offset: int, nbytes: int) -> Bytes:
        """The file's bytes from `offset` on, (nbytes,)."""
        out, (unit,) = memory.empty((nbytes,), np.uint8), self._file.crc_units
        at, end = offset, offset + nbytes
        while at < end:
            unit_end = end - end % unit
            if at % unit == 0 and at < unit_end:
                self._reader.read(self._index, at, unit_end - at, out[at - offset : unit_end - offset])
                at = unit_end
            else:
                index, skip = divmod(at, unit)
                piece = self._block(index)[skip : skip + end - at]
                out[at - offset : at - offset + len(piece)] = piece
                at += len(piece)
        return out

    def _tensor_rows(self, name: str, row0: int, count: int) -> Bytes:
        span = self._spans.tensor_span(name)
        width = span.nbytes // span.shape[0]
        return self.read(span.offset + row0 * width, count * width).reshape(count, width)

    def _block(self, index: int) -> Bytes:
        with self._lock:
            block = self._blocks.setdefault(index, _Block())
            self._blocks.move_to_end(index)
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        with block.lock:
            if block.data is None:
                (unit,) = self._file.crc_units
                start = index * unit
                count = min(unit, self._file.nbytes - start)
                block.data = self._reader.read(self._index, start, count)
            return block.data


class _Block:
    """A cached CRC block. Its lock is held while it is being read."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.data: Bytes | None = None
