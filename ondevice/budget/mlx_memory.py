"""A model's memory under the MLX backend. All sizes are bytes."""

from __future__ import annotations

from dataclasses import replace

from ondevice.backends.expert_records import ROWS_AT_ONCE, rows_layout
from ondevice.backends.kv_layout import BLOCK_TOKENS
from ondevice.backends.recurrent import RULE_TOKENS
from ondevice.budget.memory_model import MemoryModel
from ondevice.budget.sizes import (
    SAMPLING_BYTES,
    BufferShape,
    SegmentShape,
    SlotShape,
    expert_shape,
    fetch_neurons,
    logits_rows,
    segment_shape,
)
from ondevice.bundle.layout import (
    ExpertLayout,
    SliceLayout,
    expert_bytes,
    largest_expert_layout,
    neuron_layouts,
    record_layout,
)
from ondevice.bundle.matrix_layout import RowLayout, padded
from ondevice.bundle.tiles import rows_format
from ondevice.config import GROUP_SIZE, RowFormat
from ondevice.records import dataclass
from ondevice.speculation.registry import runs_streams
from ondevice.units import PAGE_BYTES

MLX_CACHE_BYTES = 16 << 20
"""Most bytes of freed arrays that MLX keeps for the next ones."""
MLX_SEGMENT_BYTES = 16 << 20
"""Target size of a segment: larger than the kernels', as each takes a launch."""
MLX_STAGES = 2
"""Stages in which gathered neurons are multiplied (`backends/mlx.py`)."""
MLX_READ_SLOTS = 4
"""Segments of records at once: two that are multiplied, two that are read from flash."""
MLX_PIECES = 2
"""Segments from flash that MLX unpacks at once, while it multiplies."""
SETTLED_COPIES = 3
"""Most copies of a slice's bytes that exist while its tiles become rows."""
LAYERS_READ = 2
"""Layers whose keys and values are read back at once: MLX begins a layer before the last one ends."""
MLX_LIBRARY_BYTES = 14 << 20
"""Code of MLX and its BLAS that is mapped once passes have run, not when the process is measured.

It is 5 to 17 MB on Linux, by the sizes of the page cache's folios. The plan's allowance for the process has
the rest."""
CUDA_LIBRARY_BYTES = 192 << 20
"""Code and host memory of CUDA and its libraries once passes have run: 120 to 190 MB on an H100.

The 3 GB that MLX takes while it compiles a kernel aren't in the plan."""


@dataclass(frozen=True)
class MlxMemory(MemoryModel):
    """A model's memory under MLX: the bundle's codes as they are, and scales, biases and 16-bit values in the
    operands' type.

    operand_bytes: bytes of a matrix operand, 4 or 2. cuda: whether MLX computes on a CUDA GPU: flash is then
    read into plain memory, and multiplied parts are copied into arrays.
    """

    operand_bytes: int = 4
    cuda: bool = False

    @property
    def library_bytes(self) -> int:
        return CUDA_LIBRARY_BYTES if self.cuda else MLX_LIBRARY_BYTES

    @property
    def ranges(self) -> SegmentShape:
        """The ranges of neurons that are summed separately, in every sparsity mode."""
        if self.config.is_sliced:
            shape = segment_shape(self.config, self.quant)
            layer_bytes = tuple(padded(it, PAGE_BYTES) for it in self._slice_bytes)
            return replace(shape, layer_bytes=layer_bytes, high_bytes=(0,) * len(layer_bytes))
        block = self._neurons_bytes(GROUP_SIZE)
        return segment_shape(self.config, self.quant, block, MLX_SEGMENT_BYTES)

    @property
    def stage_neurons(self) -> int:
        """Neurons of one stage: those that a token selects in a layer, each range in full blocks, but at
        least a segment.
        """
        ranges = self.ranges
        selected = padded(fetch_neurons(self.config), GROUP_SIZE) + max(ranges.per_layer) * GROUP_SIZE
        return max(ranges.neurons, selected)

    @property
    def segment(self) -> SegmentShape | SlotShape:
        experts, layout = self.config.experts, largest_expert_layout(self.config, self.quant)
        if experts is not None and layout is not None:
            # A slot has room for an expert as layers hold it, and for its rows.
            settled = rows_layout(layout)
            held = sum(
                held_bytes(it.rows * it.row.padded_cols, it.row.stored, self.operand_bytes)
                + 4 * it.rows * it.has_bias
                for it in settled.matrices
            )
            shape = expert_shape(self.config, self.quant, experts)
            # MLX's memory begins anywhere, that of slots on a page.
            room = max(shape.slot_bytes, padded(held, PAGE_BYTES), settled.stride)
            return replace(shape, slot_bytes=room + PAGE_BYTES)
        if experts is not None:
            shape = expert_shape(self.config, self.quant, experts)
            return replace(shape, slot_bytes=shape.slot_bytes + PAGE_BYTES)
        return self._slots if self.selects_neurons else self.ranges

    @property
    def buffers(self) -> BufferShape:
        """Read buffers. In dense mode a piece is one segment, so that sums don't depend on what is
        in memory.
        """
        if self.config.experts is not None:
            # Experts are read straight into their slots, and brought into rows there.
            copied = MLX_PIECES if self.cuda else 0
            nbytes, values = expert_bytes(self.config, self.quant), 0
            experts = largest_expert_layout(self.config, self.quant)
            if experts is not None and (settled := rows_layout(experts)) != experts:
                # Values are made of one matrix at a time: its codes, twice, and three arrays of floats.
                nbytes = max(nbytes, settled.stride)
                values = max(14 * it.padded_rows * it.row.padded_cols for it in experts.matrices)
            return BufferShape(GROUP_SIZE, 0, 0, (4 + copied) * nbytes + values)
        if self.selects_neurons:
            layout = record_layout(self.config, self.quant)
            stage = MLX_STAGES * layout.nbytes(self.stage_neurons)
            return replace(self._fetch, packed_bytes=stage + self._neurons_bytes(self.stage_neurons))
        neurons = self.ranges.neurons
        if self.config.is_sliced:
            nbytes, copies = self._piece_of_slices
        else:
            nbytes, copies = record_layout(self.config, self.quant).nbytes(neurons), 0
        taken_apart = self._neurons_bytes(neurons) + (nbytes if self.cuda else 0)
        return BufferShape(
            neurons=neurons,
            slot_bytes=padded(nbytes, PAGE_BYTES) + PAGE_BYTES,
            slots=MLX_READ_SLOTS,
            packed_bytes=PAGE_BYTES + MLX_PIECES * taken_apart + copies,
        )

    @property
    def _piece_of_slices(self) -> tuple[int, int]:
        """Bytes of the largest slice as rows, and of the temporary arrays that exist while its tiles become
        rows.

        The temporary arrays are copies of the slice's matrices, and three arrays of floats for a matrix that
        becomes float16 values.
        """
        on_flash = (max(it.stride, it.tiles.stride) for it in self._slice_layouts)
        nbytes = max(*on_flash, *(it.stride for it in self._slices_in_rows))
        matrices = {matrix for it in self._slices_in_rows for matrix in it.matrices if matrix.row.bits == 16}
        values = max((14 * it.padded_rows * it.row.padded_cols for it in matrices), default=0)
        return nbytes, SETTLED_COPIES * nbytes + values

    @property
    def weights_bytes(self) -> int:
        config = self.config
        hidden, gated = padded(config.hidden_size, GROUP_SIZE), self.runtime.sparsity == "exact"
        quant, more = self.quant, 0
        for matrix in self._matrices:
            more += self._wider_bytes(matrix.rows * matrix.row.padded_cols, matrix.row.stored)
        for layer in config.layers:
            if gated or layer.feed_forward.cutoff is not None:
                more += self._wider_bytes(config.neurons(layer) * hidden, quant.of("feed_forward"))
            if config.experts is not None:
                dense = padded(config.dense_neurons(layer), GROUP_SIZE) * hidden
                for row in record_layout(config, quant).rows:
                    more += self._wider_bytes(dense, row.stored)
        if self._used_predictors is not None:
            sizes = zip(self._used_predictors.ranks, config.widths, strict=True)
            low = sum(padded(rank, GROUP_SIZE) * (hidden + neurons) for rank, neurons in sizes)
            more += self._wider_bytes(low, RowFormat(self._used_predictors.bits))
        return super().weights_bytes + more

    @property
    def draft_bytes(self) -> int:
        streams = self.streams
        if streams is None or not runs_streams(self.runtime.speculation, streams):
            return super().draft_bytes
        matrices = streams.matrices(self.config).values()
        elements = sum(rows * padded(cols, GROUP_SIZE) for rows, cols in matrices)
        return super().draft_bytes + self._wider_bytes(elements, RowFormat(streams.bits))

    def activation_bytes(self, tokens: int) -> int:
        """Bytes of a layer's activations before MLX frees them, with all of attention's scores and masks."""
        config, context = self.config, self.max_context
        neurons = max(fetch_neurons(config), config.widest)
        if config.experts is not None:
            neurons = max(map(config.dense_neurons, config.layers))
        per_token = 8 * config.hidden_size + 3 * config.qkv_size + 4 * config.query_size + 4 * neurons
        per_token += 2 * self._extra_floats
        scores = (config.num_heads + 1) * context
        capped = 0
        if config.any_layer(lambda layer: layer.attention.soft_cap > 0):
            # Scores before, in and after the cap; keys and values in float32, once for each query head.
            scores *= 3
            capped = 2 * 4 * context * config.query_size
        rows = min(self.pass_tokens, logits_rows(config))
        logits = max(SAMPLING_BYTES, 3 * 4 * rows) * config.logits_size
        computed = 4 * tokens * (per_token + scores) + self._stored_bytes + logits + MLX_CACHE_BYTES + capped
        computed += self._recurrent_bytes(tokens)
        return computed + self._selecting_bytes(tokens) + self._mixture_bytes(tokens)

    def _recurrent_bytes(self, tokens: int) -> int:
        """Bytes of what a recurrent layer computes from its projection, and of the states of a run
        of tokens.
        """
        most = 0
        for layer in self.config.layers:
            floats, state = 0, 0
            if layer.conv is not None:
                floats = 5 * layer.conv.channels
            elif layer.mamba2 is not None:
                floats = 3 * layer.mamba2.channels
                state = layer.mamba2.value_size * layer.mamba2.state_width
            elif layer.delta is not None:
                heads, width = layer.delta.value_heads, layer.delta.key_width + layer.delta.value_width
                floats = 2 * (layer.delta.channels + heads * width)
                state = layer.delta.value_size * layer.delta.key_width
            # The state decayed, changed by a token, and its change, of two runs of tokens: all exist if the
            # host is far ahead of the device. MLX's CPU device takes a third.
            most = max(most, tokens * floats + 6 * min(tokens, RULE_TOKENS) * state)
        return 4 * most

    def _mixture_bytes(self, tokens: int) -> int:
        """Bytes of the inputs, gates, ups and outputs of a layer's experts, and of the router's values."""
        experts = self.config.experts
        if experts is None:
            return 0
        hidden, neurons = (padded(size, GROUP_SIZE) for size in (self.config.hidden_size, experts.neurons))
        # Either all experts of a few tokens, or one expert while the next one begins.
        rows = max(min(tokens, ROWS_AT_ONCE) * experts.chosen, 2 * tokens)
        # A slot's rows of neurons aren't contiguous, so their matrices are copied, for two experts.
        copied = 0 if self.config.expert_layers else 2 * self._neurons_bytes(experts.neurons)
        return copied + 4 * (rows * (3 * hidden + 4 * neurons) + tokens * (3 * hidden + 24 * experts.count))

    @property
    def _stored_bytes(self) -> int:
        """Bytes of copies of a full context's keys and values, in addition to the stored ones
        (`backends/mlx_kv.py`).

        A layer's keys and values exist twice while they grow, and are copied if they aren't stored in the
        operands' type. Both happen layer by layer, while the next layer begins.
        """
        layout, context = self.kv, self.max_context
        grown = max(map(layout.layer_bytes, range(len(layout.heads)))) * context // BLOCK_TOKENS
        copied = 2 * self.operand_bytes * self.config.kv_size * context
        if self.runtime.kv_bits == 8 * self.operand_bytes:
            copied = 0
        return LAYERS_READ * max(grown, copied)

    def _neurons_bytes(self, neurons: int) -> int:
        if self.config.is_sliced:
            return max(self._slice_bytes)
        row, rows = padded(self.config.hidden_size, GROUP_SIZE), record_layout(self.config, self.quant).rows
        return sum(held_bytes(neurons * row, it.stored, self.operand_bytes) for it in rows)

    @property
    def _slice_layouts(self) -> list[SliceLayout]:
        """The record of a slice of each layer."""
        return [it for it in neuron_layouts(self.config, self.quant) if isinstance(it, SliceLayout)]

    @property
    def _slices_in_rows(self) -> list[ExpertLayout]:
        """The layouts of `_slice_layouts` after planes are joined and matrices are turned into rows."""
        return [rows_layout(layout.tiles) for layout in self._slice_layouts]

    @property
    def _slice_bytes(self) -> list[int]:
        """For each layer, the bytes of a slice in the form in which it is multiplied."""
        return [
            sum(
                held_bytes(it.rows * it.row.padded_cols, it.row.stored, self.operand_bytes)
                for it in layout.matrices
            )
            for layout in self._slices_in_rows
        ]

    def _wider_bytes(self, elements: int, stored: RowFormat) -> int:
        """Bytes that MLX needs in addition to the stored matrices: for operands wider than float16, implied
        biases, and formats that it can't multiply as they are stored.
        """
        if stored.tiles_only:
            held = held_bytes(elements, rows_format(stored), self.operand_bytes)
            return held - RowLayout(elements, *stored).nbytes
        more = held_bytes(elements, stored, self.operand_bytes) - held_bytes(elements, stored, 2)
        return more + stored.implied_bias * (elements // stored.group_size * 2)


def held_bytes(elements: int, stored: RowFormat, operand_bytes: int) -> int:
    """Bytes of matrices with `elements` elements in MLX's memory. Their rows are full groups."""
    if stored.bits == 16:
        return elements * operand_bytes
    scale_bytes = 1 if stored.mxfp4 else 2 * operand_bytes  # or of a scale and a bias
    return elements * stored.bits // 8 + elements // stored.group_size * scale_bytes
