"""Read-ahead: extents are read in a fixed order into a ring of slots, ahead of the compute on them.

Every token uses all weights that aren't resident, in the same order, so the next extent is always known.
While the consumer computes, the reader threads read as many further extents as there are free slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ondevice.flash.reader import FlashReader, FlashStats
from ondevice.kernels import _native
from ondevice.records import dataclass


@dataclass(frozen=True)
class Extent:
    """A range of `nbytes` bytes from `offset` on, in file number `file` of a reader.

    Bounds that don't lie between records are widened to checked units, which costs extra bytes.
    """

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ReadAheadStats(FlashStats):
    """The reads of one ring, out of the reader's totals. wait_seconds: time that the consumer waited in
    `next()`.
    """

    wait_seconds: float


class ReadAhead:
    """Hands out the extents of a schedule in order.

    One consumer at a time; any thread may call `close()`. Raises ValueError if slots are too few or too small
    or if `memory` doesn't fit them, IndexError for an extent outside its file.

    Args:
        reader: its threads read ahead and compare checksums.
        extents: the schedule.
        slot_bytes: size of each slot, rounded up to whole pages. A slot must hold all checked units of the
            largest extent, to page boundaries.
        slots: number of slots, at least 2. A schedule of smaller extents has more of them, unless `memory` is
            given. The consumer can hold all but one at a time.
        cyclic: whether the schedule begins again after its last extent.
        memory: memory for the slots, (slots * slot_bytes in full pages,) bytes from a page boundary on. Its
            owner may write to a slot after the end of the extent in it. None: memory is allocated.
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
        self._native = _native.ReadAhead(reader.native, _tuples(extents), slot_bytes, slots, cyclic, memory)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._native.nbytes

    @property
    def stats(self) -> ReadAheadStats:
        totals, wait_seconds = self._native.stats()
        return ReadAheadStats(*totals, wait_seconds)

    def next(self) -> NDArray[np.uint8]:
        """The next extent's bytes: a read-only view of its slot, valid until its `release()` or a `rewind()`.

        Waits without the GIL until the bytes have arrived. Raises FlashReadError for an extent that couldn't
        be read: it needs no release, and the following `next()` continues after it. Raises IndexError past
        the end of a schedule that isn't cyclic, ValueError if all slots but one are held.
        """
        return self._native.next()

    def release(self) -> None:
        """Gives the oldest extent's slot back to the reader threads."""
        self._native.release()

    def rewind(self) -> None:
        """Starts the schedule again and releases all slots that the consumer holds.

        Costs nothing if a cyclic schedule is at its start: extents already read ahead stay.
        """
        self._native.rewind()

    def reschedule(self, extents: Sequence[Extent]) -> None:
        """Switches to another schedule, from its start, in the same slots; releases all slots held.

        Raises as the constructor does, and then changes nothing.
        """
        self._native.reschedule(_tuples(extents))

    def close(self) -> None:
        """Stops reading ahead. Waits only for the pieces in flight (1 MiB each), not for the remaining
        schedule.
        """
        self._native.close()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tuples(extents: Sequence[Extent]) -> list[tuple[int, int, int]]:
    return [(extent.file, extent.offset, extent.nbytes) for extent in extents]
