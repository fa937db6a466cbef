"""What the parts of a model take in memory: packed weights, segments, stream slots, scratch memory.

Pure functions of the model's shape and the options, in bytes; `plan` divides a budget with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.backends.base import BLOCK_TOKENS
from ondevice.bundle.layout import CRC_BLOCK_BYTES, RowLayout, neuron_layout, padded
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.streams import MultiStreams
from ondevice.config import GROUP_SIZE, ModelConfig, QuantConfig, RuntimeConfig
from ondevice.errors import UsageError
from ondevice.speculation.registry import drafter_bytes, runs_streams
from ondevice.speculation.tree import LOGITS_AHEAD
from ondevice.units import PAGE_BYTES

INTERLEAVED_ROWS = 16
"""Repacked matrices have a multiple of so many rows."""
SEGMENT_BYTES = 8 << 20
"""Aim for one segment of feed-forward memory; the layer's size decides within half and double of it."""
SEGMENTS_PER_SMALL_LAYER = 8
STREAM_SLOT_BYTES = 2 << 20
"""Aim for one read of streamed records: from 1 MiB on, flash is at its full rate."""
STREAM_SLOTS = 8
STREAM_SHARE = 16
"""The stream's slots take at most this part of the feed-forward weights, where two slots do."""
NEURON_TABLE_BYTES = 52
"""Of every neuron: its slot and its scores; of every slot: its address, its owner, its place among the free
ones; and what dividing the slots among layers computes in between."""
FETCH_NEURONS = 1024
"""Neurons that fire are read and multiplied so many at a time; a multiple of 64."""
FETCH_DEPTH = 48
"""Reads at once where records are read one by one, at most: small reads need company."""
FETCH_ENDED = 16
"""Reads that have ended and are checked and copied while others are under way (kEnded in read_pool.cc)."""
FETCH_STAGING_BYTES = 72 << 10
"""A run of neighbouring records, at most 64 KiB, with its pages."""
DEFAULT_MAX_CONTEXT = 4096
LOGITS_BYTES = 2 << 20
"""Aim for the logits that exist at once where those of every token are wanted."""
HIDDEN_BYTES = 2 << 20
"""Hidden activations of feed-forward segments that are multiplied together."""
QUERY_ROWS = 32
"""Query rows that share one walk over the keys."""
DECODE_TOKENS = 16
"""A pass over so many tokens or fewer is decoding: neurons get the scratch memory that it leaves."""


@dataclass(frozen=True)
class SegmentShape:
    """The equal pieces that feed-forward memory comes in: each holds `neurons` neurons of one layer."""

    neurons: int
    nbytes: int
    per_layer: int
    num_layers: int

    @property
    def total(self) -> int:
        """Segments that hold every neuron of the model."""
        return self.per_layer * self.num_layers

    @property
    def least(self) -> int:
        """Segments without which nothing can be computed."""
        return 0

    def quota(self, segments: int) -> tuple[int, ...]:
        """How many of `segments` each layer has: as even as can be, and fewer of them for no layer more.

        The remainder goes to layers in one fixed order, spread over the depth, so that shrinking takes back
        just what it must.
        """
        each, rest = divmod(max(0, min(segments, self.total)), self.num_layers)
        order = sorted(range(self.num_layers), key=lambda layer: f"{layer:020b}"[::-1])
        first = set(order[:rest])
        return tuple(each + (layer in first) for layer in range(self.num_layers))


@dataclass(frozen=True)
class SlotShape:
    """The equal pieces that memory for single neurons is allocated in: `slots` of one record's part each.

    `reserve` slots are for neurons on their way through; `least` segments hold them.
    """

    slots: int
    slot_bytes: int
    reserve: int
    total: int
    """Segments that hold every neuron of the model and the reserve."""

    @property
    def nbytes(self) -> int:
        return padded(self.slots * self.slot_bytes, PAGE_BYTES)

    @property
    def least(self) -> int:
        """Segments without which nothing can be computed."""
        return -(-self.reserve // self.slots)

    def quota(self, segments: int) -> tuple[int, ...]:
        """All of them in one: layers share the slots of every segment."""
        return (max(0, min(segments, self.total)),)


@dataclass(frozen=True)
class StreamShape:
    """How records that aren't resident are read: `slots` buffers, each for up to `neurons` records.

    `packed_bytes` is the room in which one slot's records are packed before they are multiplied.
    """

    neurons: int
    slot_bytes: int
    slots: int
    packed_bytes: int

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.slots + self.packed_bytes


def interleaved_bytes(rows: int, cols: int, bits: int) -> int:
    """A repacked (rows, cols) matrix: 16 rows side by side, per group of 64 their codes, scales, biases."""
    return padded(rows, INTERLEAVED_ROWS) * RowLayout(cols, bits).nbytes


def segment_shape(
    config: ModelConfig, quant: QuantConfig, block_bytes: int = 0, aim_bytes: int = SEGMENT_BYTES
) -> SegmentShape:
    """Segments near `aim_bytes`, or an eighth of a layer if that is less, sized so that little is wasted.

    block_bytes: of 64 neurons, where the kernels' own packing isn't what holds them.
    """
    unit = block_bytes or _block_bytes(config, quant)
    units = -(-config.intermediate_size // GROUP_SIZE)
    aim = max(1, min(aim_bytes // unit, units // SEGMENTS_PER_SMALL_LAYER))
    sizes = range(max(1, (aim + 1) // 2), 2 * aim + 1)
    size = min(sizes, key=lambda size: (size * -(-units // size), abs(size - aim), size))
    return SegmentShape(
        neurons=size * GROUP_SIZE,
        nbytes=padded(size * unit, PAGE_BYTES),
        per_layer=-(-units // size),
        num_layers=config.num_layers,
    )


def slot_shape(config: ModelConfig, quant: QuantConfig, whole: bool) -> SlotShape:
    """Segments near 8 MiB, or a sixteenth of all neurons if that is less.

    whole: slots are for whole records, not for the up and down rows alone.
    """
    layout = neuron_layout(config, quant)
    slot_bytes = layout.stride if whole else layout.part_bytes[1]
    neurons = config.num_layers * config.intermediate_size
    # Two batches of a layer, its guess that has come, and the next layer's that is being read.
    reserve = 2 * fetch_neurons(config) + 2 * prefetch_neurons(config)
    slots = max(GROUP_SIZE, min(SEGMENT_BYTES // slot_bytes, -(-neurons // 16)))
    return SlotShape(slots, slot_bytes, reserve, -(-(neurons + reserve) // slots))


def fetch_neurons(config: ModelConfig) -> int:
    """Most neurons that are read and multiplied at a time, in whole blocks of 64."""
    return min(FETCH_NEURONS, padded(-(-config.intermediate_size // 4), GROUP_SIZE))


def prefetch_neurons(config: ModelConfig) -> int:
    """Most neurons of a layer that are read from a guess.

    More than most flash reads while a layer is computed: what hasn't begun when the layer's turn comes is
    given up, so that a device sets its own depth.
    """
    return fetch_neurons(config) // 2


def fetch_shape(slot_bytes: int) -> StreamShape:
    """Staging of records that are read one by one: a buffer for every one of them, and for who asks."""
    buffers = FETCH_DEPTH + FETCH_ENDED + 1
    return StreamShape(0, max(FETCH_STAGING_BYTES, padded(slot_bytes, PAGE_BYTES) + PAGE_BYTES), buffers, 0)


def stream_shape(config: ModelConfig, quant: QuantConfig) -> StreamShape:
    """Reads near 2 MiB, or a quarter of a layer if that is less, in whole blocks of 64 records."""
    stride = neuron_layout(config, quant).stride
    blocks = -(-config.intermediate_size // GROUP_SIZE)
    size = max(1, min(STREAM_SLOT_BYTES // (stride * GROUP_SIZE), -(-blocks // 4)))
    # A read is widened to page boundaries on both sides.
    slot_bytes = padded(size * GROUP_SIZE * stride, PAGE_BYTES) + PAGE_BYTES
    share = config.num_layers * config.intermediate_size * stride // STREAM_SHARE
    return StreamShape(
        neurons=size * GROUP_SIZE,
        slot_bytes=slot_bytes,
        slots=min(STREAM_SLOTS, max(2, share // slot_bytes)),
        packed_bytes=padded(size * _block_bytes(config, quant), PAGE_BYTES),
    )


def context_tokens(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """Tokens a session may hold. Raises UsageError if more are asked for than the model was made for."""
    if runtime.max_context < 0 or runtime.max_context > config.max_context:
        raise UsageError(
            f"--max-context {runtime.max_context} is not between 0 (automatic) and the model's own "
            f"limit of {config.max_context} tokens"
        )
    return runtime.max_context or min(config.max_context, DEFAULT_MAX_CONTEXT)


def logits_rows(config: ModelConfig) -> int:
    """Tokens whose logits are computed at once when those of all are wanted."""
    return max(1, LOGITS_BYTES // (4 * config.vocab_size))


def weights_bytes(config: ModelConfig, quant: QuantConfig) -> int:
    hidden = config.hidden_size
    matrices = interleaved_bytes(config.qkv_size, hidden, quant.bits)
    matrices += interleaved_bytes(hidden, config.query_size, quant.bits)
    vectors = 2 * hidden
    vectors += config.qkv_size if config.attention_bias else 0
    vectors += hidden if config.attention_output_bias else 0
    vectors += 2 * config.head_dim if config.qk_norm else 0
    weights = config.num_layers * (matrices + 4 * vectors) + 4 * hidden
    weights += interleaved_bytes(config.vocab_size, hidden, quant.bits)
    checksums = config.num_layers * config.intermediate_size * len(neuron_layout(config, quant).parts)
    checksums += config.vocab_size + weights // CRC_BLOCK_BYTES
    return weights + 4 * checksums


def gates_bytes(config: ModelConfig, quant: QuantConfig) -> int:
    """Every layer's gate projection, packed, with the checksum of every row, or its importance."""
    neurons, hidden = config.intermediate_size, config.hidden_size
    return config.num_layers * (interleaved_bytes(neurons, hidden, quant.bits) + 4 * neurons)


def predictors_bytes(config: ModelConfig, predictors: Predictors) -> int:
    """Every layer's two predictor matrices, packed, and the biases."""
    neurons, hidden, bits = config.intermediate_size, config.hidden_size, predictors.bits
    return sum(
        interleaved_bytes(rank, hidden, bits) + interleaved_bytes(neurons, rank, bits) + 4 * neurons
        for rank in predictors.ranks
    )


def stream_bytes(config: ModelConfig, streams: MultiStreams) -> int:
    """Every adapter of the streams, packed, and the embeddings."""
    matrices = streams.matrices(config).values()
    packed = sum(interleaved_bytes(rows, cols, streams.bits) for rows, cols in matrices)
    return packed + 4 * streams.streams * config.hidden_size


def neuron_table_bytes(config: ModelConfig) -> int:
    """What the neuron cache and its policy keep about every neuron of the model."""
    return config.num_layers * config.intermediate_size * NEURON_TABLE_BYTES


def widest_pass(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """Most tokens that go through the model together."""
    return min(runtime.prefill_chunk, context_tokens(config, runtime))


def sparse_activation_bytes(
    config: ModelConfig, runtime: RuntimeConfig, predictors: Predictors | None, tokens: int
) -> int:
    """What a pass over selected neurons holds beside the dense one: all scores, and wider lanes.

    With thresholds, gates as well; with predictors, if any, what lies between their two matrices.
    """
    neurons = padded(config.intermediate_size, GROUP_SIZE)
    arrays = 3 if runtime.sparsity == "threshold" else 2
    rank = max(predictors.ranks) if predictors is not None else 0
    groups = padded(config.hidden_size, GROUP_SIZE) // GROUP_SIZE
    # Groups of outputs lie 16 side by side, whatever their number.
    lanes = 16 * (padded(groups, 16) - groups)
    return 4 * tokens * (arrays * neurons + rank + lanes) + 64 * neurons


def draft_nodes(runtime: RuntimeConfig) -> int:
    """Most tokens of a draft, its root included: those of a narrow pass."""
    return min(DECODE_TOKENS, runtime.prefill_chunk)


def draft_bytes(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    threads: int,
    streams: MultiStreams | None = None,
    draft_model_bytes: int = 0,
) -> int:
    """What drafting holds: the drafter's state, scores held back until acceptance, paths of attention.

    streams: the bundle's; their adapters count where they run. draft_model_bytes: of a second model, if one
    drafts.
    """
    context, nodes = context_tokens(config, runtime), draft_nodes(runtime)
    adapters = 0
    if streams is not None and runs_streams(runtime.speculation, streams):
        adapters = stream_bytes(config, streams)
        if streams.mode == "lossless":
            # The streams of a draft's nodes, or those of its last token by themselves.
            adapters += max(nodes - 1, streams.streams) * adapted_row_bytes(config, quant, streams)
    if adapters and runtime.speculation == "auto":
        adapters += drafter_bytes("streams", config, context, nodes)
    drafter = draft_model_bytes + drafter_bytes(runtime.speculation, config, context, nodes)
    if not drafter:
        return adapters
    if runs_streams(runtime.speculation, streams) or runtime.speculation == "resident":
        # What drafting would have liked to have: the first that the next pass reads.
        adapters += 4 * config.num_layers * config.intermediate_size if runtime.sparsity != "dense" else 0
    held_back = 2 * config.num_layers * (nodes - 1) * config.intermediate_size
    # A thread's values along a path through the tree.
    paths = threads * 4 * BLOCK_TOKENS * padded(config.head_dim, 16)
    # Of the likely path, beside those that plain decoding holds: the head's output and the copy of it.
    ahead = 2 * 4 * config.vocab_size * (LOGITS_AHEAD - 1)
    return adapters + drafter + paths + ahead + (held_back if runtime.sparsity != "dense" else 0)


def matrix_elements(config: ModelConfig) -> int:
    """Elements of every matrix but the embedding table, the head included."""
    per_token = config.qkv_size + config.query_size + 3 * config.intermediate_size
    return config.hidden_size * (config.num_layers * per_token + config.vocab_size)


def _block_bytes(config: ModelConfig, quant: QuantConfig) -> int:
    """64 neurons packed for the kernels: gate, up and down."""
    return 3 * interleaved_bytes(GROUP_SIZE, config.hidden_size, quant.bits)


def _input_bytes(cols: int, bits: int) -> int:
    """A row that a matrix multiplies: floats at 16 bits, else int8 codes, two sums and a scale per group."""
    cols = padded(cols, GROUP_SIZE)
    return 4 * cols if bits == 16 else cols + cols // GROUP_SIZE * 12


def _widest_input(config: ModelConfig) -> int:
    """Columns of the widest matrix but the feed-forward's."""
    return max(config.hidden_size, config.query_size)


def adapted_row_bytes(config: ModelConfig, quant: QuantConfig, streams: MultiStreams) -> int:
    """What a row that adapters are added for takes in a pass beside `activation_bytes` of a plain one.

    A row between their two matrices, what they add, and a copy of what enters a feed-forward block, which is
    overwritten. Rows that matrices of 16 bits multiply lie apart from those of other widths.
    """
    rank, widest = max(streams.attention_rank, streams.feed_forward_rank), _widest_input(config)
    inputs = _input_bytes(max(widest, rank), streams.bits)
    if (streams.bits == 16) == (quant.bits == 16):
        inputs -= _input_bytes(widest, quant.bits)
    return 4 * (rank + max(config.qkv_size, config.hidden_size) + config.hidden_size) + inputs


def activation_bytes(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    threads: int,
    tokens: int,
    streams: MultiStreams | None = None,
) -> int:
    """Scratch memory of a pass of the cpu backend: activations, scores, hidden values, logits.

    streams: the bundle's; shared ones have adapters for every token, whether anything drafts or not. Convex
    in the pass's tokens: between two sizes it takes no more than a line from one to the other.
    """
    context = context_tokens(config, runtime)
    hidden, vocab = padded(config.hidden_size, GROUP_SIZE), config.vocab_size
    # Embedding rows, residual, feed-forward and its lanes; projections, attention, rotary tables.
    floats = 3 * hidden + hidden // 4 + config.qkv_size + config.query_size
    per_token = 4 * floats + 64 * config.head_dim + 2 * 64 * threads
    per_token += _input_bytes(_widest_input(config), quant.bits)
    if streams is not None and streams.mode == "shared":
        per_token += adapted_row_bytes(config, quant, streams)
    rows = max(QUERY_ROWS, config.num_heads // config.num_kv_heads)
    scores = threads * 4 * rows * (padded(context, GROUP_SIZE) + 2 * padded(config.head_dim, 16))
    neurons = min(segment_shape(config, quant).neurons, padded(config.intermediate_size, GROUP_SIZE))
    hidden_values = max(HIDDEN_BYTES, 4 * tokens * neurons)
    sampling = 8 * 8 * vocab
    # The head's output and the copy that is handed out.
    scoring = 2 * 4 * vocab * min(widest_pass(config, runtime), logits_rows(config))
    return tokens * per_token + max(sampling, scoring) + scores + hidden_values


def reference_bytes(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """What numpy's temporaries add: wide hidden values, whole score matrices, keys and values read back."""
    context, chunk = context_tokens(config, runtime), widest_pass(config, runtime)
    return 4 * (16 * chunk * config.intermediate_size + 8 * chunk * context + 6 * config.kv_size * context)
