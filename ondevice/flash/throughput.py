"""Measures random reads of files by the size of a read, through the readers of the runtime.

A read of a given size consists of as many checked units as fit into that many pages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import numpy as np

from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import Bytes, FlashReader
from ondevice.kernels import _native
from ondevice.records import dataclass
from ondevice.units import PAGE_BYTES

if TYPE_CHECKING:
    from ondevice.bundle.reader import CheckedFile

READ_BYTES = tuple(PAGE_BYTES << doubling for doubling in range(9))
"""Default sizes of a read: 4 KiB to 1 MiB."""
MEASURED_SECONDS = 0.15
SLICES = 5
MIN_RUNS = 16
PLACES = 1024
"""Distinct reads of one size; after these, the sequence repeats."""


@dataclass(frozen=True)
class ReadRate:
    """The rate of reads of `read_bytes` on `threads` threads.

    bytes_per_second: None if no checked unit of the files is that small, or no file that large.
    """

    read_bytes: int
    threads: int
    bytes_per_second: float | None


@dataclass(frozen=True)
class Throughput:
    """Rates of random reads. io: how the files were read. file_bytes: size of all files together."""

    io: Literal["direct", "buffered"]
    file_bytes: int
    rates: tuple[ReadRate, ...]


def measure_throughput(
    files: Sequence[CheckedFile],
    threads: Sequence[int],
    read_bytes: Sequence[int] = READ_BYTES,
    seconds: float = MEASURED_SECONDS,
) -> Throughput:
    """Rates of random reads of files, by number of threads and then by size of a read (whole pages).

    Reads bypass the page cache, except on file systems that refuse that. seconds: time spent per rate. Takes
    memory for two buffers of the largest size per thread, for the largest number of threads. Raises
    FlashReadError.
    """
    rates = []
    for count in threads:
        with FlashReader(files, threads=count) as reader:
            for nbytes in read_bytes:
                extents = random_extents(files, nbytes)
                rate = _rate(reader, extents, nbytes, 2 * count, seconds) if extents else None
                rates.append(ReadRate(nbytes, count, rate))
            io = reader.io
    return Throughput(io, sum(file.nbytes for file in files), tuple(rates))


def measure_records(
    files: Sequence[CheckedFile], threads: Sequence[int], runs: Sequence[int], batch: int, slices: int
) -> tuple[ReadRate, ...]:
    """Rates of random runs of records, read as forward passes read them.

    Rates are sorted by number of threads and then by records in a run. `read_bytes` of a rate is the mean
    size of its reads, in whole blocks. Runs that no file has enough of are left out. All combinations are
    measured alternately, and the best rate of each counts, since other programs use the device too. Raises
    FlashReadError.

    Args:
        files: files whose records all have the same size.
        threads: numbers of threads to measure.
        runs: numbers of records in a run to measure.
        batch: records read at a time.
        slices: times that each combination is measured.
    """
    rng, timed = np.random.default_rng(batch), defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    from statistics import median

    with ExitStack() as stack:
        readers = [stack.enter_context(FlashReader(files, threads=count, ring=True)) for count in threads]
        slots = np.zeros((batch, sum(files[0].crc_units)), dtype=np.uint8)
        batches = [_native.RecordBatch(reader.native, urgent=True) for reader in readers]
        for _ in range(slices):
            for count, reads in zip(threads, batches, strict=True):
                for run in runs:
                    if (measured := _batch_rate(files, reads, rng, run, slots)) is not None:
                        timed[count, run].append(measured)
    return tuple(
        ReadRate(round(median(size for size, _ in some)), count, max(rate for _, rate in some))
        for (count, _), some in sorted(timed.items())
    )


def _batch_rate(
    files: Sequence[CheckedFile], reads: _native.RecordBatch, rng: np.random.Generator, run: int, slots: Bytes
) -> tuple[float, float] | None:
    """The mean bytes of a read, and bytes per second. None if the file has too few runs of this length with
    gaps of the same length.
    """
    index = int(rng.integers(len(files)))
    batch, record = slots.shape
    places = (files[index].nbytes - files[index].crc_start) // record // (2 * run)
    count = min(batch // run, places)
    if count < MIN_RUNS:
        return None
    first = 2 * run * np.sort(rng.choice(places, count, replace=False))
    ids = (first[:, None] + np.arange(run)).ravel().astype(np.int32)
    before = reads.stats()[0]
    start = time.perf_counter()
    targets = slots.ctypes.data + np.arange(len(ids), dtype=np.uint64) * record
    reads.start(index, 0, len(files[index].crc_units), ids, targets, 0)
    reads.finish()
    taken = time.perf_counter() - start
    nbytes = reads.stats()[0] - before
    return nbytes / count, nbytes / taken


def random_extents(files: Sequence[CheckedFile], nbytes: int) -> list[Extent]:
    """Extents at random places, each with as many checked units as fit into `nbytes` in full pages.

    Empty if no unit fits anywhere.
    """
    rng = np.random.default_rng(nbytes)
    large = [index for index, file in enumerate(files) if file.nbytes - file.crc_start >= nbytes]
    runs = []
    for index in rng.choice(large, PLACES).tolist() if large else ():
        file = files[index]
        bounds = np.cumsum((0, *file.crc_units))
        period, room = int(bounds[-1]), file.nbytes - file.crc_start - nbytes
        begin = PAGE_BYTES * int(rng.integers(room // PAGE_BYTES + 1))
        end = begin + nbytes
        first = begin - begin % period + int(bounds[np.searchsorted(bounds, begin % period)])
        last = end - end % period + int(bounds[np.searchsorted(bounds, end % period, "right") - 1])
        if first < last:
            runs.append(Extent(index, file.crc_start + first, last - first))
    return runs


def _rate(reader: FlashReader, extents: Sequence[Extent], nbytes: int, slots: int, seconds: float) -> float:
    """Bytes per second, counted in full pages, once every thread is busy: the median of a few slices of the
    time.
    """
    from statistics import median

    pages = [_page_bytes(extent) for extent in extents]
    with ReadAhead(reader, extents, nbytes, slots, cyclic=True) as ahead:
        for _ in range(slots):
            ahead.next()
            ahead.release()
        rates, done = [], slots
        for _ in range(SLICES):
            start, read = time.perf_counter(), 0
            while (taken := time.perf_counter() - start) < seconds / SLICES or not read:
                ahead.next()
                ahead.release()
                read += pages[done % len(pages)]
                done += 1
            rates.append(read / taken)
    return median(rates)


def _page_bytes(extent: Extent) -> int:
    """Bytes of the pages that are read for `extent`."""
    first = extent.offset // PAGE_BYTES
    return (-(-(extent.offset + extent.nbytes) // PAGE_BYTES) - first) * PAGE_BYTES
