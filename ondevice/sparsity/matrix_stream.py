"""The matrices of every token in memory as far as the plan allows; a pass reads the others in order of use.

Units come in the order of a pass: each layer's, then the runs of the head. The first ones of that order are
held; the others are read ahead of use into slots, and copied from there into memory that units share. A pass
that skips the head, or begins in an upper layer, makes the reading begin anew from there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from numpy.lib.stride_tricks import as_strided

from ondevice.backends.cpu_matrices import NoMatrixSource, StreamedLinear
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native

MERGED_GAP_BYTES = 64 << 10
"""Most bytes between two matrices, as of vectors, that are read with both in one piece."""


class TileRun(NamedTuple):
    """Tiles of a section of a unit's matrix, from number `first` on, `start` bytes into a piece."""

    linear: int
    section: int
    first: int
    tiles: int
    start: int


class Piece(NamedTuple):
    """What is read at once."""

    extent: Extent
    runs: list[TileRun]


class MatrixStream:
    """Owns the memory of the `linears`, of which each unit has one or more.

    reader: over the bundle's files. piece_bytes: most bytes of a piece, but for a longer tile. slot_bytes,
    slots: of the ring through which units are read.
    """

    def __init__(
        self,
        linears: Sequence[StreamedLinear],
        reader: FlashReader,
        *,
        piece_bytes: int,
        slot_bytes: int,
        slots: int,
    ) -> None:
        self._reader = reader
        self._slot_bytes, self._slots = slot_bytes, slots
        self._units: dict[int, list[StreamedLinear]] = defaultdict(list)
        for linear in linears:
            self._units[linear.unit].append(linear)
            linear.source = self
        self._pieces = {unit: _pieces(own, piece_bytes) for unit, own in self._units.items()}
        self._quota = 0
        self._ahead: ReadAhead | None = None
        self._order: list[int] = []
        """The units that the ring reads, again and again, from the next one on; empty before any."""
        self._shared: dict[object, list[_native.Matrix]] = defaultdict(list)
        """Memory that units share, by kind: what the newest of them doesn't use."""
        self._newest: list[StreamedLinear] = []
        """The matrices in shared memory now."""
        self.waited = 0.0
        """Seconds that passes have waited for reads."""

    @property
    def filled_bytes(self) -> int:
        """Bytes of the matrices that stay in memory. Safe from any thread."""
        held = (linear for own in self._units.values() for linear in own if linear.held is not None)
        return sum(linear.nbytes for linear in held) - sum(linear.nbytes for linear in self._newest)

    @property
    def is_complete(self) -> bool:
        """Whether every matrix may stay in memory."""
        return self._quota >= len(self._units)

    def resize(self, quota: int) -> None:
        """Keep the first `quota` units. Surplus ones are freed at once; passes bring missing ones."""
        if quota == self._quota:
            return
        self._quota = quota
        self._share()
        for unit, own in self._units.items():
            for linear in own:
                if unit >= quota:
                    linear.held = None
        self._order = []
        if self.is_complete:
            self._shared.clear()
        if self._holds_all:
            self._stop_reading()

    def bring(self, unit: int) -> None:
        """Set `held` of the unit's matrices. Raises FlashReadError; another try reads the unit anew."""
        self._share()
        own, keeps = self._units[unit], unit < self._quota
        ahead = self._reading_from(unit)
        targets = [_new(linear) if keeps else self._take(linear) for linear in own]
        order, self._order = self._order, []
        for piece in self._pieces[unit]:
            started = time.perf_counter()
            arrived = ahead.next()
            self.waited += time.perf_counter() - started
            for run in piece.runs:
                matrix, place = own[run.linear].stored[run.section]
                shape, strides = (run.tiles, matrix.tile_bytes), (place.stride, 1)
                tiles = as_strided(arrived[run.start :], shape, strides, writeable=False)
                targets[run.linear].load_tiles(run.section, run.first, tiles)
            ahead.release()
        for linear, target in zip(own, targets, strict=True):
            linear.held = target
        if not keeps:
            self._newest = own
        # The ring reads on. Where it comes to a unit that is held by then, reading begins anew.
        self._order = [*order[1:], order[0]]
        if keeps and self._holds_all:
            self._stop_reading()

    def close(self) -> None:
        """Free everything; the matrices then refuse to be multiplied. Idempotent."""
        self._stop_reading()
        self._shared.clear()
        self._newest = []
        for own in self._units.values():
            for linear in own:
                linear.held, linear.source = None, NoMatrixSource()
        self._units, self._pieces = {}, {}

    @property
    def _holds_all(self) -> bool:
        return all(linear.held is not None for own in self._units.values() for linear in own)

    def _share(self) -> None:
        """Take the shared memory back from the newest unit."""
        for linear in self._newest:
            if linear.held is not None:
                self._shared[linear.kind].append(linear.held)
            linear.held = None
        self._newest = []

    def _take(self, linear: StreamedLinear) -> _native.Matrix:
        free = self._shared[linear.kind]
        return free.pop() if free else _new(linear)

    def _reading_from(self, unit: int) -> ReadAhead:
        """The ring, whose next piece is the unit's first."""
        if self._ahead is not None and self._order and self._order[0] == unit:
            return self._ahead
        missing = sorted(it for it, own in self._units.items() if any(linear.held is None for linear in own))
        at = missing.index(unit)
        order = [*missing[at:], *missing[:at]]
        extents = [piece.extent for it in order for piece in self._pieces[it]]
        if self._ahead is None:
            self._ahead = ReadAhead(self._reader, extents, self._slot_bytes, self._slots, cyclic=True)
        else:
            self._ahead.reschedule(extents)
        self._order = order
        return self._ahead

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._order = []


def _new(linear: StreamedLinear) -> _native.Matrix:
    sections, cols = linear.kind
    return _native.Matrix(sections, cols)


def _pieces(linears: Sequence[StreamedLinear], piece_bytes: int) -> list[Piece]:
    """The pieces of a unit, in the order of the file: neighbours are read together."""
    pieces: list[Piece] = []
    for index, linear in enumerate(linears):
        for section, (matrix, place) in enumerate(linear.stored):
            first, step = 0, max(1, piece_bytes // place.stride)
            while first < matrix.tiles:
                last, start = pieces[-1].extent if pieces else None, place.offset + first * place.stride
                room = 0
                if last is not None and last.file == place.file:
                    gap = start - last.offset - last.nbytes
                    if 0 <= gap <= MERGED_GAP_BYTES:
                        room = max(0, piece_bytes - last.nbytes - gap) // place.stride
                count = min(room or step, matrix.tiles - first)
                stop = start + (count - 1) * place.stride + matrix.tile_bytes
                if room and last is not None:
                    runs = [*pieces.pop().runs, TileRun(index, section, first, count, start - last.offset)]
                    pieces.append(Piece(Extent(place.file, last.offset, stop - last.offset), runs))
                else:
                    runs = [TileRun(index, section, first, count, 0)]
                    pieces.append(Piece(Extent(place.file, start, stop - start), runs))
                first += count
    return pieces
