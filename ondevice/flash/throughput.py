"""How fast files can be read in random places, by the size of a read: through the readers of the runtime.

Whatever a checksum covers is read and compared whole, as everything is, so a read of a given size is as many
whole units as its pages hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np

from ondevice.flash.prefetch import Extent, ExtentStream
from ondevice.flash.reader import FlashReader

if TYPE_CHECKING:
    from ondevice.bundle.reader import CheckedFile

PAGE_BYTES = 4096
READ_BYTES = tuple(PAGE_BYTES << doubling for doubling in range(9))
"""4 KiB to 1 MiB."""
MEASURED_SECONDS = 0.15
SLICES = 5
PLACES = 1024
"""Different reads of a size, after which they begin again."""


@dataclass(frozen=True)
class ReadRate:
    """What reads of `read_bytes` gave on `threads` threads.

    bytes_per_second: None where no checked unit of the files is that small, or no file that large.
    """

    read_bytes: int
    threads: int
    bytes_per_second: float | None


@dataclass(frozen=True)
class Throughput:
    """io: how the files were read. file_bytes: of all of them together."""

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

    Past the page cache, but through it on file systems that refuse. seconds: of every rate. Memory: twice as
    many buffers of the largest size as the most threads. Raises FlashReadError.
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


def random_extents(files: Sequence[CheckedFile], nbytes: int) -> list[Extent]:
    """Runs of whole checked units, each within `nbytes` of whole pages and as long as fits, at random.

    Empty where none fits anywhere.
    """
    rng = np.random.default_rng(nbytes)
    large = [index for index, file in enumerate(files) if file.nbytes - file.crc_start >= nbytes]
    found = []
    for index in rng.choice(large, PLACES).tolist() if large else ():
        file = files[index]
        bounds = np.cumsum((0, *file.crc_units))
        period, room = int(bounds[-1]), file.nbytes - file.crc_start - nbytes
        begin = PAGE_BYTES * int(rng.integers(room // PAGE_BYTES + 1))
        end = begin + nbytes
        first = begin - begin % period + int(bounds[np.searchsorted(bounds, begin % period)])
        last = end - end % period + int(bounds[np.searchsorted(bounds, end % period, "right") - 1])
        if first < last:
            found.append(Extent(index, file.crc_start + first, last - first))
    return found


def _rate(reader: FlashReader, extents: Sequence[Extent], nbytes: int, slots: int, seconds: float) -> float:
    """Bytes per second, of whole pages, once every thread is busy: the median of a few slices of the time."""
    pages = [_page_bytes(extent) for extent in extents]
    with ExtentStream(reader, extents, nbytes, slots, cyclic=True) as stream:
        for _ in range(slots):
            stream.next()
            stream.release()
        rates, done = [], slots
        for _ in range(SLICES):
            start, read = time.perf_counter(), 0
            while (taken := time.perf_counter() - start) < seconds / SLICES or not read:
                stream.next()
                stream.release()
                read += pages[done % len(pages)]
                done += 1
            rates.append(read / taken)
    return median(rates)


def _page_bytes(extent: Extent) -> int:
    """What is read for it."""
    first = extent.offset // PAGE_BYTES
    return (-(-(extent.offset + extent.nbytes) // PAGE_BYTES) - first) * PAGE_BYTES
