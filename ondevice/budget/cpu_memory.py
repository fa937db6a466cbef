"""A model's memory under the cpu backend. All sizes are bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.recurrent import AHEAD_TOKENS
from ondevice.backends.stored_rows import tokens_at_once
from ondevice.budget.memory_model import MemoryModel, input_bytes, input_form
from ondevice.budget.sizes import (
    SAMPLING_BYTES,
    BufferShape,
    MatrixShape,
    SegmentShape,
    SlotShape,
    buffer_shape,
    dense_shape,
    expert_shape,
    logits_rows,
    matrix_shape,
    segment_shape,
)
from ondevice.bundle.layout import (
    SliceLayout,
    embedding_layout,
    neuron_layouts,
    projection_matrices,
)
from ondevice.bundle.matrix_layout import padded
from ondevice.config import GROUP_SIZE
from ondevice.records import dataclass

HIDDEN_BYTES = 2 << 20
"""Hidden activations of feed-forward segments that are multiplied together."""
STATE_TOKENS = 64
"""Tokens that a delta rule, or a mixer, computes together (kStateTokens in recurrence.h)."""
STATE_COLUMNS = 64
"""Columns of a state that it computes together (kStateColumns)."""
TILES_JOINED = 2
"""Tiles of 16 rows that a thread joins at a time (kTogether in expert.cc)."""
QUERY_ROWS = 32
"""Query rows that share one walk over the keys."""


@dataclass(frozen=True)
class CpuMemory(MemoryModel):
    """Memory of the native kernels: packed weights, segments of packed neurons, slots of records."""

    @property
    def kv(self) -> KVLayout:
        # A second model's text follows the target's, to wherever that goes back.
        return super().kv if self.drafts_itself else replace(super().kv, pass_tokens=self.pass_tokens)

    @property
    def segment(self) -> SegmentShape | SlotShape:
        if self.config.experts is not None:
            return expert_shape(self.config, self.quant, self.config.experts)
        return self._slots if self.selects_neurons else segment_shape(self.config, self.quant)

    @property
    def looks_up_head(self) -> bool:
        return self.config.tie_embeddings and self.config.part.embeds and self.config.part.heads

    @property
    def dense(self) -> SegmentShape | None:
        return dense_shape(self.config, self.quant)

    @cached_property
    def matrices(self) -> MatrixShape | None:
        shape = None if self.drafts_itself else matrix_shape(self.config, self.quant)
        if shape is None or not self.looks_up_head:
            return shape
        # Rows of tokens are read while the head is.
        return replace(shape, shared_bytes=shape.shared_bytes + self._table_bytes)

    @property
    def buffers(self) -> BufferShape:
        dense = self.dense
        if dense is not None:
            widths = tuple(map(self.config.dense_neurons, self.config.layers))
            return buffer_shape(self.config, self.quant, widths, dense.neurons)
        if self.config.experts is not None:
            # Experts are read straight into their slots.
            return BufferShape(GROUP_SIZE, 0, 0, 0)
        return self._fetch if self.selects_neurons else buffer_shape(self.config, self.quant)

    @property
    def _logit_bytes(self) -> int:
        # The caller gets the head's output.
        return 4

    def activation_bytes(self, tokens: int) -> int:
        # The heap keeps about a quarter more than is in use.
        kernels = self._kernel_bytes(tokens) * 5 // 4
        more = 4 * tokens * self._extra_floats + self._expert_outputs_bytes(tokens)
        return kernels + more + self._selecting_bytes(tokens)

    @property
    def _neurons_at_once(self) -> int:
        """The most neurons whose hidden values exist at the same time: those of a segment, or of
        an expert.
        """
        experts = self.config.experts
        if experts is None:
            return segment_shape(self.config, self.quant).neurons
        dense = self.dense
        neurons = max(map(self.config.dense_neurons, self.config.layers)) if dense is None else dense.neurons
        return padded(max(experts.neurons, neurons), GROUP_SIZE)

    @property
    def _more_inputs_bytes(self) -> int:
        """Bytes of a projection's input in additional forms, needed if the projection's parts take different
        forms.
        """
        config, most = self.config, 0
        for layer in range(config.num_layers):
            parts = projection_matrices(config, self.quant, layer).values()
            forms = {input_form(part.row.stored): part.row.stored for part in parts}
            _, *more = sorted(input_bytes(config.hidden_size, stored) for stored in forms.values())
            most = max(most, sum(more))
        return most

    @property
    def _lookup_bytes(self) -> int:
        """Bytes of the tiles that one look-up of tokens holds in memory."""
        return self._table_bytes if self.config.part.embeds and not self.looks_up_head else 0

    @property
    def _table_bytes(self) -> int:
        layout = embedding_layout(self.config, self.quant)
        return min(self.pass_tokens, tokens_at_once(layout)) * layout.stride

    def _kernel_bytes(self, tokens: int) -> int:
        """Activations, attention scores, hidden values and logits of a dense forward pass.

        Shared streams have adapters for every token, with or without drafts. The sum is convex in `tokens`:
        between two widths it is at most the value of the straight line through both.
        """
        config, streams = self.config, self.streams
        hidden, vocab = padded(config.hidden_size, GROUP_SIZE), config.logits_size
        # Embedding rows, residual; projections, attention, rotary tables.
        floats = 2 * hidden + config.qkv_size + config.attended_size
        # A feed-forward and its lanes, unless all neurons are those of experts that are matrices.
        floats += (hidden + hidden // 4) * any(config.records)
        # The output of a block before its norm, and what parallel blocks read.
        floats += hidden * config.any_layer(lambda layer: layer.norms_output)
        floats += hidden * config.any_layer(lambda layer: layer.parallel)
        floats += config.head_width * (len(config.ropes) - 1)
        # What attention gives, multiplied by a factor.
        floats += config.attended_size * config.any_layer(lambda layer: layer.attention.out_factor != 1.0)
        # Embedding rows wider than a layer's, with the padding that they are read with.
        floats += 2 * max(0, padded(config.embedding_size, GROUP_SIZE) - hidden)
        # Gates and ups of 16 neurons in each thread, of 32 in matrices of experts and slices.
        products = (4 if config.expert_layers or config.is_sliced else 2) * 64 * self._threads
        per_token = 4 * floats + 64 * config.head_width + products
        per_token += input_bytes(self._widest_input, self.widest_format) + self._more_inputs_bytes
        if streams is not None and streams.mode == "shared":
            per_token += self._adapted_row_bytes(streams)
        rows = max(QUERY_ROWS, config.queries_per_key)
        keys = padded(self.max_context, GROUP_SIZE) + 2 * padded(config.head_width, 16)
        # States along the branches of a draft tree.
        branches = (AHEAD_TOKENS - 1) * STATE_COLUMNS if self.kv.drafts else 0
        deltas = [(it.delta.token_floats, it.delta.key_width) for it in config.layers if it.delta is not None]
        deltas += [
            (it.mamba2.token_floats, it.mamba2.state_width) for it in config.layers if it.mamba2 is not None
        ]
        delta = [STATE_TOKENS * of_token + branches * height for of_token, height in deltas]
        scratch = max(rows * keys, *delta, 0)
        scores = self._threads * 4 * scratch
        neurons = min(self._neurons_at_once, padded(config.widest, GROUP_SIZE))
        hidden_values = max(HIDDEN_BYTES, 4 * tokens * neurons)
        if config.is_sliced:
            # Inputs of down matrices have separate memory.
            groups = hidden_values // 4 // GROUP_SIZE
            formats = {self.quant.of("down", layer) for layer in range(self.config.num_layers)}
            hidden_values += groups * max(input_bytes(GROUP_SIZE, stored) for stored in formats)
            # Tiles that each thread joins from two planes.
            layouts = [it for it in neuron_layouts(config, self.quant) if isinstance(it, SliceLayout)]
            tiles = (matrix.tile_bytes for layout in layouts for matrix in layout.tiles.matrices)
            hidden_values += self._threads * TILES_JOINED * max(tiles)
        # Every token's logit, and where a text is sampled its score, id and chance of eight bytes each.
        sampling = SAMPLING_BYTES * vocab
        # The logits of several tokens, and those before them, which the caller still holds.
        scoring = 2 * 4 * vocab * min(self.pass_tokens, logits_rows(config))
        return tokens * per_token + max(sampling, scoring) + scores + hidden_values + self._lookup_bytes
