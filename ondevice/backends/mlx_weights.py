"""Weights of the MLX backend: quantised matrices in the bundle's codes, and neurons.

Streamed records are read from flash into the memory of MLX arrays, through numpy views, and multiplied in
place. On CUDA they are read into plain memory, and copied into an array when they are multiplied. Rows of
selected neurons are gathered by one copy. MLX is lazy, so an array's memory is overwritten only after
everything computed from it has been evaluated.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import field
from weakref import finalize

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import NO_BIASES, Biases, Bytes, FeedForwardSource, Selector
from ondevice.backends.expert_records import rows_layout
from ondevice.backends.feed_forward_layer import FeedForwardLayer, PieceMemory
from ondevice.backends.mlx_experts import MlxExpertMatrix, MlxExperts
from ondevice.backends.mlx_linear import MlxLinear
from ondevice.backends.mlx_matrix import MlxMatrix, require_mode
from ondevice.backends.mlx_memory import Synchronisations, allocation, begin, known, require_memory, writable
from ondevice.bundle.layout import ExpertLayout, SliceLayout
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.bundle.tiles import StoredMatrix, in_rows, joined_slices, untiled
from ondevice.errors import BackendUnavailableError
from ondevice.kernels import _native
from ondevice.records import dataclass
from ondevice.units import PAGE_BYTES


@dataclass(frozen=True)
class MlxNeurons:
    """The gate, up and down rows of n neurons.

    gate: None if the gates are already known. up: None in an ungated feed-forward. bias: of the gates, (n,)
    or None. sliced: whether `down` is (D, n), as in slices, instead of (n, D).
    """

    gate: MlxMatrix | None
    up: MlxMatrix | None
    down: MlxMatrix
    bias: mx.array | None = None
    sliced: bool = False

    @property
    def matrices(self) -> list[MlxMatrix]:
        return [matrix for matrix in (self.gate, self.up, self.down) if matrix is not None]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for matrix in self.matrices for array in matrix.arrays]

    def copy(self) -> MlxNeurons:
        """A copy of the rows. Not evaluated."""
        gate, up = (None if matrix is None else matrix.copy() for matrix in (self.gate, self.up))
        return MlxNeurons(gate, up, self.down.copy(), self.bias, self.sliced)

    def gates(self, x: mx.array) -> mx.array:
        """(T, n) for x (T, D). Requires gate rows."""
        assert self.gate is not None
        gates = self.gate.rows_product(x)
        return gates if self.bias is None else gates + self.bias

    def ups(self, x: mx.array) -> mx.array | None:
        """(T, n) for x (T, D); None in an ungated feed-forward."""
        return None if self.up is None else self.up.rows_product(x)

    def outputs(self, hidden: mx.array) -> mx.array:
        """(T, D) for hidden values (T, n)."""
        return self.down.rows_product(hidden) if self.sliced else self.down.columns_product(hidden)


class GatheredNeurons:
    """Room for n neurons, whose rows are copied in and multiplied in place.

    Args:
        count: n.
        rows: offset (in the gathered part of a record) and layout of each row: gate, up, down.
        dtype: the type of the products' inputs.

    Raises MemoryError.
    """

    def __init__(self, count: int, rows: Mapping[str, tuple[int, RowLayout]], dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._layouts = {name: layout for name, (_, layout) in rows.items()}
        self._arrays: dict[str, list[mx.array]] = {}
        self._views: list[tuple[int, Bytes]] = []
        for name, (offset, layout) in rows.items():
            codes = mx.float16 if layout.bits == 16 else mx.uint32
            scales = mx.uint8 if layout.mxfp4 else mx.float16
            parts = [(codes, layout.codes_bytes), (scales, layout.scales_bytes)]
            parts.append((mx.float16, layout.biases_bytes))
            pieces = [writable((count, nbytes // it.size), it) for it, nbytes in parts if nbytes]
            self._arrays[name] = [array for array, _ in pieces]
            for _, view in pieces:
                self._views.append((offset, view.view(np.uint8)))
                offset += view.nbytes // count

    def gather(self, place: int, addresses: NDArray[np.uint64]) -> None:
        """Copy the neurons at addresses (n,) to the places place .. place + n."""
        for offset, view in self._views:
            _native.copy_out(addresses, offset, view[place : place + len(addresses)])

    def take_over(self, other: GatheredNeurons, place: int, count: int) -> None:
        """Copy `count` neurons of `other`, from its place `place` on, to the first places of this room."""
        for (_, view), (_, source) in zip(self._views, other._views, strict=True):
            view[:count] = source[place : place + count]

    def clear(self, start: int, stop: int) -> None:
        """Fill the places start .. stop with zeros, so that they add nothing."""
        for _, view in self._views:
            view[start:stop] = 0

    def neurons(self, start: int, stop: int) -> MlxNeurons:
        """The neurons at places start .. stop, without a copy."""
        rows = {
            name: MlxMatrix(self._layouts[name], self._dtype, tuple(array[start:stop] for array in arrays))
            for name, arrays in self._arrays.items()
        }
        return MlxNeurons(rows.get("gate"), rows.get("up"), rows["down"])


class Records:
    """Records in the MLX array `words`, uint32; their parts are views.

    address: host address of the first byte of `words`, or of the bytes they were copied from.
    """

    def __init__(self, words: mx.array, address: int) -> None:
        self._words, self._address = words, address
        self._halves, self._bytes = words.view(mx.float16), words.view(mx.uint8)

    @classmethod
    def copied(cls, records: Bytes) -> Records:
        """Records in a new MLX array, copied from `records`, (n, stride) or (nbytes,). Raises MemoryError."""
        require_memory(records.nbytes)
        with allocation():
            return cls(mx.array(records.reshape(-1).view(np.uint32)), records.ctypes.data)

    def expert(self, address: int, layout: ExpertLayout, dtype: mx.Dtype) -> MlxExperts:
        """A view of the expert at `address`, whose matrices are stored as rows."""
        floats = self._words.view(mx.float32)
        first, matrices = address - self._address, []
        for offset, matrix in zip(layout.part_offsets, layout.matrices, strict=True):
            arrays = tuple(array[None] for array in self._matrix_arrays(first + offset, matrix))
            added = None
            if matrix.has_bias:
                at = (first + offset + matrix.rows_bytes) // 4
                added = mx.as_strided(floats, (1, matrix.rows), (0, 1), at)
            matrices.append(MlxExpertMatrix(matrix.row, dtype, arrays, added))
        return MlxExperts.of(matrices)

    def slice(self, address: int, layout: ExpertLayout, dtype: mx.Dtype, bias: mx.array | None) -> MlxNeurons:
        """A view of the slice at `address`, whose matrices are stored as rows. bias: the bias of its
        gates.
        """
        first = address - self._address
        gate, *up, down = (
            MlxMatrix(matrix.row, dtype, self._matrix_arrays(first + offset, matrix))
            for offset, matrix in zip(layout.part_offsets, layout.matrices, strict=True)
        )
        return MlxNeurons(gate, up[0] if up else None, down, bias, sliced=True)

    def _matrix_arrays(self, start: int, matrix: TiledMatrix) -> tuple[mx.array, ...]:
        """Views of codes, scales and biases of a matrix whose rows begin at byte `start`."""
        arrays = []
        for array, columns in self._parts(matrix.row):
            size: int = array.dtype.size
            arrays.append(mx.as_strided(array, (matrix.rows, columns), (columns, 1), start // size))
            start += size * matrix.rows * columns
        return tuple(arrays)

    def _parts(self, row: RowLayout) -> list[tuple[mx.array, int]]:
        """The arrays of codes, scales and biases of stored rows, and the columns of each."""
        if row.bits == 16:
            return [(self._halves, row.padded_cols)]
        scales = self._bytes if row.mxfp4 else self._halves
        biases = [(self._halves, row.groups)] if row.stored.has_biases else []
        return [(self._words, row.codes_bytes // 4), (scales, row.groups), *biases]

    def matrix(self, records: Bytes, offset: int, layout: RowLayout, dtype: mx.Dtype) -> MlxMatrix:
        """The row `offset` bytes into each of records (n, stride), at the address where they were read."""
        start, (count, stride) = records.ctypes.data - self._address + offset, records.shape
        scales, biases = start + layout.codes_bytes, start + layout.codes_bytes + layout.scales_bytes

        def part(array: mx.array, first: int, nbytes: int) -> mx.array:
            size = array.dtype.size
            return mx.as_strided(array, (count, nbytes // size), (stride // size, 1), first // size)

        if layout.bits == 16:
            return MlxMatrix(layout, dtype, (part(self._halves, start, layout.codes_bytes),), spaced=True)
        codes = part(self._words, start, layout.codes_bytes)
        pairs = [part(self._bytes if layout.mxfp4 else self._halves, scales, layout.scales_bytes)]
        if layout.stored.has_biases:
            pairs.append(part(self._halves, biases, layout.biases_bytes))
        return MlxMatrix(layout, dtype, (codes, *pairs), spaced=True)


class RecordMemory(Records):
    """MLX memory for records, from a page boundary on, written through `view`, (nbytes,) uint8.

    Raises MemoryError.
    """

    def __init__(self, nbytes: int) -> None:
        words, memory = writable(((nbytes + PAGE_BYTES) // 4,), mx.uint32)
        super().__init__(words, memory.ctypes.data)
        mx.eval(self._halves, self._bytes)
        start = -self._address % PAGE_BYTES
        self.view: Bytes = memory.view(np.uint8)[start : start + nbytes]


def tiles_to_rows(record: Bytes, layout: ExpertLayout) -> None:
    """Change the matrices of an expert's record in place from tiles to the rows of `rows_layout`.

    record: (n,) bytes, with room for both layouts. A matrix in rows is [codes][scales][biases].
    """
    by_rows = rows_layout(layout)
    places = zip(layout.part_offsets, layout.matrices, by_rows.part_offsets, by_rows.matrices, strict=True)
    # Parts move to higher offsets, so the last one moves first.
    for offset, matrix, at, rows in reversed(list(places)):
        if matrix.row.bits == 16 and at == offset:
            continue
        end = at + rows.rows_bytes
        stored = _stored_rows(record[offset : offset + matrix.nbytes].copy(), matrix)
        for values in (stored.codes, stored.scales, stored.biases):
            flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            record[at : at + flat.nbytes] = flat
            at += flat.nbytes
        if stored.added is not None:
            record[end : end + stored.added.nbytes] = stored.added.view(np.uint8)


def rows_copy(records: Bytes, layout: SliceLayout) -> tuple[Records, int]:
    """A copy of one slice (1, stride) as rows in MLX's memory, and its address. Raises MemoryError."""
    copy = np.empty(row_bytes(layout), dtype=np.uint8)
    slice_to_rows(records, layout, copy)
    return Records.copied(copy), copy.ctypes.data


def row_bytes(layout: SliceLayout) -> int:
    """Bytes in which a slice's planes are joined and its tiles become rows."""
    return max(layout.tiles.stride, rows_layout(layout.tiles).stride)


def slice_to_rows(records: Bytes, layout: SliceLayout, room: Bytes) -> None:
    """Write one slice (1, stride) as rows to room (row_bytes,), which may overlap it."""
    room[: layout.tiles.stride] = joined_slices(records, layout)[0]
    tiles_to_rows(room, layout.tiles)


def _stored_rows(part: Bytes, matrix: TiledMatrix) -> StoredMatrix:
    """The rows of a part (nbytes,) of an expert's record, in the format of `rows_layout`."""
    return in_rows(untiled(part, matrix), matrix.row)


@dataclass(frozen=True)
class _Slots:
    """Memory for experts in slots, (nbytes,), and the MLX memory that it is a view of, or None."""

    view: Bytes
    records: RecordMemory | None

    def at(self, address: int, nbytes: int) -> Bytes:
        """The bytes (nbytes,) that begin at an address."""
        start = address - self.view.ctypes.data
        return self.view[start : start + nbytes]

    def held(self, records: Bytes) -> Records:
        """Records that lie in these slots, as a view of MLX's memory."""
        return self.records or Records.copied(records)


class MlxPieceMemory(PieceMemory):
    """Memory for pieces in MLX arrays. One piece may be multiplied while the next is read.

    copies_reads: whether pieces and experts are read into plain memory and copied into an array when
    multiplied. At most two copies exist.
    """

    pieces_read = 1

    def __init__(self, waits: Synchronisations, copies_reads: bool = False) -> None:
        self.records: RecordMemory | None = None
        self._waits = waits
        self._copies_reads = copies_reads
        self._pending: list[mx.array] = []
        self._slots: dict[int, _Slots] = {}
        """Memory of experts' slots, by address."""
        self._starts: list[int] = []
        self._experts: dict[int, MlxExperts] = {}
        """Views of the experts in slots, by address."""

    @property
    def slot_allocator(self) -> Callable[[int], Bytes]:
        return self._allocate_slots

    def _allocate_slots(self, nbytes: int) -> Bytes:
        memory = None if self._copies_reads else RecordMemory(nbytes)
        view = _native.allocate(nbytes)[:] if memory is None else memory.view
        start = view.ctypes.data
        self._slots[start] = _Slots(view[:], memory)
        insort(self._starts, start)
        if memory is not None:
            memory.view = view[:]
        finalize(view, self._free_slots, start, nbytes)
        return view

    def _free_slots(self, start: int, nbytes: int) -> None:
        del self._slots[start]
        self._starts.remove(start)
        for address in [it for it in self._experts if start <= it < start + nbytes]:
            del self._experts[address]

    def expert_to_rows(self, address: int, layout: ExpertLayout) -> None:
        """Change an expert that was read to `address` from tiles to rows."""
        tiles_to_rows(self._slots_at(address).at(address, rows_layout(layout).stride), layout)

    def expert(self, address: int, layout: ExpertLayout, dtype: mx.Dtype) -> MlxExperts:
        """The expert at `address`, whose matrices are in rows."""
        if address in self._experts:
            return self._experts[address]
        slots, layout = self._slots_at(address), rows_layout(layout)
        experts = slots.held(slots.at(address, layout.stride)).expert(address, layout, dtype)
        if slots.records is not None:
            known(*experts.arrays)
            self._experts[address] = experts
        return experts

    def neurons(self, address: int, count: int, stride: int) -> tuple[Records, Bytes]:
        """The records (count, stride) from `address` on, in MLX's memory and in the slot."""
        slots = self._slots_at(address)
        records = slots.at(address, count * stride).reshape(count, stride)
        return slots.held(records), records

    def _slots_at(self, address: int) -> _Slots:
        return self._slots[self._starts[bisect_right(self._starts, address) - 1]]

    def allocate(self, nbytes: int) -> Bytes | None:
        if self._copies_reads:
            return None
        self.records = RecordMemory(nbytes)
        return self.records.view

    def held(self, records: Bytes) -> Records:
        """A piece's records (n, stride) in MLX's memory: the place they were read to, or a copy."""
        return self.records or Records.copied(records)

    def slice_rows(self, records: Bytes, layout: SliceLayout) -> tuple[Records, int]:
        """A piece that is one slice (1, stride), as rows in MLX's memory, and the address of these rows."""
        if self.records is None:
            return rows_copy(records, layout)
        start = records.ctypes.data - self.records.view.ctypes.data
        slice_to_rows(records, layout, self.records.view[start : start + row_bytes(layout)])
        return self.records, records.ctypes.data

    def free(self) -> None:
        self.records = None
        self._pending = []

    def begin(self, arrays: list[mx.array]) -> None:
        """Begin to compute `arrays` from the current piece."""
        if self._copies_reads and self._pending:
            self.wait(self._pending)  # so that no more than two copies exist
        self._pending = arrays
        begin(*arrays)

    def take_pending(self) -> list[mx.array]:
        pending, self._pending = self._pending, []
        return pending

    def wait(self, pending: list[mx.array]) -> None:
        if pending:
            self._waits.wait(*pending)


@dataclass
class MlxSegment:
    """Resident neurons; `neurons` is set by `pack`."""

    neurons: MlxNeurons = field(init=False)


class MlxFeedForward(FeedForwardLayer):
    """One layer's neurons. Segments are `MlxSegment`s, multiplied one by one.

    pieces: the memory for neurons from flash, which all layers share. gates: as in
    `Backend.load_feed_forward`.
    """

    def __init__(
        self,
        index: int,
        source: FeedForwardSource,
        segment_neurons: int,
        dtype: mx.Dtype,
        pieces: MlxPieceMemory,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: MlxLinear | None = None,
    ) -> None:
        layout = source.layout
        self._rows: dict[str, tuple[int, RowLayout]] = {}
        if isinstance(layout, SliceLayout):
            segment_neurons = layout.neurons
            for matrix in layout.tiles.matrices:
                require_mode(matrix.row)
        else:
            names = ("gate", "up", "down") if len(layout.rows) == 3 else ("gate", "down")
            places = zip(layout.row_offsets, layout.rows, strict=True)
            self._rows = dict(zip(names, places, strict=True))
        super().__init__(index, source, segment_neurons, selector)
        for offset, row in self._rows.values():
            require_mode(row)
            if offset % 4:
                raise BackendUnavailableError(
                    f"--backend mlx takes neurons whose rows begin at multiples of 4 bytes; {row.cols} "
                    "columns of MXFP4 give others; use --backend cpu"
                )
        self.gates = gates
        self.piece_memory: MlxPieceMemory = pieces
        self.biases = biases
        self._dtype = dtype
        self._holds = False
        self._held: MlxExperts | None = None
        if source.experts is not None and source.experts.layout is not None:
            for matrix in source.experts.layout.matrices:
                require_mode(matrix.row)

    def room_for(self, count: int) -> GatheredNeurons:
        """Empty room for `count` selected neurons: for all their rows, or without the gate row if gates
        select them.
        """
        rows = self._rows
        if self.selector is None or not self.selector.predicted:
            start = self.source.layout.part_offsets[1]
            rows = {name: (offset - start, row) for name, (offset, row) in rows.items() if name != "gate"}
        return GatheredNeurons(count, rows, self._dtype)

    def new_segments(self, count: int, high_planes: bool = False) -> list[MlxSegment]:
        """Empty segments. `pack` allocates their memory, as MLX computes only on the passes' thread."""
        return [MlxSegment() for _ in range(count)]

    def neurons_of(self, records: Bytes, first: int) -> MlxNeurons:
        """The neurons of a piece, records (n, stride), which begins at neuron `first`. Call once per read."""
        layout = self.source.layout
        if isinstance(layout, SliceLayout):
            return self._slice_in(*self.piece_memory.slice_rows(records, layout), layout.tiles, first)
        return self._neurons_in(self.piece_memory.held(records), records, first)

    def _slice_in(self, memory: Records, address: int, layout: ExpertLayout, first: int) -> MlxNeurons:
        bias = self.biases.gates
        if bias is not None:
            bias = mx.array(bias)[first : first + layout.neurons]
            bias = mx.pad(bias, (0, layout.neurons - len(bias)))
        return memory.slice(address, rows_layout(layout), self._dtype, bias)

    def _neurons_in(self, memory: Records, records: Bytes, first: int) -> MlxNeurons:
        rows = {name: memory.matrix(records, at, row, self._dtype) for name, (at, row) in self._rows.items()}
        biases = self.biases.gates
        bias = None if biases is None else biases[first : first + len(records)]
        return MlxNeurons(rows["gate"], rows.get("up"), rows["down"], bias)

    def pack(self, segment: MlxSegment, index: int, first: int, records: Bytes) -> None:
        layout = self.source.layout
        assert len(records) == layout.num_records(len(self.segment_range(index)))
        if isinstance(layout, SliceLayout):
            # From a copy: if memory is refused, the records are multiplied as they were read.
            neurons = self._slice_in(*rows_copy(records, layout), layout.tiles, first).copy()
        else:
            neurons = self.neurons_of(records, first).copy()
        require_memory(sum(array.nbytes for array in neurons.arrays))
        self.piece_memory.begin(neurons.arrays)
        segment.neurons = neurons

    def hold_all(self) -> None:
        """Read all neurons into segments that stay in memory. Raises FlashReadError and MemoryError."""
        for index in range(self.num_segments):
            neurons = self.segment_range(index)
            records = self.source.read(neurons.start, len(neurons))
            rows = self._neurons_in(Records.copied(records), records, neurons.start).copy()
            known(*rows.arrays)
            self.segments.append(MlxSegment())
            self.segments[-1].neurons = rows

    @property
    def _expert_layout(self) -> ExpertLayout:
        records = self.source.experts
        assert records is not None
        assert records.layout is not None
        return records.layout

    @property
    def has_expert_matrices(self) -> bool:
        """Whether the layer has experts that are stored as matrices, not neuron by neuron."""
        return self.source.experts is not None and self.source.experts.layout is not None

    def expert_arrived(self, address: int) -> None:
        if self.has_expert_matrices:
            self.piece_memory.expert_to_rows(address, self._expert_layout)

    def expert_neurons(self, address: int) -> MlxNeurons:
        """The neurons of the expert in a slot, a run of records."""
        records, stride = self.source.experts, self.source.layout.stride
        assert records is not None
        return self._neurons_in(*self.piece_memory.neurons(address, records.nbytes // stride, stride), 0)

    def expert_at(self, address: int) -> MlxExperts:
        """The expert in a slot, as the only one of an `MlxExperts`."""
        return self.piece_memory.expert(address, self._expert_layout, self._dtype)

    def hold_experts(self, wanted: bool) -> None:
        self._holds, self._held = wanted, self._held if wanted else None

    @property
    def held_experts_bytes(self) -> int:
        return 0 if self._held is None else sum(array.nbytes for array in self._held.arrays)

    @property
    def held_experts(self) -> MlxExperts | None:
        """All the layer's experts if `hold_experts` wants them, read on first use; else None.

        Raises FlashReadError and MemoryError.
        """
        if self._holds and self._held is None:
            self._held = self._read_experts()
        return self._held

    def _read_experts(self) -> MlxExperts:
        records, layout, rooms = self.source.experts, self._expert_layout, []
        by_rows = rows_layout(layout).matrices
        assert records is not None
        for matrix in by_rows:
            row, shape = matrix.row, (records.count, matrix.rows)
            sizes = [(self._dtype, row.padded_cols)]
            if row.bits < 16:
                affine = [(mx.uint8, row.groups)] if row.mxfp4 else [(self._dtype, row.groups)] * 2
                sizes = [(mx.uint32, row.codes_bytes // 4), *affine]
            rooms.append([writable((*shape, columns), dtype) for dtype, columns in sizes])
            rooms[-1] += [writable(shape, mx.float32)] if matrix.has_bias else []
        for expert in range(records.count):
            record = records.read(expert)
            parts = zip(layout.part_offsets, layout.matrices, by_rows, rooms, strict=True)
            for offset, matrix, rows, room in parts:
                values = _stored_rows(record[offset : offset + matrix.nbytes], matrix)
                _fill([view[expert] for _, view in room], values, rows.row)
        experts = []
        for matrix, room in zip(by_rows, rooms, strict=True):
            arrays = [array for array, _ in room]
            added = arrays.pop() if matrix.has_bias else None
            experts.append(MlxExpertMatrix(matrix.row, self._dtype, tuple(arrays), added))
        return MlxExperts.of(experts)


def _fill(views: list[NDArray[np.generic]], values: StoredMatrix, row: RowLayout) -> None:
    """Write a matrix to one expert's arrays: codes, scales and biases, or values; then product biases.

    row: the layout of a matrix's row.
    """
    if row.bits == 16:
        views[0][:] = np.ascontiguousarray(values.codes).view(np.float16)
    else:
        views[0][:] = np.ascontiguousarray(values.codes).view(np.uint32)
        views[1][:] = values.scales
        if not row.mxfp4:
            views[2][:] = np.float16(-row.stored.zero) * values.scales if row.implied_bias else values.biases
    if values.added is not None:
        views[-1][:] = values.added
