"""Dense streaming: extents read ahead of the compute that uses them, in a fixed order, into a ring of slots.

Every token uses every weight that isn't resident, in the same order, so what comes next is always known: the
reader threads run ahead through the schedule as far as slots are free, and compute hides behind the reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ondevice.flash.reader import FlashReader, FlashStats
from ondevice.kernels import _native


@dataclass(frozen=True)
class Extent:
    """`nbytes` bytes from `offset` of file number `file` of a reader.

    One that begins and ends with records costs no extra read; other bounds are widened to checked units.
    """

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ReadAheadStats(FlashStats):
    """One stream's share of the reader's work, and `wait_seconds`: the consumer's wait in `next()`."""

    wait_seconds: float


class ExtentStream:
    """Hands out the extents of a schedule in order; with `cyclic` it begins again after the last.

    reader: whose threads read ahead and compare checksums.
    slot_bytes: size of each slot, rounded up to whole pages; it holds the largest extent's whole checked
        units, to page boundaries.
    slots: at least 2. All but one can be held by the consumer at a time.
    memory: all slots' (slots * slot_bytes in whole pages,), from a page boundary on, if they aren't to have
        memory of their own: reads land in it.

    One consumer at a time; `close()` may come from any thread.
    Raises ValueError for slots that are too few or too small and for memory that doesn't fit them, IndexError
    for an extent outside its file.
    """

    def __init__(
        self,
        reader: FlashReader,
        extents: Sequence[Extent],
        slot_bytes: int,
        slots: int,
        cyclic: bool,
        memory: NDArray[np.uint8] | None = None,
    ) -> None:
        self._native = _native.ExtentStream(
            reader.native, _tuples(extents), slot_bytes, slots, cyclic, memory
        )

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self._native.nbytes

    @property
    def stats(self) -> ReadAheadStats:
        totals, wait_seconds = self._native.stats()
        return ReadAheadStats(*totals, wait_seconds)

    def next(self) -> NDArray[np.uint8]:
        """The next extent's bytes, a read-only view of its slot, valid until its `release()` or a `rewind()`.

        Waits, without the GIL, until they have arrived. Raises FlashReadError for an extent that couldn't be
        read: it is passed over, needs no release, and the following `next()` goes on after it. Raises
        IndexError past the end of a schedule that isn't cyclic, ValueError if all slots but one are held.
        """
        return self._native.next()

    def release(self) -> None:
        """Gives the oldest extent's slot back to the reader threads."""
        self._native.release()

    def rewind(self) -> None:
        """Starts the schedule again and gives back whatever is held.

        Costs nothing where a cyclic schedule stands at its start: what was read ahead stays.
        """
        self._native.rewind()

    def reschedule(self, extents: Sequence[Extent]) -> None:
        """Goes on with another schedule, from its start, in the same slots; what is held is given back.

        Raises like the constructor, and then leaves everything as it was.
        """
        self._native.reschedule(_tuples(extents))

    def close(self) -> None:
        """Stops reading ahead; waits for the pieces in flight (1 MiB each), not for the schedule."""
        self._native.close()

    def __enter__(self) -> ExtentStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tuples(extents: Sequence[Extent]) -> list[tuple[int, int, int]]:
    return [(extent.file, extent.offset, extent.nbytes) for extent in extents]
