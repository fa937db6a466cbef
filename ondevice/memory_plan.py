"""The one arithmetic for memory: what a model costs in DRAM, and how a budget is divided.

`inspect`, the loader and the allocator all ask this module. Everything here is a pure function of the
model's shape, the options and two measured numbers (the process's own memory, the machine's free memory);
it opens no file and holds no memory. All sizes are bytes.

The ceiling covers the whole process: matrices that every token uses, the key/value cache, feed-forward
memory in equal segments, buffers for what streams from flash, the working memory of a pass, and what the
interpreter and its libraries hold already. The key/value cache of one full context is guaranteed; as it
grows, feed-forward segments yield to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ondevice.backends.base import KVLayout
from ondevice.bundle.layout import CRC_BLOCK_BYTES, RowLayout, embedding_layout, neuron_layout, padded
from ondevice.config import GROUP_SIZE, ModelConfig, QuantConfig, RuntimeConfig
from ondevice.errors import BudgetError, UsageError
from ondevice.units import format_bytes

INTERLEAVED_ROWS = 16
"""Rows that repacked matrices interleave; their row count is padded to it."""
PAGE_BYTES = 4096
SEGMENT_BYTES = 8 << 20
"""Aim for one segment of feed-forward memory; the layer's size decides within half and double of it."""
SEGMENTS_PER_SMALL_LAYER = 8
STREAM_SLOT_BYTES = 2 << 20
"""Aim for one read of streamed records: from 1 MiB on, flash is at its full rate."""
STREAM_SLOTS = 8
STREAM_SHARE = 16
"""The stream's slots take at most this part of the feed-forward weights, where two slots do."""
DEFAULT_MAX_CONTEXT = 4096
PROCESS_ALLOWANCE_BYTES = 4 << 20
"""Thread stacks, allocator slack and what the interpreter grows by after the process was measured."""
REPEAT_MARGIN_BYTES = 1 << 20
"""What the minimum that is named lies above the one that is needed: the process measures itself a little
differently each time, and a budget that one run named must do for the next."""
LOADING_BYTES = 48 << 20
"""Most that loading holds beside the weights: pieces read ahead and remembered blocks (`model/loading.py`).
It is gone before keys, values and feed-forward segments come."""
AUTO_RESERVE_BYTES = 256 << 20
LOGITS_BYTES = 2 << 20
"""Aim for the logits that exist at once where those of every token are wanted."""
HIDDEN_BYTES = 2 << 20
"""Hidden activations of feed-forward segments that are multiplied together."""
QUERY_ROWS = 32
"""Query rows that share one walk over the keys."""


@dataclass(frozen=True)
class SegmentShape:
    """The equal pieces that feed-forward memory is lent in: each holds `neurons` neurons of one layer."""

    neurons: int
    nbytes: int
    per_layer: int
    num_layers: int

    @property
    def total(self) -> int:
        """Segments that hold every neuron of the model."""
        return self.per_layer * self.num_layers

    def lent(self, segments: int) -> tuple[int, ...]:
        """How many of `segments` each layer has: as even as can be, and fewer of them for no layer more.

        The remainder goes to layers in one fixed order, spread over the depth, so that shrinking takes back
        just what it must.
        """
        each, rest = divmod(max(0, min(segments, self.total)), self.num_layers)
        order = sorted(range(self.num_layers), key=lambda layer: f"{layer:020b}"[::-1])
        first = set(order[:rest])
        return tuple(each + (layer in first) for layer in range(self.num_layers))


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


def segment_shape(config: ModelConfig, quant: QuantConfig) -> SegmentShape:
    """Segments near 8 MiB, or an eighth of a layer if that is less, sized so that a layer wastes little."""
    unit = _block_bytes(config, quant)
    units = -(-config.intermediate_size // GROUP_SIZE)
    aim = max(1, min(SEGMENT_BYTES // unit, units // SEGMENTS_PER_SMALL_LAYER))
    sizes = range(max(1, (aim + 1) // 2), 2 * aim + 1)
    size = min(sizes, key=lambda size: (size * -(-units // size), abs(size - aim), size))
    return SegmentShape(
        neurons=size * GROUP_SIZE,
        nbytes=padded(size * unit, PAGE_BYTES),
        per_layer=-(-units // size),
        num_layers=config.num_layers,
    )


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


@dataclass(frozen=True)
class Plan:
    """What everything costs under `budget_bytes`. The stored fields don't depend on the budget."""

    budget_bytes: int
    weights_bytes: int
    """Attention, norms, head and checksum tables: what every token uses."""
    embedding_bytes: int
    """The embedding table; its rows stay on flash unless everything fits."""
    max_context: int
    """Tokens of context whose keys and values are guaranteed."""
    kv_block_bytes: int
    kv_cache_bytes: int
    """Keys and values of one full context."""
    segment: SegmentShape
    stream: StreamShape
    activation_bytes: int
    process_bytes: int
    sparsity: str = "dense"
    predictor_bytes: int = 0
    draft_bytes: int = 0

    @cached_property
    def full_bytes(self) -> int:
        """The budget at which everything is resident, with a full context: more changes nothing."""
        return self._unstreamed_bytes + self.embedding_bytes

    @cached_property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget that surely works: no feed-forward segment is left when the context is full."""
        return max(self._bare_bytes, self._loading_bytes) + REPEAT_MARGIN_BYTES

    @property
    def fits(self) -> bool:
        return self.budget_bytes >= self.minimum_budget_bytes - REPEAT_MARGIN_BYTES

    @property
    def streams(self) -> bool:
        """Whether some feed-forward weights may have to come from flash."""
        return self.budget_bytes < self._unstreamed_bytes

    @property
    def embedding_resident(self) -> bool:
        """Whether the embedding table is held in memory."""
        return self.budget_bytes >= self.full_bytes

    @property
    def resident_weights_bytes(self) -> int:
        return self.weights_bytes + (self.embedding_bytes if self.embedding_resident else 0)

    @property
    def staging_bytes(self) -> int:
        """Buffers of what streams; where all feed-forward weights fit, while the first passes fetch them."""
        return self.stream.nbytes

    @property
    def neuron_cache_bytes(self) -> int:
        """Feed-forward memory that is left when the context is full."""
        return self.segments_for(self.kv_cache_bytes) * self.segment.nbytes

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, with a full context."""
        return self._fixed_bytes + self.kv_cache_bytes + self.neuron_cache_bytes

    @property
    def kv_limit_bytes(self) -> int:
        """Most that the key/value caches of all sessions together may hold."""
        held = 0 if self.streams else self.segment.total * self.segment.nbytes
        return max(self.kv_cache_bytes, self.budget_bytes - self._fixed_bytes - held)

    def segments_for(self, kv_bytes: int) -> int:
        """Feed-forward segments that may be held beside `kv_bytes` of key/value blocks."""
        if not self.streams:
            return self.segment.total
        left = self.budget_bytes - self._fixed_bytes - kv_bytes
        return max(0, min(self.segment.total, left // self.segment.nbytes))

    def with_budget(self, budget_bytes: int) -> Plan:
        """The same model and process under another budget."""
        return replace(self, budget_bytes=budget_bytes)

    def require_fit(self, name: str) -> None:
        """Raises BudgetError, naming the smallest budget that works and what takes it, if this isn't it."""
        if self.fits:
            return
        parts = {
            "weights of every token": self.weights_bytes,
            f"KV cache of {self.max_context} tokens": self.kv_cache_bytes,
            "buffers and working memory": self.stream.nbytes + self.activation_bytes,
            "the process itself": self.process_bytes,
        }
        listed = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in parts.items())
        raise BudgetError(
            f"a DRAM budget of {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes) is too small "
            f"for {name}: the smallest that works is {self.minimum_budget_bytes} bytes "
            f"({format_bytes(self.minimum_budget_bytes)}: {listed}). Raise --dram-budget, or lower "
            f"--max-context or --kv-bits.",
            required_bytes=self.minimum_budget_bytes,
        )

    def to_json(self) -> dict[str, int | str | bool]:
        """The plan as `inspect --json` prints it; the `_bytes` parts add up to `total_bytes`."""
        return {
            "budget_bytes": self.budget_bytes,
            "total_bytes": self.total_bytes,
            "resident_weights_bytes": self.resident_weights_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "neuron_cache_bytes": self.neuron_cache_bytes,
            "predictor_bytes": self.predictor_bytes,
            "draft_bytes": self.draft_bytes,
            "staging_bytes": self.staging_bytes,
            "activation_bytes": self.activation_bytes,
            "process_bytes": self.process_bytes,
            "sparsity": self.sparsity,
            "fits": self.fits,
            "full_bytes": self.full_bytes,
            "max_context": self.max_context,
            "segment_bytes": self.segment.nbytes,
            "segments": self.segments_for(self.kv_cache_bytes),
            "segments_at_start": self.segments_for(self.kv_block_bytes),
            "segments_total": self.segment.total,
        }

    @cached_property
    def _unstreamed_bytes(self) -> int:
        """All feed-forward weights resident beside a full context."""
        resident = self._bare_bytes + self.segment.total * self.segment.nbytes
        return max(resident, self._loading_bytes)

    @property
    def _bare_bytes(self) -> int:
        """All that a full context takes without any feed-forward segment."""
        return self._always_bytes + self.stream.nbytes + self.kv_cache_bytes

    @property
    def _loading_bytes(self) -> int:
        """The peak while weights are loaded, of which a small model has less to be read ahead."""
        return self._always_bytes - self.activation_bytes + min(LOADING_BYTES, self.weights_bytes)

    @property
    def _always_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.activation_bytes
            + self.process_bytes
            + self.predictor_bytes
            + self.draft_bytes
        )

    @property
    def _fixed_bytes(self) -> int:
        """What no token's progress changes: all but the key/value cache and the segments."""
        resident_embedding = self.resident_weights_bytes - self.weights_bytes
        return self._always_bytes + resident_embedding + self.staging_bytes


def plan_memory(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    *,
    budget_bytes: int,
    process_bytes: int,
    threads: int = 1,
) -> Plan:
    """Divide `budget_bytes`. `process_bytes` is the process's memory before anything of the model is loaded.

    Raises UsageError if the context asked for is longer than the model's. A budget that is too small gives
    a plan that says so (`fits`), not an error.
    """
    kv = KVLayout(config, runtime.kv_bits)
    max_context = context_tokens(config, runtime)
    plan = Plan(
        budget_bytes=budget_bytes,
        weights_bytes=_weights_bytes(config, quant),
        embedding_bytes=config.vocab_size * embedding_layout(config, quant).stride,
        max_context=max_context,
        kv_block_bytes=kv.block_bytes,
        kv_cache_bytes=kv.blocks(max_context) * kv.block_bytes,
        segment=segment_shape(config, quant),
        stream=stream_shape(config, quant),
        # The allocator keeps about a quarter more than is in use.
        activation_bytes=_activation_bytes(config, quant, runtime, threads) * 5 // 4,
        process_bytes=process_bytes + PROCESS_ALLOWANCE_BYTES,
    )
    if runtime.backend != "reference":
        return plan
    # The reference backend holds every matrix in float32, reads embedding rows from flash, streams nothing.
    return replace(
        plan,
        weights_bytes=4 * _matrix_elements(config),
        embedding_bytes=0,
        segment=replace(plan.segment, per_layer=0),
        stream=StreamShape(0, 0, 0, 0),
        activation_bytes=plan.activation_bytes + _reference_bytes(config, runtime),
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


def auto_budget(plan: Plan, available_bytes: int) -> int:
    """The budget `auto` means: what the machine has free less a reserve, never more than the model can use.

    plan: any plan of the model; available_bytes: what the machine could still give this process.
    """
    reserve = max(AUTO_RESERVE_BYTES, available_bytes // 10)
    return max(0, min(plan.full_bytes, plan.process_bytes + available_bytes - reserve))


def _weights_bytes(config: ModelConfig, quant: QuantConfig) -> int:
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


def _matrix_elements(config: ModelConfig) -> int:
    """Elements of every matrix but the embedding table, the head included."""
    per_token = config.qkv_size + config.query_size + 3 * config.intermediate_size
    return config.hidden_size * (config.num_layers * per_token + config.vocab_size)


def _block_bytes(config: ModelConfig, quant: QuantConfig) -> int:
    """64 neurons packed for the kernels: gate, up and down."""
    return 3 * interleaved_bytes(GROUP_SIZE, config.hidden_size, quant.bits)


def _activation_bytes(config: ModelConfig, quant: QuantConfig, runtime: RuntimeConfig, threads: int) -> int:
    """Working memory of the widest pass of the cpu backend: activations, scores, hidden values, logits."""
    context = context_tokens(config, runtime)
    chunk = min(runtime.prefill_chunk, context)
    hidden, vocab = padded(config.hidden_size, GROUP_SIZE), config.vocab_size
    widest = padded(max(config.hidden_size, config.query_size), GROUP_SIZE)
    # Embedding rows, residual, norm, feed-forward twice and its lanes; projections, attention, rotary tables.
    floats = 5 * hidden + hidden // 4 + max(config.qkv_size, hidden) + config.query_size
    per_token = 4 * floats + 64 * config.head_dim + 2 * 64 * threads
    # The matrix input: floats at 16 bits, else int8 codes with two sums and a scale per group.
    per_token += 4 * widest if quant.bits == 16 else widest + widest // GROUP_SIZE * 12
    rows = max(QUERY_ROWS, config.num_heads // config.num_kv_heads)
    scores = threads * 4 * rows * (padded(context, GROUP_SIZE) + 2 * padded(config.head_dim, 16))
    neurons = min(segment_shape(config, quant).neurons, padded(config.intermediate_size, GROUP_SIZE))
    hidden_values = max(HIDDEN_BYTES, 4 * chunk * neurons)
    sampling = 8 * 8 * vocab
    # The head's output and the copy that is handed out.
    scoring = 2 * 4 * vocab * min(chunk, logits_rows(config))
    return chunk * per_token + max(sampling, scoring) + scores + hidden_values


def _reference_bytes(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """What numpy's temporaries add: wide hidden values, whole score matrices, keys and values read back."""
    context = context_tokens(config, runtime)
    chunk = min(runtime.prefill_chunk, context)
    return 4 * (16 * chunk * config.intermediate_size + 8 * chunk * context + 6 * config.kv_size * context)
