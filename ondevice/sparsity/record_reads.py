"""Reads one batch of neurons into their slots: full records, or some of their parts separately."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ondevice.backends.base import Int32
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.records import dataclass
from ondevice.sparsity.neuron_cache import Addresses


@dataclass(frozen=True)
class Parts:
    """A run of `count` checked parts of every record, from part `first` on, at byte `offset` of a slot."""

    first: int
    count: int
    offset: int = 0


def one_by_one(parts: Parts, part_bytes: Sequence[int]) -> list[Parts]:
    """The `parts` one by one, each at the same place in a slot as before. part_bytes: size of every part of a
    record.
    """
    indices = range(parts.first, parts.first + parts.count)
    return [Parts(part, 1, parts.offset + sum(part_bytes[parts.first : part])) for part in indices]


class RecordReads:
    """Reads one batch of records at a time, for a pass that waits for it.

    groups: groups of parts, each of which is read separately. gap_bytes: records with at most this many bytes
    between them are one read.
    """

    def __init__(self, reader: FlashReader, groups: Sequence[Parts], gap_bytes: int) -> None:
        self._batches = [(_native.RecordBatch(reader.native, urgent=True), parts) for parts in groups]
        self._gap_bytes = gap_bytes

    def start(self, file: int, ids: Int32, addresses: Addresses) -> None:
        """Begin to read the records `ids` (n,) of a file, ascending, into the slots at `addresses` (n,)."""
        started = 0
        try:
            for batch, parts in self._batches:
                targets = addresses + parts.offset if parts.offset else addresses
                batch.start(file, parts.first, parts.count, ids, targets, self._gap_bytes)
                started += 1
        finally:
            if started < len(self._batches):
                for batch, _ in self._batches[:started]:
                    with suppress(FlashReadError, ValueError):
                        batch.finish()

    def finish(self) -> None:
        """Wait until all reads have ended. No slot is written to after it returns or raises.

        Raises FlashReadError, and ValueError if the reader was closed.
        """
        failed: FlashReadError | ValueError | None = None
        for batch, _ in self._batches:
            try:
                batch.finish()
            except (FlashReadError, ValueError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Cancel the reads that haven't begun and wait for the others."""
        for batch, _ in self._batches:
            batch.close()
