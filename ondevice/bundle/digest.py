"""The sha256 and CRC32C table of a file, computed together in one pass over its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from ondevice.bundle.file_layouts import FileLayout

CHUNK_BYTES = 4 << 20


class Crc32c(Protocol):
    """Computes the CRC32C of each unit of `data` (uint8, 1-D). Unit lengths repeat, and the last unit may be
    short.
    """

    def __call__(self, data: np.ndarray, units: tuple[int, ...], /) -> np.ndarray: ...


class FileDigest:
    """Computes the sha256 of a file and the CRC32C of each of its units, from its bytes in order."""

    def __init__(self, layout: FileLayout, crc32c: Crc32c) -> None:
        import hashlib

        self._units = layout.crc_units
        self._cycle_bytes = sum(layout.crc_units)
        self._uncovered_bytes = layout.crc_start
        self._crc32c = crc32c
        self._sha256 = hashlib.sha256()
        self._pending = np.empty(0, np.uint8)
        self._crcs: list[np.ndarray] = []
        self.nbytes = 0

    def update(self, data: np.ndarray) -> None:
        """Adds the next bytes, (n,) uint8."""
        self._sha256.update(data.data)
        self.nbytes += data.size
        skipped = min(self._uncovered_bytes, data.size)
        self._uncovered_bytes -= skipped
        data = data[skipped:]
        if self._pending.size:
            missing = self._cycle_bytes - self._pending.size
            self._pending = np.concatenate((self._pending, data[:missing]))
            data = data[missing:]
            if self._pending.size < self._cycle_bytes:
                return
            self._crcs.append(self._crc32c(self._pending, self._units))
        complete = data.size // self._cycle_bytes * self._cycle_bytes
        if complete:
            self._crcs.append(self._crc32c(data[:complete], self._units))
        self._pending = data[complete:].copy()

    def sha256(self) -> str:
        """Hex digest of the bytes added so far."""
        return self._sha256.hexdigest()

    def crcs(self) -> np.ndarray:
        """CRC32C (uint32) of every unit of the bytes added so far; the last unit may be short."""
        tail = [self._crc32c(self._pending, self._units)] if self._pending.size else []
        tables = [*self._crcs, *tail] or [np.empty(0)]
        return np.concatenate(tables).astype("<u4", copy=False)


def digest_prefix(path: Path, nbytes: int, layout: FileLayout, crc32c: Crc32c) -> FileDigest | None:
    """The digest of the first `nbytes` bytes of `path`, or None if the file can't be read or is shorter."""
    digest = FileDigest(layout, crc32c)
    buffer = np.empty(min(CHUNK_BYTES, nbytes), np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            while digest.nbytes < nbytes:
                count = file.readinto(buffer[: nbytes - digest.nbytes].data)
                if not count:
                    return None
                digest.update(buffer[:count])
    except OSError:
        return None
    return digest
