"""On-demand reads of ranges and records from a set of files, in parallel, every byte checked by CRC-32C."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.kernels import _native
from ondevice.records import dataclass

if TYPE_CHECKING:
    from ondevice.bundle.reader import CheckedFile

Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

# Medians of 9 interleaved passes, busy 2-core machine, 8 slots of 2 MiB: 4 threads 1.71, 8 threads 1.73 to
# 1.88, 12 or 16 threads 1.71 to 1.84 GB/s (fio 0.9 to 1.1); half the slots lose a fifth.
DEFAULT_THREADS = 8


@dataclass(frozen=True)
class FlashStats:
    """Totals of a reader so far.

    bytes_read: bytes requested from the device: whole pages, or for records whole blocks of the device.
    read_seconds: wall time during which at least one read was in flight.
    cpu_seconds: processor time of the threads that read and compared checksums.
    reads: number of reads. Each is one system call, unless the system returns too few bytes.
    """

    bytes_read: int
    read_seconds: float
    cpu_seconds: float
    reads: int


class FlashReader:
    """A pool of reader threads over the files of a bundle; `ReadAhead` reads ahead through the same pool.

    Every read is checked: its CRC-32Cs must match, and its float16 values (scales, biases, unquantized
    weights) must be finite, else it counts as damaged.

    Several threads may call it at once. A range is widened to the units that carry a checksum and to whole
    pages or blocks, so `bytes_read` exceeds the bytes requested. Bytes before a file's `crc_start` can't be
    read.

    Raises BackendUnavailableError if `io="direct"` is refused, FlashReadError if a file can't be opened or
    has the wrong size, OndeviceError if the process has no descriptor left for it, ValueError for impossible
    arguments.

    Args:
        files: the files, which methods name by their index here.
        io: `direct` reads without the page cache. `buffered` reads through it and drops the pages afterwards.
            `auto` is direct, or buffered for all files if one of their file systems refuses direct reads.
        threads: reads under way at once.
        ring: use io_uring with one thread, if the system has it and reads are direct; otherwise each read has
            a thread. With io_uring, small reads take less than half the processor time (4.2 against 10.5
            microseconds for 8 KiB, 32 at once, as fio measures it, at the same rate).
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
                [tuple(halves) for halves in file.halves],
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
        """How files are read, with `auto` replaced by what it stands for."""
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
        """Bytes of the staging buffers, one for every read under way or just ended."""
        return self.native.staging_bytes

    def trim(self) -> None:
        """Frees the staging buffers after loading. Later reads allocate new ones, but fewer."""
        self.native.trim()

    def read(self, file_index: int, offset: int, nbytes: int, out: Bytes | None = None) -> Bytes:
        """Bytes `offset` to `offset + nbytes` of a file: (nbytes,) uint8, which is `out` if that is given.

        Without `out` the bytes are read into new memory without a copy (whole pages, more than `nbytes`).
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
        """Reads record `record_ids[i]` into row i of `out`, (n, stride) uint8.

        A record is one run of all units that carry a checksum. Ids that are neighbours in the list and on
        flash become one read, so sorted ids read fastest.
        Raises FlashReadError; IndexError for an id outside the file.
        """
        ids = np.ascontiguousarray(record_ids, dtype=np.int64)
        self.native.read_records(file_index, ids, out)

    def close(self) -> None:
        """Joins the threads once their reads in flight are done, and closes the files. Idempotent.

        Also ends the streams over this reader.
        """
        self.native.close()

    def __enter__(self) -> FlashReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
