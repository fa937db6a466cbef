"""Sizes and shapes that every backend's memory shares: packed matrices, segments, slots, read buffers.

Pure functions of the model's shape and the options, for the memory models. All sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from ondevice.bundle.layout import (
    RESIDENT_BLOCK_BYTES,
    SliceLayout,
    expert_bytes,
    neuron_layouts,
    record_counts,
    record_layout,
    slice_neurons,
)
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix, padded
from ondevice.bundle.matrix_units import draft_head_units, matrix_units
from ondevice.bundle.streams import MultiStreams
from ondevice.config import GROUP_SIZE, QuantConfig, RowFormat, RuntimeConfig
from ondevice.errors import UsageError
from ondevice.model_config import ExpertsSpec, ModelConfig
from ondevice.records import dataclass
from ondevice.speculation.tree import DRAFT_NODES
from ondevice.units import PAGE_BYTES

INTERLEAVED_ROWS = 16
"""Rows that a repacked matrix is padded to a multiple of."""
SEGMENT_BYTES = 8 << 20
"""Target size of a segment of feed-forward memory; the layer's size decides within half and double of it."""
SEGMENTS_PER_SMALL_LAYER = 8
STREAM_SLOT_BYTES = 2 << 20
"""Target size of one read of dense mode's records: from 1 MiB on, flash is at its full rate."""
STREAM_SLOTS = 8
SLICE_SLOTS = 12
"""Slots for slices, which eight threads read one by one; low planes alone have twice as many in that memory.

With as many slots as threads, threads wait for the oldest read. GB/s with 8, 12, 16, 24 and 32 slots: 1.74,
1.75, 1.76, 1.96 and 2.07 of slices of 0.8 MB, 0.89, 1.45, 1.78, 1.70 and 1.98 of low planes of 0.4 MB
(`python -m tests.benchmarks.explain.slice_reads`)."""
MATRIX_PIECE_BYTES = 512 << 10
"""Target size of one read of a matrix that isn't held."""
MATRIX_SLOTS = 12
"""Slots for such reads. With 6, the 1.5B in 57 % of its file decodes at 0.77 of the speed."""
STREAM_SHARE = 16
"""Divisor of the feed-forward weights that bounds the read-ahead's slots, which are two at least."""
FETCH_NEURONS = 1024
"""Selected neurons that are read and multiplied at a time; a multiple of 64."""
FETCH_DEPTH = 48
"""Most reads at once of single records: small reads are slow alone."""
FETCH_ENDED = 16
"""Ended reads that are checked and copied while others run (kEnded in read_pool.cc)."""
FETCH_STAGING_BYTES = 72 << 10
"""Staging buffer for a run of neighbouring records, at most 64 KiB, with its pages."""
DEFAULT_MAX_CONTEXT = 4096
PREFILL_CHUNK, EXPERTS_CHUNK = 256, 512
"""Tokens of a chunk of a prompt; with experts, one of 512 takes 0.8 of the time of two (docs/experts.md)."""
SAMPLING_BYTES = 32
"""Most bytes per token of the vocabulary while one is drawn: its logit, and what `sample` takes beside it."""
LOGITS_BYTES = 2 << 20
"""Target size of the logits that exist at once when every token's are computed."""
DECODE_TOKENS = DRAFT_NODES
"""Most tokens of a forward pass that counts as decoding: neurons get the scratch memory that it leaves.

The pass may also have STREAM_ROWS rows of streams."""


@dataclass(frozen=True)
class SegmentShape:
    """The pieces of feed-forward memory: each holds `neurons` neurons of one layer.

    A segment of two planes counts as two: its high plane, which all layers get first, and its low one.

    per_layer: for each layer, the segments that hold all of its neurons. layer_bytes: for each layer, the
    bytes of a segment. high_bytes: for each layer, those of a segment's high plane, or 0.
    """

    neurons: int
    per_layer: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    high_bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Segments that hold every neuron of the model."""
        return len(self._order)

    @property
    def least(self) -> int:
        """The fewest segments with which anything can be computed."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the largest segment."""
        return max(self.layer_bytes)

    def bytes_of(self, segments: int) -> int:
        """Bytes of the first `segments` segments, in the order in which layers get them."""
        return self._sums[segments]

    def fitting(self, nbytes: int) -> int:
        """The most segments that fit into `nbytes` bytes."""
        return max(0, bisect_right(self._sums, nbytes) - 1)

    @property
    def high_planes(self) -> int:
        """Number of segments that come first: high planes, and segments with one plane. 0 if no segment has
        two planes.
        """
        low = sum(most for most, high in zip(self.per_layer, self.high_bytes, strict=True) if high)
        return self.total - low if low else 0

    def quota(self, segments: int) -> tuple[int, ...]:
        """Number of segments of each layer: as nearly the same share of every layer as possible.

        Layers get segments in one fixed order, spread over the depth, so with fewer segments no layer gets
        more.
        """
        counts = [0] * len(self.per_layer)
        for layer, _ in self._order[: max(0, segments)]:
            counts[layer] += 1
        return tuple(counts)

    @cached_property
    def _order(self) -> list[tuple[int, int]]:
        """For every segment in the order in which layers get them: its layer, and its bytes."""
        spread = sorted(range(len(self.per_layer)), key=lambda layer: f"{layer:020b}"[::-1])
        rank = {layer: place for place, layer in enumerate(spread)}
        places = [
            (low, held / most, rank[layer], layer)
            for layer, most in enumerate(self.per_layer)
            for low in ((False, True) if self.high_bytes[layer] else (False,))
            for held in range(most)
        ]
        return [(layer, self._bytes_of(layer, low)) for low, _, _, layer in sorted(places)]

    def _bytes_of(self, layer: int, low: bool) -> int:
        """Bytes of a layer's low plane if `low`, otherwise of its high plane, or of a segment
        without planes.
        """
        segment, high = self.layer_bytes[layer], self.high_bytes[layer]
        return segment - high if low else high or segment

    @cached_property
    def _sums(self) -> list[int]:
        """The bytes of the first n segments in the order of `_order`, indexed by n."""
        return [0, *accumulate(nbytes for _, nbytes in self._order)]


@dataclass(frozen=True)
class SlotShape:
    """The equal pieces of memory for single neurons: `slots` slots for one neuron each.

    `reserve` slots are for neurons that are read for one pass only; they take `least` segments.
    """

    slots: int
    slot_bytes: int
    reserve: int
    total: int
    """Segments that hold every neuron of the model and the reserve."""

    @property
    def nbytes(self) -> int:
        return padded(self.slots * self.slot_bytes, PAGE_BYTES)

    def bytes_of(self, segments: int) -> int:
        """Bytes of `segments` segments."""
        return segments * self.nbytes

    def fitting(self, nbytes: int) -> int:
        """The most segments that fit into `nbytes` bytes."""
        return max(0, min(self.total, nbytes // self.nbytes))

    @property
    def high_planes(self) -> int:
        """0: slots have no planes."""
        return 0

    @property
    def least(self) -> int:
        """The fewest segments with which anything can be computed."""
        return -(-self.reserve // self.slots)

    def quota(self, segments: int) -> tuple[int, ...]:
        """One number for all layers together: they share the slots of every segment."""
        return (max(0, min(segments, self.total)),)


@dataclass(frozen=True)
class MatrixShape:
    """Memory for the matrices that every token uses, in the units of `matrix_units`, which are held in this
    order.

    unit_bytes: the bytes of each unit. draft_units: number of first units that a draft's pass needs: every
    layer's, and those of the draft head. piece_bytes: most bytes that are read at once, unless a tile is
    longer. slot_bytes: the bytes of each of the MATRIX_SLOTS slots through which units are read.
    shared_bytes: memory into which units that don't stay in memory are copied.
    """

    unit_bytes: tuple[int, ...]
    draft_units: int
    piece_bytes: int
    slot_bytes: int
    shared_bytes: int

    @property
    def slots_bytes(self) -> int:
        return MATRIX_SLOTS * self.slot_bytes

    @property
    def streaming_bytes(self) -> int:
        """Memory for reading units in every pass."""
        return self.slots_bytes + self.shared_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all units."""
        return self._sums[-1]

    def fitting(self, nbytes: int) -> int:
        """The most units that `nbytes` bytes can hold, including the memory that all other units share, but
        not the slots.
        """
        if nbytes >= self.total_bytes:
            return len(self.unit_bytes)
        held = bisect_right(self._sums, nbytes - self.shared_bytes) - 1
        return max(0, min(held, len(self.unit_bytes) - 1))

    def held_bytes(self, units: int) -> int:
        """Bytes of the first `units` units."""
        return self._sums[units]

    def bytes_of(self, units: int) -> int:
        """Bytes for holding `units` units, including the memory that all other units share, but not the
        slots.
        """
        return self._sums[units] + (self.shared_bytes if units < len(self.unit_bytes) else 0)

    @cached_property
    def _sums(self) -> tuple[int, ...]:
        """The bytes of the first n units, indexed by n."""
        return tuple(accumulate(self.unit_bytes, initial=0))


@dataclass(frozen=True)
class BufferShape:
    """Buffers for reading offloaded records: `slots` of them, each for up to `neurons` records.

    packed_bytes: bytes of the memory in which one slot's records are packed before they are multiplied.
    """

    neurons: int
    slot_bytes: int
    slots: int
    packed_bytes: int

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.slots + self.packed_bytes


def interleaved_bytes(rows: int, cols: int, stored: RowFormat) -> int:
    """Bytes of a matrix (rows, cols) in the kernels' packing: 16 rows side by side, with codes, scales and
    biases for every 64 columns.
    """
    return padded(rows, INTERLEAVED_ROWS) * RowLayout(cols, *stored).nbytes


def segment_shape(
    config: ModelConfig, quant: QuantConfig, block_bytes: int = 0, aim_bytes: int = SEGMENT_BYTES
) -> SegmentShape:
    """The division of feed-forwards into segments of about `aim_bytes`, or an eighth of the widest layer if
    that is less. Sized so that little memory is wasted.

    Feed-forwards in slices have one segment per slice.

    Args:
        config: The model's shape.
        quant: How its weights are quantized.
        block_bytes: Size of 64 neurons in memory; 0 for the kernels' packing.
        aim_bytes: Target size of a segment.
    """
    if config.is_sliced:
        layouts = [layout for layout in neuron_layouts(config, quant) if isinstance(layout, SliceLayout)]
        return SegmentShape(
            slice_neurons(config, quant),
            record_counts(config, quant),
            layer_bytes=tuple(padded(layout.tiles.stride, PAGE_BYTES) for layout in layouts),
            high_bytes=tuple(layout.partial_bytes for layout in layouts),
        )
    unit = block_bytes or _block_bytes(config, quant)
    return _segments(config.widths, unit, aim_bytes, config.model_widths)


def matrix_shape(config: ModelConfig, quant: QuantConfig) -> MatrixShape | None:
    """The units of the matrices that every token uses, and pieces near 512 KiB, or half the largest unit if
    that is less.

    None if reading them would take as much memory as holding them.
    """
    units = matrix_units(config, quant)
    sizes = tuple(sum(matrix.nbytes for linear in unit for matrix in linear) for unit in units)
    shared = Counter[tuple[TiledMatrix, ...]]()
    for unit in units:
        shared |= Counter(unit)
    piece = max(MATRIX_PIECE_BYTES // 4, min(MATRIX_PIECE_BYTES, max(sizes, default=0) // 2))
    tile = max((matrix.tile_bytes for unit in units for linear in unit for matrix in linear), default=0)
    # A read is widened to blocks with a checksum, or to records, and to pages, on both sides.
    widened = max(RESIDENT_BLOCK_BYTES, padded(tile, PAGE_BYTES)) + PAGE_BYTES
    slot = padded(max(piece, tile), PAGE_BYTES) + 2 * widened
    memory = sum(count * sum(matrix.nbytes for matrix in linear) for linear, count in shared.items())
    drafting = config.num_layers + draft_head_units(len(units) - config.num_layers)
    shape = MatrixShape(sizes, drafting, piece, slot, memory)
    return shape if shape.streaming_bytes < shape.total_bytes else None


def dense_shape(config: ModelConfig, quant: QuantConfig) -> SegmentShape | None:
    """Segments for the neurons that belong to no expert, in a model with experts. None if there are no such
    neurons.
    """
    widths = tuple(map(config.dense_neurons, config.layers))
    if config.experts is None or not any(widths):
        return None
    return _segments(widths, _block_bytes(config, quant), SEGMENT_BYTES, widths)


def _segments(widths: Sequence[int], unit: int, aim_bytes: int, model_widths: Sequence[int]) -> SegmentShape:
    """The `segment_shape` of layers with `widths` neurons.

    The segments' size follows from all of the model's layers, also in a part of a model, as some backends sum
    neurons segment by segment.

    Args:
        widths: neurons of each layer.
        unit: bytes of 64 of them.
        aim_bytes: target size of a segment.
        model_widths: neurons of each of the model's layers.
    """
    units = [-(-neurons // GROUP_SIZE) for neurons in model_widths]
    aim = max(1, min(aim_bytes // unit, max(units) // SEGMENTS_PER_SMALL_LAYER))
    sizes = range(max(1, (aim + 1) // 2), 2 * aim + 1)
    size = min(sizes, key=lambda size: (sum(padded(count, size) for count in units), abs(size - aim), size))
    return SegmentShape(
        neurons=size * GROUP_SIZE,
        per_layer=tuple(-(-neurons // (size * GROUP_SIZE)) for neurons in widths),
        layer_bytes=(padded(size * unit, PAGE_BYTES),) * len(widths),
        high_bytes=(0,) * len(widths),
    )


def slot_shape(config: ModelConfig, quant: QuantConfig, full_records: bool) -> SlotShape:
    """Slots for single neurons, in segments near 8 MiB, or a sixteenth of all neurons if that is less.

    full_records: whether slots hold full records, or records without gate rows.
    """
    layout = record_layout(config, quant)
    slot_bytes = layout.stride if full_records else layout.part_bytes[1]
    neurons = config.num_neurons
    # Two batches of a layer, what was prefetched for it, and what is being prefetched for the next layer.
    reserve = 2 * fetch_neurons(config) + 2 * prefetch_neurons(config)
    slots = max(GROUP_SIZE, min(SEGMENT_BYTES // slot_bytes, -(-neurons // 16)))
    return SlotShape(slots, slot_bytes, reserve, -(-(neurons + reserve) // slots))


def expert_shape(config: ModelConfig, quant: QuantConfig, experts: ExpertsSpec) -> SlotShape:
    """Slots for experts, in segments near 8 MiB, or a sixteenth of all experts if that is less.

    The reserve has room for one token's experts in one layer.
    """
    nbytes = expert_bytes(config, quant)
    # An expert has its offset in a page as on flash, so it may touch one page more, unless it and the neurons
    # before it are whole pages.
    sizes = {nbytes}
    if experts.layout == "neurons":
        stride = record_layout(config, quant).stride
        sizes |= {config.dense_neurons(it) * stride for it in config.layers if it.experts is not None}
    in_pages = all(size % PAGE_BYTES == 0 for size in sizes)
    slot_bytes = nbytes if in_pages else padded(nbytes, PAGE_BYTES) + PAGE_BYTES
    count = experts.count * sum(layer.experts is not None for layer in config.layers)
    slots = max(1, min(SEGMENT_BYTES // slot_bytes, -(-count // 16)))
    return SlotShape(slots, slot_bytes, experts.chosen, -(-(count + experts.chosen) // slots))


def dense_bytes(config: ModelConfig, quant: QuantConfig) -> int:
    """Bytes of the packed neurons that belong to no expert, in a model with experts, if they stay in
    memory.
    """
    blocks = sum(-(-config.dense_neurons(layer) // GROUP_SIZE) for layer in config.layers)
    return blocks * _block_bytes(config, quant)


def fetch_neurons(config: ModelConfig) -> int:
    """Most neurons that are read and multiplied at a time, in whole blocks of 64."""
    return min(FETCH_NEURONS, padded(-(-config.widest // 4), GROUP_SIZE))


def prefetch_neurons(config: ModelConfig) -> int:
    """Most neurons of a layer that are prefetched: more than most devices read while a layer is computed.

    Reads that haven't begun when the layer is computed are cancelled, so how far it gets depends on the
    device.
    """
    return fetch_neurons(config) // 2


def fetch_shape(slot_bytes: int) -> BufferShape:
    """Buffers for records that are read one by one: one for each read in flight, and one for the caller."""
    buffers = FETCH_DEPTH + FETCH_ENDED + 1
    return BufferShape(0, max(FETCH_STAGING_BYTES, padded(slot_bytes, PAGE_BYTES) + PAGE_BYTES), buffers, 0)


def buffer_shape(
    config: ModelConfig, quant: QuantConfig, widths: Sequence[int] = (), most: int = 0
) -> BufferShape:
    """Read buffers for feed-forwards. A read is near 2 MiB, or a quarter of the widest layer if that is less,
    in full blocks of 64 records.

    Slices are read one by one, and multiplied in the buffer.

    widths: neurons of each layer that are read; by default all. most: most records of a read, in whole
    blocks; 0: no limit.
    """
    widths = widths or config.widths
    if config.is_sliced:
        layouts = neuron_layouts(config, quant)
        share = (
            sum(layout.nbytes(width) for layout, width in zip(layouts, widths, strict=True)) // STREAM_SHARE
        )
        stride = max(layout.stride for layout in layouts)
        slots = min(SLICE_SLOTS, max(2, share // stride))
        return BufferShape(slice_neurons(config, quant), stride, slots, 0)
    stride = record_layout(config, quant).stride
    blocks = -(-max(widths) // GROUP_SIZE)
    size = min(STREAM_SLOT_BYTES // (stride * GROUP_SIZE), -(-blocks // 4))
    size = max(1, min(size, most // GROUP_SIZE) if most else size)
    # A read is widened to page boundaries on both sides.
    slot_bytes = padded(size * GROUP_SIZE * stride, PAGE_BYTES) + PAGE_BYTES
    share = sum(widths) * stride // STREAM_SHARE
    return BufferShape(
        neurons=size * GROUP_SIZE,
        slot_bytes=slot_bytes,
        slots=min(STREAM_SLOTS, max(2, share // slot_bytes)),
        packed_bytes=padded(size * _block_bytes(config, quant), PAGE_BYTES),
    )


def context_tokens(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """Tokens that a session may hold. Raises UsageError for a `max_context` beyond the model's.

    The default is at most the length up to which rotary frequencies are the original ones, so that a smaller
    budget changes no text.
    """
    if runtime.max_context < 0 or runtime.max_context > config.max_context:
        raise UsageError(
            f"--max-context {runtime.max_context} is not between 0 (automatic) and the model's own "
            f"limit of {config.max_context} tokens"
        )
    return runtime.max_context or min(config.original_context, DEFAULT_MAX_CONTEXT)


def prompt_chunk(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """Tokens of a prompt that go through the model together."""
    return runtime.prefill_chunk or (PREFILL_CHUNK if config.experts is None else EXPERTS_CHUNK)


def widest_pass(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """Most tokens that go through the model together."""
    return max(min(prompt_chunk(config, runtime), context_tokens(config, runtime)), runtime.parallel)


def draft_nodes(runtime: RuntimeConfig) -> int:
    """The most nodes of a draft, including its root. Never more than a chunk of a prompt."""
    return min(DRAFT_NODES, runtime.prefill_chunk or PREFILL_CHUNK)


def logits_rows(config: ModelConfig) -> int:
    """Number of tokens whose logits are computed at once, if logits of all tokens are wanted."""
    return max(1, LOGITS_BYTES // (4 * config.vocab_size))


def stream_bytes(config: ModelConfig, streams: MultiStreams) -> int:
    """Bytes of multi-stream attention's packed adapters, and of its embeddings."""
    matrices = streams.matrices(config).values()
    packed = sum(interleaved_bytes(rows, cols, RowFormat(streams.bits)) for rows, cols in matrices)
    return packed + 4 * streams.streams * config.hidden_size * streams.begins


def _block_bytes(config: ModelConfig, quant: QuantConfig) -> int:
    """Bytes of 64 neurons packed for the kernels: gate, up and down rows, or without up rows."""
    rows = record_layout(config, quant).rows
    return sum(interleaved_bytes(GROUP_SIZE, config.hidden_size, row.stored) for row in rows)
