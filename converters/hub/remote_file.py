"""Files and tensors of a repository, read over the network in the parts that the converter needs.

A tensor is read with one request, whose answer is received as the converter proceeds: nothing is kept on
disk, and in memory only what the converter needs at the moment. After a broken connection, reading continues
at the byte where it broke.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.files import disk_errors
from ondevice.converters.checkpoints.base import SourceFile
from ondevice.converters.hub.client import BrokenConnectionError, HubClient, PartStream, RemoteUrl
from ondevice.errors import CheckpointError

HEAD_BYTES = 256 << 10
"""Bytes read from a file's beginning at once: most headers are smaller."""
OPEN_STREAMS = 4
"""Most answers of one file under way at once: gate and up rows are read alternately."""
SPOOL_BLOCK_BYTES = 4 << 20
_PROGRESS_BYTES = 1 << 16
"""Bytes after which a connection that breaks again counts as a new failure."""


class RemoteFile(SourceFile):
    """A file of a repository at one commit. Reads raise what HubClient raises."""

    def __init__(
        self, client: HubClient, source: RemoteUrl, nbytes: int, identity: str, spool: Spool
    ) -> None:
        """identity: what identifies the content on the hub, such as its hash."""
        # The base's own constructor looks at a disk.
        self.path = Path(source.what)
        self.nbytes = nbytes
        self.identity = identity
        self.modified_ns = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "little")
        self.spool = spool
        self._client = client
        self._source = source
        self._head = b""
        self._tensors: list[tuple[int, int, str]] = []
        self._streams: dict[int, PartStream] = {}
        self._lock = threading.RLock()

    def open(self) -> None:
        """Do nothing: the file needn't be opened before it is read."""

    def expect(self, tensors: Mapping[str, tuple[int, int]]) -> None:
        """Declare the tensors. A read then requests the remainder of its tensor too, for the reads that
        follow. The header isn't kept.
        """
        self._head = b""
        self._tensors = sorted((start, stop, name) for name, (start, stop) in tensors.items() if stop > start)

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from byte `offset`, without requesting more. The beginning of the file is read only
        once.
        """
        with self._lock:
            if offset + nbytes <= HEAD_BYTES and not self._head:
                self._head = self._exactly(0, min(HEAD_BYTES, self.nbytes))
            if offset + nbytes <= len(self._head):
                return self._head[offset : offset + nbytes]
            return self._exactly(offset, nbytes)

    def read_into(self, offset: int, out: NDArray[Any]) -> None:
        """Fill the contiguous array `out` from byte `offset`. Raises CheckpointError if bytes are missing."""
        with self._lock:
            self._fill(offset, memoryview(out.data).cast("B"), read_on=True)

    def read_columns(self, offset: int, stride: int, out: NDArray[Any]) -> None:
        """Fill the rows of `out`, as in SourceFile. The complete tensor is read first, because no request can
        have a stride.
        """
        with self._lock:
            start, stop, name = self._tensor_at(offset)
            # The parts of a quantised matrix differ in the last word of their names.
            local = self.spool.matrix(self, name.rpartition(".")[0], start, stop)
            local.read_columns(offset - start, stride, out)

    def sample(self, offset: int, nbytes: int) -> bytes:
        """The hub's identity of the file's content, and the place in it. Reads nothing."""
        return f"{self.identity} {offset}".encode()[:nbytes]

    def interrupt(self) -> None:
        self._client.stopped.set()

    def close(self) -> None:
        with self._lock:
            while self._streams:
                self._streams.popitem()[1].close()
            self.spool.close()

    def _exactly(self, offset: int, nbytes: int) -> bytes:
        out = bytearray(nbytes)
        self._fill(offset, memoryview(out), read_on=False)
        return bytes(out)

    def _fill(self, offset: int, view: memoryview, read_on: bool) -> None:
        """Fill `view` from byte `offset`. read_on: whether to request the rest of the tensor too, for later
        reads.
        """
        stop = offset + len(view)
        if stop > self.nbytes:
            raise CheckpointError(
                f"{self.path.name} has {self.nbytes} bytes, and byte {stop - 1} is needed; it isn't complete"
            )
        attempts, done, safe = self._client.attempts(self._source), offset, offset
        while done < stop:
            try:
                stream = self._stream(done, stop, read_on)
                try:
                    while done < stop:
                        done += stream.read_some(view[done - offset :])
                except BrokenConnectionError:
                    stream.close()
                    raise
            except BrokenConnectionError as error:
                if done - safe >= _PROGRESS_BYTES:
                    attempts.progressed()
                    safe = done
                attempts.failed(error)
            else:
                self._keep(done, stream, read_on)

    def _stream(self, start: int, stop: int, read_on: bool) -> PartStream:
        stream = self._streams.pop(start, None) if read_on else None
        if stream is None:
            end = max(stop, self._tensor_at(start)[1]) if read_on else stop
            stream = self._client.part(self._source, start, end, self.nbytes)
        return stream

    def _tensor_at(self, offset: int) -> tuple[int, int, str]:
        """The start, stop and name of the tensor that contains byte `offset`; empty if no known
        tensor does.
        """
        at = bisect_right(self._tensors, offset, key=lambda tensor: tensor[0]) - 1
        span = self._tensors[at] if at >= 0 else (0, 0, "")
        return span if offset < span[1] else (offset, offset, "")

    def _keep(self, position: int, stream: PartStream, read_on: bool) -> None:
        if not read_on or stream.is_done or position in self._streams:
            stream.close()
            return
        self._streams[position] = stream
        if len(self._streams) > OPEN_STREAMS:
            oldest = next(iter(self._streams))
            self._streams.pop(oldest).close()


class Spool:
    """Unnamed temporary files for the matrix whose columns are being read, if it is too large for memory.

    The system deletes them with the process, however that ends.
    """

    def __init__(self, folder: Path) -> None:
        """folder: a folder on the disk that the bundle is written to."""
        self._folder = folder
        self._matrix = ""
        self._files: dict[tuple[RemoteFile, int], _UnnamedFile] = {}

    def matrix(self, file: RemoteFile, matrix: str, start: int, stop: int) -> SourceFile:
        """A file with bytes [start, stop) of `file`: the matrix, or a part of it.

        Files for other matrices are deleted.
        """
        if matrix != self._matrix:
            self.close()
            self._matrix = matrix
        key = file, start
        if key in self._files and self._files[key].nbytes != stop - start:
            self._files.pop(key).close()
        if key not in self._files:
            self._files[key] = local = _UnnamedFile(self._folder)
            block = np.empty(min(stop - start, SPOOL_BLOCK_BYTES), np.uint8)
            for offset in range(start, stop, SPOOL_BLOCK_BYTES):
                part = block[: min(SPOOL_BLOCK_BYTES, stop - offset)]
                file.read_into(offset, part)
                local.append(part)
        return self._files[key]

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


class _UnnamedFile(SourceFile):
    """A file without a name, which is written and then read by position."""

    def __init__(self, folder: Path) -> None:
        # The base's own constructor looks for a file that is there.
        self.path = folder / "spooled matrix"
        self.nbytes = self.modified_ns = 0
        with disk_errors(folder, "choose an --output you may write to"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())

    def append(self, data: NDArray[np.uint8]) -> None:
        rest = memoryview(data.data)
        with disk_errors(self.path, "make room, then run again with --resume"):
            while rest:
                count = os.pwrite(self._descriptor, rest, self.nbytes)
                self.nbytes += count
                rest = rest[count:]
