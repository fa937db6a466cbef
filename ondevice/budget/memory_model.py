"""A model's memory, part by part: the sizes and shapes that a plan adds up and divides.

`MemoryModel` is the common part of the backends' classes: `CpuMemory`, `MlxMemory`, `ReferenceMemory`. They
are pure functions of the model's shape and the options. All sizes are bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

from ondevice.backends.expert_records import HELD_ROWS
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.backends.recurrent import MARKS
from ondevice.budget.sizes import (
    BufferShape,
    MatrixShape,
    SegmentShape,
    SlotShape,
    context_tokens,
    dense_bytes,
    draft_nodes,
    fetch_shape,
    interleaved_bytes,
    slot_shape,
    stream_bytes,
    widest_pass,
)
from ondevice.bundle.draft_layers import EAGLE_TAPS, MAX_BLOCK_TAPS
from ondevice.bundle.file_layouts import resident_matrices
from ondevice.bundle.layout import (
    RESIDENT_BLOCK_BYTES,
    embedding_layout,
    embedding_tiles,
    neuron_layout,
    per_layer_layout,
    record_counts,
)
from ondevice.bundle.matrix_layout import TiledMatrix, padded
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.streams import MultiStreams
from ondevice.bundle.weight_shapes import extra_matrices, vectors_size
from ondevice.config import GROUP_SIZE, QuantConfig, RowFormat, RuntimeConfig
from ondevice.model.rope import AHEAD
from ondevice.model_config import FULL_MODEL, ModelConfig
from ondevice.records import dataclass
from ondevice.sparsity.expert_reuse import history_bytes
from ondevice.speculation.registry import drafter_bytes, drafts_with_streams, is_drafter, runs_streams
from ondevice.speculation.tree import LOGITS_AHEAD, STREAM_ROWS

NEURON_TABLE_BYTES = 52
"""Bytes of tables per neuron: its slot and scores, its slot's address, owner and place among the free ones,
and the temporary arrays that divide slots among layers."""
PROMPT_CACHE_BYTES = 4 << 20
"""Staging buffers and stacks of the threads that read the prompt cache, and its files' headers."""
MESSAGES = 6
"""Copies of a pass's message to another machine: as received, in the backend, packed, two that wait, and the
one that is sent."""
_TAPS = {"eagle": EAGLE_TAPS, "dflash": MAX_BLOCK_TAPS, "mtp": 1, "auto": EAGLE_TAPS}
"""Most hidden states of a token in a message, by `--speculation`."""
WAITED_MESSAGES = 4
"""Copies of the message of a pass that rank 0 waits for: no other pass runs."""
MESSAGE_HEADER_BYTES = 64 << 10
"""Most bytes of a message's header in practice, its text and its parsed form."""


@dataclass(frozen=True)
class MemoryModel(ABC):
    """A model's memory under one backend and one set of options.

    runtime: resolved. A mode `predicted` without `predictors` counts as dense. draft_model_bytes: memory of a
    second model that drafts, with a full context. datastore_bytes: memory of an open datastore of
    continuations. draft_layer_bytes: memory of a draft layer, with a full context. drafts_itself: whether
    this model is itself the second model that drafts.
    """

    config: ModelConfig
    quant: QuantConfig
    runtime: RuntimeConfig
    predictors: Predictors | None = None
    streams: MultiStreams | None = None
    draft_model_bytes: int = 0
    datastore_bytes: int = 0
    draft_layer_bytes: int = 0
    drafts_itself: bool = False

    @property
    @abstractmethod
    def segment(self) -> SegmentShape | SlotShape:
        """The pieces of feed-forward memory: ranges of neurons in dense mode, else slots of neurons."""

    @property
    def dense(self) -> SegmentShape | None:
        """Memory pieces for neurons that belong to no expert; None if these never come from flash."""
        return None

    @property
    def matrices(self) -> MatrixShape | None:
        """The units of the matrices that every token uses; None if these never come from flash."""
        return None

    @property
    @abstractmethod
    def buffers(self) -> BufferShape:
        """Buffers for feed-forward weights that come from flash."""

    @abstractmethod
    def activation_bytes(self, tokens: int) -> int:
        """Scratch memory of a forward pass over `tokens` tokens. A row of streams counts as a token."""

    @property
    def library_bytes(self) -> int:
        """Bytes of the backend's library code, which the system maps when a pass first runs it."""
        return 0

    @property
    def prompt_cache_bytes(self) -> int:
        """Buffers through which the prompt cache is read; 0 without one."""
        return PROMPT_CACHE_BYTES if self.runtime.prompt_cache else 0

    @cached_property
    def max_context(self) -> int:
        """Tokens that a session may hold. Raises UsageError for more than the model was made for."""
        return context_tokens(self.config, self.runtime)

    @cached_property
    def pass_tokens(self) -> int:
        """Tokens of the widest forward pass."""
        return widest_pass(self.config, self.runtime)

    @property
    def stream_rows(self) -> int:
        """Most rows of streams that a decoding pass has, in addition to its tokens."""
        return STREAM_ROWS if drafts_with_streams(self.runtime.speculation, self.streams) else 0

    @property
    def widest_format(self) -> RowFormat:
        """The matrix format whose inputs take the most memory."""
        stored = [self.quant.plain, *(stored for _, stored in self.quant.formats)]
        return min(stored, key=lambda it: it.group_size)

    @property
    def kv(self) -> KVLayout:
        drafts = self.drafts_itself or is_drafter(self.runtime.speculation)
        # A second model has no prompts.
        return KVLayout(self.config, self.runtime.kv_bits, drafts, 0 if self.drafts_itself else MARKS)

    @property
    def sparsity(self) -> str:
        """The sparsity mode that is planned."""
        if self.config.experts is not None:
            return "experts"
        return self.runtime.sparsity if self.selects_neurons else "dense"

    @property
    def selects_neurons(self) -> bool:
        """True if only some of the neurons are multiplied for a token."""
        return self._holds_gates or self._used_predictors is not None

    @property
    def _holds_gates(self) -> bool:
        """Whether every layer's gate rows stay in memory. The gate rows of experts come with the experts."""
        return self.config.experts is None and self.runtime.sparsity == "exact"

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that every token uses: attention, norms, head, checksum tables, and weights
        that select neurons.

        Matrices count here unless they are in `matrices`. Neurons that belong to no expert count here unless
        they have `dense` pieces.
        """
        selecting = 0
        if self.selects_neurons:
            selecting = self.config.num_neurons * NEURON_TABLE_BYTES
        if self._holds_gates:
            selecting += self._gates_bytes
        if self.config.experts is not None:
            selecting += 0 if self.dense is not None else dense_bytes(self.config, self.quant)
            experts = self.config.experts
            table = experts.count * NEURON_TABLE_BYTES + history_bytes(experts.chosen)
            selecting += self.config.num_layers * table
        streamed = 0 if self.matrices is None else self.matrices.total_bytes
        return self._matrices_bytes - streamed + selecting

    @property
    def looks_up_head(self) -> bool:
        """True if embedding rows are looked up in the output head, whose rows are equal."""
        return False

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding table in memory; 0 in a part without it, and if embeddings are looked up in
        the head.
        """
        if not self.config.part.embeds or self.looks_up_head:
            return 0
        return embedding_tiles(self.config) * embedding_layout(self.config, self.quant).stride

    @property
    def predictor_bytes(self) -> int:
        """Every layer's two predictor matrices, packed, and the biases."""
        predictors = self._used_predictors
        if predictors is None:
            return 0
        hidden, stored = self.config.hidden_size, RowFormat(predictors.bits)
        return sum(
            interleaved_bytes(rank, hidden, stored) + interleaved_bytes(neurons, rank, stored) + 4 * neurons
            for rank, neurons in zip(predictors.ranks, self.config.widths, strict=True)
        )

    @property
    def draft_bytes(self) -> int:
        """Memory of drafting: the drafters' state, adapters, scores that wait until draft tokens are
        accepted, and attention's values along the paths of a draft tree.
        """
        config, runtime = self.config, self.runtime
        nodes = draft_nodes(runtime)
        held = self._adapter_bytes(nodes)
        if not is_drafter(runtime.speculation):
            return held
        drafter = self.draft_model_bytes + self.datastore_bytes + self.draft_layer_bytes
        if config.part.embeds:
            drafter += drafter_bytes(runtime.speculation, config, self.max_context, nodes, runtime.parallel)
        if config.experts is not None:
            held += 2 * (nodes - 1) * config.num_layers * config.experts.count
        elif runtime.sparsity != "dense":
            neurons = config.num_neurons
            if runs_streams(runtime.speculation, self.streams) or runtime.speculation == "resident":
                # Scores of neurons that drafting lacked: the next pass reads them first.
                held += 4 * neurons
            held += 2 * (nodes - 1) * neurons
        # Each thread's values along a path through the tree.
        paths = self._threads * 4 * BLOCK_TOKENS * padded(config.head_width, 16)
        # Logits of the likely path beyond those of plain decoding.
        ahead = self._logit_bytes * config.logits_size * (LOGITS_AHEAD - 1)
        return held + drafter + paths + ahead

    @property
    def _logit_bytes(self) -> int:
        """Bytes of one logit of a token, which exists twice: in the head's output, and in the
        caller's copy.
        """
        return 2 * 4

    def joined_bytes(self, tokens: int) -> int:
        """Scratch memory that a pass over `tokens` tokens of several texts needs in addition to a pass over
        one text.

        It holds the other texts' logits, both from the head and copied; attended values, both copied and
        joined; and rotary tables. Rows of recurrent layers are also copied and joined around a checkpoint.
        """
        others, config = self.runtime.parallel - 1, self.config
        if not others:
            # Of a mixer beside attention, `_extra_floats` has one of the two: the copy of its joined output.
            joined = (
                (1 if it.attends else 2) * it.recurrent.value_size
                for it in config.layers
                if it.recurrent is not None
            )
            return 4 * tokens * max(joined, default=0)
        tables = len(config.ropes) * 2 * 4 * 2 * AHEAD * config.head_width // 2
        return others * (2 * 4 * config.logits_size + tables) + 2 * 4 * config.query_size * self.pass_tokens

    def message_bytes(self, tokens: int) -> int:
        """Bytes of the messages of a pass over `tokens` tokens, if several machines share the model.

        A message holds each token's row after a layer, inputs of later layers, and states for draft layers
        and streams.
        """
        config, speculation = self.config, self.runtime.speculation
        if config.part == FULL_MODEL:
            return 0
        row = config.hidden_size * config.residual_copies
        row += config.per_layer_width * (config.part.layers - config.part.first)
        # Rank 0 alone knows whether `auto` drafts with a layer.
        tapped = _TAPS.get(speculation, 0) * tokens
        if self.streams is not None and drafts_with_streams(speculation, self.streams):
            tapped = max(tapped, draft_nodes(self.runtime) * self.streams.streams)
        waited = WAITED_MESSAGES * (tokens * row + tapped * config.hidden_size)
        return 4 * max(MESSAGES * tokens * row, waited) + MESSAGES * MESSAGE_HEADER_BYTES

    @property
    def _threads(self) -> int:
        return max(1, self.runtime.threads)

    @property
    def _used_predictors(self) -> Predictors | None:
        return self.predictors if self.runtime.sparsity == "predicted" else None

    @property
    def _slots(self) -> SlotShape:
        """Slots for selected neurons. They hold full records if gate rows don't stay in memory."""
        return slot_shape(self.config, self.quant, full_records=self._used_predictors is not None)

    @property
    def _fetch(self) -> BufferShape:
        """The buffers that records of selected neurons are read into."""
        return fetch_shape(self._slots.slot_bytes)

    @cached_property
    def _matrices(self) -> tuple[TiledMatrix, ...]:
        """The matrices that every token uses, without neurons."""
        return resident_matrices(self.config, self.quant)

    @property
    def _matrices_bytes(self) -> int:
        """Bytes of attention, vectors and head, packed, and of the checksums of everything that is read in
        pieces.
        """
        config, quant = self.config, self.quant
        weights = sum(matrix.nbytes for matrix in self._matrices)
        weights += 4 * vectors_size(config) + self._cutoff_bytes
        parts = len(neuron_layout(config, quant, 0).part_bytes)
        checksums = sum(record_counts(config, quant)) * parts
        if config.experts is not None:
            checksums += len(config.expert_layers) * config.experts.count * config.feed_forward.num_rows
        checksums += embedding_tiles(config) * config.has_table
        checksums += config.vocab_size * config.has_inputs_table
        checksums += weights // RESIDENT_BLOCK_BYTES
        return weights + 4 * checksums

    @property
    def _extra_floats(self) -> int:
        """Number of float values that a token has in arrays of blocks that few models have."""
        config = self.config
        if config.is_plain:
            return 0
        hidden, copies = padded(config.hidden_size, GROUP_SIZE), config.residual_copies
        rank = max(layer.laurel_rank for layer in config.layers)
        mixture = self._mixture_floats
        mixture += self._latent_floats
        # In the layer: residual streams before it and as predicted, a product's inputs, and gates, twice.
        in_layer = (2 * copies if copies > 1 else 0) * hidden + (3 * hidden + 2 * rank if rank else 0)
        # Gates of attention or of a delta rule, copied.
        gates = [config.out_cols(layer) for layer in config.layers if layer.attention.gated]
        in_layer += max(gates, default=0)
        # The output of a mixer that runs in parallel with attention, copied.
        mixers = [layer.parallel_mixer for layer in config.layers]
        in_layer += max((mixer.value_size for mixer in mixers if mixer is not None), default=0)
        if config.cut_off_layers:
            in_layer += 2 * max(map(config.neurons, config.cut_off_layers))
        # After it: also the streams as corrected, and with the per-layer block's output, or a scaled one.
        one = bool(config.per_layer_width) or config.any_layer(lambda layer: layer.scaled)
        after_layer = (4 * copies if copies > 1 else one) * hidden
        if not config.per_layer_width:
            return mixture + max(in_layer, after_layer)
        # The inputs, the rows as they are read with their padding, and the projection that joins them.
        row = padded(config.per_layer_size, GROUP_SIZE)
        if not config.has_inputs_table:
            # Inputs of this part's layers and later ones come in messages.
            return mixture + row + max(in_layer, after_layer + 2 * hidden + 4 * config.per_layer_width)
        stride = per_layer_layout(config, self.quant).stride
        reading = 2 * row + stride // 4
        held = row + max(0, row - config.qkv_size)
        return mixture + held + max(reading, in_layer, after_layer + 2 * hidden + 4 * config.per_layer_width)

    @property
    def _latent_floats(self) -> int:
        """Number of float values that a token has in latent attention, in addition to `qkv_size` and
        `query_size`.

        They are the projection of queries and latents; queries, and their parts that meet latents; heads'
        outputs; and copies in the heads' order.
        """
        most = 0
        for layer in self.config.layers:
            latent = layer.attention.latent
            if latent is not None:
                of_head = latent.query_width + latent.key_dim + 2 * latent.rank + latent.value_dim
                floats = self.config.num_heads * of_head + self.config.qkv_rows(layer) + latent.rank
                most = max(most, floats)
        return most

    @property
    def _mixture_floats(self) -> int:
        """Number of float values that a token has in a layer with experts: its normed input, that gathered
        for an expert, its output, and the router's.

        Experts' outputs are in `_expert_outputs_bytes`.
        """
        if self.config.experts is None:
            return 0
        hidden = padded(self.config.hidden_size, GROUP_SIZE)
        groups = hidden // GROUP_SIZE
        lanes = 0
        if not self.config.expert_layers:
            # As where neurons are selected: groups of outputs lie 16 side by side, tiles are listed, and an
            # expert's gates say which of its neurons fire.
            lanes = 16 * (padded(groups, 16) - groups) + 17 + self.config.experts.neurons
        arrays = 6 if self.config.experts.apart else 3
        return arrays * hidden + 20 * self.config.experts.count + lanes

    def _expert_outputs_bytes(self, tokens: int) -> int:
        """Bytes of the outputs of one expert for all tokens, or of all experts for a few tokens."""
        experts = self.config.experts
        if experts is None:
            return 0
        return 4 * padded(self.config.hidden_size, GROUP_SIZE) * max(tokens, HELD_ROWS * experts.chosen)

    @property
    def _cutoff_bytes(self) -> int:
        """Bytes of the packed gate projections of layers whose statistical cutoff needs all of a token's
        gates.

        0 in modes that keep all gates in memory, because these are counted there.
        """
        if self._holds_gates:
            return 0
        rows = map(self.config.neurons, self.config.cut_off_layers)
        return sum(map(self._gate_rows_bytes, rows))

    @property
    def _gates_bytes(self) -> int:
        """Bytes of every layer's packed gate projection, with each row's checksum and its bias."""
        vectors = 2 if self.config.feed_forward.bias else 1
        packed = sum(map(self._gate_rows_bytes, self.config.widths))
        return packed + 4 * vectors * self.config.num_neurons

    def _gate_rows_bytes(self, neurons: int) -> int:
        """Bytes of the packed gate projection of `neurons` neurons."""
        return interleaved_bytes(neurons, self.config.hidden_size, self.quant.of("feed_forward"))

    def _adapter_bytes(self, nodes: int) -> int:
        """Bytes of multi-stream attention, if it runs: its adapters, and its drafter for drafts of `nodes`
        tokens.
        """
        streams, speculation = self.streams, self.runtime.speculation
        if streams is None or not runs_streams(speculation, streams):
            return 0
        nbytes = stream_bytes(self.config, streams)
        if streams.mode == "lossless":
            nbytes += self.stream_rows * self._adapted_row_bytes(streams)
        if speculation == "auto" and self.config.part.embeds:
            nbytes += drafter_bytes("streams", self.config, self.max_context, nodes)
        return nbytes

    def _adapted_row_bytes(self, streams: MultiStreams) -> int:
        """Scratch memory that adapters add to a row.

        It holds the row between an adapter's two matrices, their output, and a copy of the feed-forward
        block's input. Inputs of 16-bit matrices are stored apart from inputs of other widths.
        """
        config = self.config
        rank = max(streams.attention_rank, streams.feed_forward_rank)
        inputs = input_bytes(max(self._widest_input, rank), RowFormat(streams.bits))
        if (streams.bits == 16) == (self.quant.bits == 16):
            inputs -= input_bytes(self._widest_input, RowFormat(streams.bits))
        return 4 * (rank + max(config.qkv_size, config.hidden_size) + config.hidden_size) + inputs

    @property
    def _widest_input(self) -> int:
        """Columns of the widest matrix. Neurons don't count, but experts that are stored as matrices do."""
        config, experts = self.config, self.config.experts
        others = [weight.shape[1] for weight in extra_matrices(config)]
        for layer in config.layers:
            latent = layer.attention.latent
            if latent is not None:
                # Each head has one row.
                widest = max(latent.rank, latent.key_dim)
                others.append(config.num_heads * padded(widest, GROUP_SIZE))
        if experts is not None and config.expert_layers:
            others.append(experts.neurons)
        return max(config.hidden_size, config.query_size, *others)

    def _selecting_bytes(self, tokens: int) -> int:
        """Scratch memory that selecting neurons adds to a dense forward pass: all scores, and wider lanes.

        If scores are something other than gates, gates count too; with predictors, so do the rows between
        their two matrices.
        """
        if not self.selects_neurons:
            return 0
        neurons = padded(self.config.widest, GROUP_SIZE)
        config = self.config
        limited = self.runtime.sparsity == "exact" and (
            config.feed_forward.threshold > 0 or bool(config.cut_off_layers)
        )
        arrays = 3 if limited else 2
        predictors = self._used_predictors
        rank = 0 if predictors is None else max(predictors.ranks)
        groups = padded(self.config.hidden_size, GROUP_SIZE) // GROUP_SIZE
        # Groups of outputs lie 16 side by side, however many there are.
        lanes = 16 * (padded(groups, 16) - groups)
        # A pass lists the tokens' own neurons, up to 1.7 times all that it selects, in tiles of 16.
        return 4 * tokens * (arrays * neurons + rank + lanes + 17) + 72 * neurons


def input_bytes(cols: int, stored: RowFormat) -> int:
    """Bytes of a row in the form in which a matrix multiplies it.

    At 16 bits these are floats, otherwise int8 codes, and for each 64 columns two sums and a scale. Groups of
    32 need two of each for 64 columns; groups of 16 need four more integer sums.
    """
    cols = padded(cols, GROUP_SIZE)
    if stored.bits == 16:
        return 4 * cols
    return cols + cols // GROUP_SIZE * {64: 12, 32: 24, 16: 32}[stored.group_size]


def input_form(stored: RowFormat) -> tuple[bool, bool, int]:
    """The form in which kernels take the rows that a matrix of this format multiplies."""
    is_float = stored.bits == 16
    return (False, False, 0) if is_float else (stored.two_levels, stored.bits < 8, stored.group_size)
