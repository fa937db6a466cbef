"""Reads on demand from a set of files: ranges and records, in parallel, every byte checked by CRC-32C."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.kernels import _native

if TYPE_CHECKING:
    from ondevice.bundle.reader import CheckedFile

Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

# Medians of 9 interleaved passes, busy 2-core machine, 8 slots of 2 MiB: 4 threads 1.71, 8 threads 1.73 to
# 1.88, 12 or 16 threads 1.71 to 1.84 GB/s (fio 0.9 to 1.1); half the slots lose a fifth.
DEFAULT_THREADS = 8


@dataclass(frozen=True)
class FlashStats:
    """What a reader has done so far.

    bytes_read: bytes asked from the device: whole pages, or for records whole blocks of the device.
    read_seconds: wall time during which at least one read was in flight.
    cpu_seconds: processor time of the threads that read and compared checksums.
    reads: how many there were, each one system call where nothing comes short.
    """

    bytes_read: int
    read_seconds: float
    cpu_seconds: float
    reads: int


class FlashReader:
    """A pool of reader threads over the files of a bundle; `ExtentStream` reads ahead through the same pool.

    Of whatever is read, the CRC-32Cs are compared, and float16 values (scales, biases, unquantised weights)
    are looked at: one that isn't finite is damage, whoever computed the checksums.

    io: `direct` reads past the page cache; `buffered` reads through it and drops the pages afterwards; `auto`
    is direct, or buffered for all files where one of them is on a file system that refuses.

    threads: reads under way at once, by as many threads; with `ring`, by one thread through io_uring, where
    the system has it and reads are direct. That takes less than half of the processor's time for small reads
    (4.2 against 10.5 microseconds for 8 KiB, 32 at once, as fio measures it, at the same rate).

    Any thread may call it, several at once. A range is widened to the units that carry a checksum and to
    whole pages or blocks, so `bytes_read` exceeds what was asked for. Bytes before a file's `crc_start` can't
    be read.

    Raises BackendUnavailableError if `io="direct"` is refused, FlashReadError if a file can't be opened or
    hasn't the size it should, OndeviceError if the process has no descriptor left for it, ValueError for
    impossible arguments.
    """

    def __init__(
        self,
        files: Sequence[CheckedFile],
        io: Literal["auto", "direct", "buffered"] = "auto",
        threads: int = DEFAULT_THREADS,
        ring: bool = False,
    ) -> None:
        specs = [
            _native.FileSpec(
                os.fsencode(file.path),
                file.nbytes,
                file.crc_start,
                list(file.crc_units),
                np.ascontiguousarray(file.crcs, dtype=np.uint32),
                list(file.halves),
                file.halves_period,
            )
            for file in files
        ]
        self.threads = threads
        self.native = _native.FlashReader(specs, io, threads, ring)
        if self.native.fallback_reason:
            log.warning("reading through the page cache: %s", self.native.fallback_reason)

    @property
    def io(self) -> Literal["direct", "buffered"]:
        """How files are read, once `auto` has been settled."""
        return "direct" if self.native.direct else "buffered"

    @property
    def has_ring(self) -> bool:
        """Whether reads go through io_uring."""
        return self.native.has_ring

    @property
    def stats(self) -> FlashStats:
        """Totals of everything read through this reader, streams included."""
        return FlashStats(*self.native.stats())

    @property
    def staging_bytes(self) -> int:
        """Memory held for reads that end in the caller's array; it grows to one buffer for every read
        under way or just ended."""
        return self.native.staging_bytes

    def trim(self) -> None:
        """Gives that memory back, after loading: what is read later takes what it needs, which is less."""
        self.native.trim()

    def read(self, file_index: int, offset: int, nbytes: int, out: Bytes | None = None) -> Bytes:
        """Bytes `offset` to `offset + nbytes` of a file: (nbytes,) uint8, `out` itself if that is given.

        Without `out` the bytes land in new memory without a copy (whole pages, more than `nbytes`).
        Raises FlashReadError; IndexError for a range outside the file's checked bytes.
        """
        if nbytes == 0:
            return np.empty(0, np.uint8) if out is None else out
        if out is None:
            return self.native.read_new(file_index, offset, nbytes)
        if out.shape != (nbytes,):
            raise ValueError(f"out has shape {out.shape}; it must be ({nbytes},)")
        self.native.read(file_index, offset, out)
        return out

    def read_records(
        self, file_index: int, record_ids: Sequence[int] | NDArray[np.int64], out: Bytes
    ) -> None:
        """Record `record_ids[i]` to row i of `out`, (n, stride) uint8; a record is one run of all units.

        Ids that follow each other in the list and on flash become one read, so sorted ids read fastest.
        Raises FlashReadError; IndexError for an id outside the file.
        """
        ids = np.ascontiguousarray(record_ids, dtype=np.int64)
        self.native.read_records(file_index, ids, out)

    def close(self) -> None:
        """Joins the threads once their reads in flight are done, and gives the files back. Idempotent.

        Streams over this reader end too.
        """
        self.native.close()

    def __enter__(self) -> FlashReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
