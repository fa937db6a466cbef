"""Files of checked records for the flash tests."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ondevice.bundle.reader import CheckedFile
from ondevice.flash.read_ahead import Extent
from ondevice.kernels import _native

HEADER_BYTES = 4096
PARTS = (640, 1152)
STRIDE = sum(PARTS)


@dataclass(frozen=True, eq=False)
class RecordFile:
    """A file of random records, what it holds, and what a reader is told about it."""

    checked: CheckedFile
    data: np.ndarray
    """(n, stride) uint8: the records, which begin at byte HEADER_BYTES."""

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray:
        start = offset - HEADER_BYTES
        return self.data.reshape(-1)[start : start + nbytes]


def write_records(path: Path, records: int, seed: int = 0, parts: Sequence[int] = PARTS) -> RecordFile:
    data = np.random.default_rng(seed).integers(0, 256, (records, sum(parts)), dtype=np.uint8)
    path.write_bytes(bytes(HEADER_BYTES) + data.tobytes())
    crcs = _native.crc32c(data.reshape(-1), tuple(parts))
    return RecordFile(CheckedFile(path, HEADER_BYTES + data.size, HEADER_BYTES, tuple(parts), crcs), data)


def write_plain(path: Path, nbytes: int, unit: int, seed: int = 0) -> tuple[CheckedFile, np.ndarray]:
    """A file checked from byte 0 in units of `unit` bytes, the last one short."""
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    return CheckedFile(path, nbytes, 0, (unit,), _native.crc32c(data, (unit,))), data


def slot_bytes(extents: Sequence[Extent], unit: int = max(PARTS)) -> int:
    """What a stream's slot needs at most for any of `extents` of files checked in units of up to `unit`."""
    return max(extent.nbytes for extent in extents) + 2 * unit + 2 * 4096


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache (Linux)."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        resident = (ctypes.c_ubyte * pages)()
        address = np.frombuffer(view, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in resident)


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
