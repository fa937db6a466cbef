"""Provides the matrices that every token uses: as many in memory as the plan allows, the others read in order
of use.

Units are in the order of a pass: each layer's, then the runs of the head. The first units stay in memory; the
others are read ahead of use into slots, and copied from there into memory that units share. A pass that skips
the head, or begins in an upper layer, restarts the reading there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from numpy.lib.stride_tricks import as_strided

from ondevice.backends.cpu_matrices import NoMatrixSource, StreamedLinear
from ondevice.errors import OndeviceError, thread_refused
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native

MERGED_GAP_BYTES = 64 << 10
"""Most bytes between two matrices that are read with both in one piece."""


class TileRun(NamedTuple):
    """Tiles of a section of a unit's matrix: the first tile's number is `first`, and it lies `start` bytes
    into a piece.
    """

    linear: int
    section: int
    first: int
    tiles: int
    start: int


class MatrixPiece(NamedTuple):
    """A piece of a unit: runs of tiles that are read at once."""

    extent: Extent
    runs: list[TileRun]


class MatrixStream:
    """Owns the memory of the matrices `linears`, one or more per unit, and reads them.

    Once a pass needs a unit that stays, a thread fills it and those after it: so the head is read while a
    prompt's layers compute.

    reader: opened over the bundle's files. piece_bytes: most bytes of a piece, unless a tile is longer.
    slot_bytes, slots: size and number of the slots through which units are read.
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
        self._pieces = {unit: _pieces(linears, piece_bytes) for unit, linears in self._units.items()}
        self._quota = 0
        self._ahead: ReadAhead | None = None
        self._order: list[int] = []
        """The units that the ring reads cyclically, from the next one on; empty while units are filled."""
        self._filler: ThreadPoolExecutor | None = None
        self._fills: dict[int, Future[None]] = {}
        """The units that are being filled, in order."""
        self._fill_failed = False
        """Whether one of these failed, so that the ring's next pieces aren't those of the units after it."""
        self._shared: dict[object, list[_native.Matrix]] = defaultdict(list)
        """Memory that units share, by kind, as far as the newest unit doesn't use it."""
        self._newest: list[StreamedLinear] = []
        """The matrices in shared memory now."""
        self.waited = 0.0
        """Seconds that passes have waited for reads."""

    @property
    def filled_bytes(self) -> int:
        """Bytes of the matrices that stay in memory. Safe from any thread."""
        held = (linear for linears in self._units.values() for linear in linears if linear.held is not None)
        return sum(linear.nbytes for linear in held) - sum(linear.nbytes for linear in self._newest)

    @property
    def is_complete(self) -> bool:
        """Whether every matrix may stay in memory."""
        return self._quota >= len(self._units)

    def resize(self, quota: int) -> None:
        """Keep the first `quota` units in memory. Surplus units are freed at once; passes fill
        missing ones.
        """
        if quota == self._quota:
            return
        self._quota = quota
        self._end_fills()
        self._share()
        for unit, linears in self._units.items():
            for linear in linears:
                if unit >= quota:
                    linear.held = None
        self._order = []
        if self.is_complete:
            self._shared.clear()
        if not self._missing:
            self._stop_reading()

    def bring(self, unit: int) -> None:
        """Set `held` of the unit's matrices. Raises FlashReadError and MemoryError; the next call then starts
        again.
        """
        self._share()
        started, brought = time.perf_counter(), False
        try:
            if unit < self._quota:
                self._fill(unit)
            else:
                self._end_fills()
                self._read_shared(unit)
            brought = True
        finally:
            self.waited += time.perf_counter() - started
            if not brought:
                # The ring may be in the middle of a unit.
                self._end_fills()
                self._order = []
        if self.is_complete and not self._missing:
            self._end_fills()
            self._stop_reading()

    def close(self) -> None:
        """Free all memory. Matrices then raise if they are multiplied. Idempotent."""
        self._end_fills()
        if self._filler is not None:
            self._filler.shutdown()
            self._filler = None
        self._stop_reading()
        self._shared.clear()
        self._newest = []
        for linears in self._units.values():
            for linear in linears:
                linear.held, linear.source = None, NoMatrixSource()
        self._units, self._pieces = {}, {}

    @property
    def _missing(self) -> list[int]:
        """The units of which a matrix isn't in memory, ascending."""
        units = self._units.items()
        return sorted(unit for unit, linears in units if any(linear.held is None for linear in linears))

    def _fill(self, unit: int) -> None:
        """Wait until a unit that stays in memory is filled. The thread continues with the units after it."""
        if unit not in self._fills:
            self._end_fills()
            units = [missing for missing in self._missing if unit <= missing < self._quota]
            self._order, self._fill_failed = [], False
            ahead = self._reading(units)
            self._filler = self._filler or ThreadPoolExecutor(1, "ondevice-matrices")
            try:
                self._fills = {filled: self._filler.submit(self._hold, filled, ahead) for filled in units}
            except RuntimeError as error:
                raise thread_refused(error) from error
        self._fills[unit].result()

    def _hold(self, unit: int, ahead: ReadAhead) -> None:
        """Fill a unit that stays in memory, from the next pieces of `ahead`."""
        if self._fill_failed:
            raise OndeviceError("a unit before this one wasn't filled")
        self._fill_failed, linears = True, self._units[unit]
        targets = [_new(linear) for linear in linears]
        self._copy(unit, targets, ahead)
        for linear, target in zip(linears, targets, strict=True):
            linear.held = target
        self._fill_failed = False

    def _end_fills(self) -> None:
        """Stop the thread after the unit that it is filling."""
        if not self._fills:
            return
        for fill in self._fills.values():
            fill.cancel()
        wait(self._fills.values())
        self._fills = {}

    def _read_shared(self, unit: int) -> None:
        """Read a unit into the memory that all units without a place share."""
        if self._ahead is None or not self._order or self._order[0] != unit:
            missing = self._missing
            at = missing.index(unit)
            self._order = [*missing[at:], *missing[:at]]
            self._ahead = self._reading(self._order)
        linears = self._units[unit]
        targets = [self._take(linear) for linear in linears]
        self._copy(unit, targets, self._ahead)
        for linear, target in zip(linears, targets, strict=True):
            linear.held = target
        self._newest = linears
        self._order = [*self._order[1:], unit]

    def _copy(self, unit: int, targets: Sequence[_native.Matrix], ahead: ReadAhead) -> None:
        """Copy a unit's pieces, the next ones of `ahead`, into its matrices `targets`."""
        linears = self._units[unit]
        for piece in self._pieces[unit]:
            arrived = ahead.next()
            for run in piece.runs:
                matrix, place = linears[run.linear].stored[run.section]
                shape, strides = (run.tiles, matrix.tile_bytes), (place.stride, 1)
                tiles = as_strided(arrived[run.start :], shape, strides, writeable=False)
                targets[run.linear].load_tiles(run.section, run.first, tiles)
            ahead.release()

    def _share(self) -> None:
        """Give the memory of the unit read last back to the shared memory."""
        for linear in self._newest:
            if linear.held is not None:
                self._shared[linear.kind].append(linear.held)
            linear.held = None
        self._newest = []

    def _take(self, linear: StreamedLinear) -> _native.Matrix:
        free = self._shared[linear.kind]
        return free.pop() if free else _new(linear)

    def _reading(self, units: Sequence[int]) -> ReadAhead:
        """The read-ahead, set to read these units again and again."""
        extents = [piece.extent for unit in units for piece in self._pieces[unit]]
        if self._ahead is None:
            self._ahead = ReadAhead(self._reader, extents, self._slot_bytes, self._slots, cyclic=True)
        else:
            self._ahead.reschedule(extents)
        return self._ahead

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._order = []


def _new(linear: StreamedLinear) -> _native.Matrix:
    sections, cols = linear.kind
    return _native.Matrix(sections, cols)


def _pieces(linears: Sequence[StreamedLinear], piece_bytes: int) -> list[MatrixPiece]:
    """The pieces of a unit, in the order of the file. Neighbouring tiles are read together."""
    pieces: list[MatrixPiece] = []
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
                    pieces.append(MatrixPiece(Extent(place.file, last.offset, stop - last.offset), runs))
                else:
                    runs = [TileRun(index, section, first, count, 0)]
                    pieces.append(MatrixPiece(Extent(place.file, start, stop - start), runs))
                first += count
    return pieces
