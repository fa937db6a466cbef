"""The one arithmetic for memory: what a model costs in DRAM, and how a budget is divided.

`inspect`, the loader and the allocator all ask this module. Everything here is a pure function of the
model's shape, the options and measured numbers (the process's own memory, what its other models have claimed,
a control group's limit); it opens no file and holds no memory. All sizes are bytes.

The ceiling covers the whole process: matrices that every token uses, the key/value cache, feed-forward
memory in equal segments, buffers for what streams from flash, the scratch memory of a pass, what the
interpreter and its libraries hold already, and other models. The key/value cache of one full context is
guaranteed; as it grows, feed-forward segments yield to it. They also have, while tokens are decoded one by
one, what a long prompt's passes need of scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ondevice.backends.base import KVLayout
from ondevice.budget.mlx_sizes import (
    mlx_activation_bytes,
    mlx_segment_shape,
    mlx_stage_bytes,
    mlx_stream_bytes,
    mlx_stream_shape,
    mlx_weights_bytes,
)
from ondevice.budget.sizes import (
    DECODE_TOKENS,
    SegmentShape,
    SlotShape,
    StreamShape,
    activation_bytes,
    context_tokens,
    draft_bytes,
    fetch_shape,
    gates_bytes,
    matrix_elements,
    neuron_table_bytes,
    predictors_bytes,
    reference_bytes,
    segment_shape,
    slot_shape,
    sparse_activation_bytes,
    stream_shape,
    weights_bytes,
    widest_pass,
)
from ondevice.bundle.layout import embedding_layout
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.streams import MultiStreams
from ondevice.config import ModelConfig, QuantConfig, RuntimeConfig
from ondevice.speculation.registry import runs_streams
from ondevice.units import PAGE_BYTES, MemoryRoom

PROCESS_ALLOWANCE_BYTES = 4 << 20
"""Thread stacks, allocator slack and what the interpreter grows by after the process was measured."""
REPEAT_MARGIN_BYTES = 1 << 20
"""What the minimum that is named lies above the one that is needed: the process measures itself a little
differently each time, and a budget that one run named must do for the next."""
LOADING_BYTES = 52 << 20
"""Most that loading holds beside the weights: pieces read ahead, remembered blocks, and those that are
forgotten while they are still in use, one per reading thread (`model/loading.py`). It is gone before keys,
values and feed-forward segments come."""
LOADING_PREDICTORS_BYTES = 16 << 20
"""Remembered blocks of the predictors' file, which is read in turns with the resident one, at most."""
QUOTA_MARGIN_BYTES = 12 << 20
"""Scratch memory of wide forward passes that neurons never get: they leave the heap larger than they found
it, by up to 7 MB in `long_ceiling.py`."""
GATED = ("exact", "threshold")
"""Modes in which every layer's gates stay in memory."""


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
    segment: SegmentShape | SlotShape
    """Whole ranges of a layer's neurons in dense mode, single neurons' slots in the sparse ones."""
    stream: StreamShape
    activation_bytes: int
    """Scratch memory of the widest pass, over `pass_tokens` tokens."""
    decode_activation_bytes: int
    """Scratch memory of a pass over DECODE_TOKENS tokens or fewer."""
    pass_tokens: int
    process_bytes: int
    sparsity: str = "dense"
    predictor_bytes: int = 0
    draft_bytes: int = 0
    opening_bytes: int = 0
    """The process while the tokenizer is read, which is before anything else is."""
    unread_bytes: int = 0
    """What the tokenizer may take, where it isn't read; else the process holds it."""
    others_bytes: int = 0
    """What other models of this process hold or may come to hold."""
    limit: MemoryRoom | None = None
    """The control group that allows least, if one has a limit."""
    wanted_context: int = 0
    """The default context, where it didn't fit and `max_context` is what does; else 0."""

    @cached_property
    def full_bytes(self) -> int:
        """The budget at which everything is resident, with a full context: more changes nothing."""
        return max(self._unstreamed_bytes + self.embedding_bytes, self.minimum_budget_bytes)

    @cached_property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget that surely works: the fewest segments are left when the context is full."""
        return max(self._bare_bytes, self._loading_bytes, self._opening_bytes) + REPEAT_MARGIN_BYTES

    @property
    def minimum_parts(self) -> dict[str, int]:
        """What takes the smallest budget, by its name to people: it adds up to `minimum_budget_bytes`."""
        parts = {
            "weights of every token": self.weights_bytes + self.predictor_bytes,
            f"KV cache of {self.max_context} tokens": self.kv_cache_bytes,
            "buffers and scratch memory": self.stream.nbytes
            + self.activation_bytes
            + self.segment.least * self.segment.nbytes,
            "drafting": self.draft_bytes,
            "the process itself": self.process_bytes,
            "the tokenizer, not read yet, at most": self.unread_bytes,
            "what other models of this process may take": self.others_bytes,
            "what loading reads ahead beyond that": max(0, self._loading_bytes - self._bare_bytes),
            "what the tokenizer takes when it is read": self._opening_bytes
            - max(self._bare_bytes, self._loading_bytes),
            "a margin, as no two runs measure alike": REPEAT_MARGIN_BYTES,
        }
        return {what: nbytes for what, nbytes in parts.items() if nbytes > 0}

    @property
    def fits(self) -> bool:
        """Whether the budget is enough, and a control group that the process is in allows what it takes."""
        # The kernel rounds a limit down to whole pages.
        return self.suffices and (
            self.limit is None or self.total_bytes < self.limit.limit_bytes + PAGE_BYTES
        )

    @property
    def suffices(self) -> bool:
        """Whether the budget is enough, whoever may give it."""
        return self.budget_bytes >= self.minimum_budget_bytes - REPEAT_MARGIN_BYTES

    @property
    def offloads_weights(self) -> bool:
        """Whether some feed-forward weights may have to come from flash."""
        return self.budget_bytes < self._unstreamed_bytes

    @property
    def embedding_resident(self) -> bool:
        """Whether the embedding table is held in memory."""
        return self.budget_bytes >= self._unstreamed_bytes + self.embedding_bytes

    @property
    def reads_once(self) -> bool:
        """Whether tokens read from flash only what stays in memory from then on: the first ones do."""
        # What is planned without an embedding table reads a row of it for every token.
        return self.embedding_resident and self.embedding_bytes > 0

    @property
    def resident_weights_bytes(self) -> int:
        return self.weights_bytes + (self.embedding_bytes if self.embedding_resident else 0)

    @property
    def staging_bytes(self) -> int:
        """Buffers of what streams; where all feed-forward weights fit, while the first passes fetch them."""
        return self.stream.nbytes

    @property
    def neuron_cache_bytes(self) -> int:
        """Feed-forward memory that is left in the widest pass when the context is full."""
        return self.segments_for(self.kv_cache_bytes) * self.segment.nbytes

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, with a full context."""
        return self._fixed_bytes + self.kv_cache_bytes + self.neuron_cache_bytes

    @property
    def kv_limit_bytes(self) -> int:
        """Most that the key/value caches of all sessions together may hold."""
        held = (self.segment.least if self.offloads_weights else self.segment.total) * self.segment.nbytes
        most = self.budget_bytes if self.limit is None else min(self.budget_bytes, self.limit.limit_bytes)
        return max(self.kv_cache_bytes, most - self._fixed_bytes - held)

    @property
    def claim_bytes(self) -> int:
        """The most that the model may take beside the process and other models, with one full context."""
        most = self.budget_bytes if self.offloads_weights else max(self.total_bytes, self._loading_bytes)
        return most - self.process_bytes - self.others_bytes

    def segments_for(self, kv_bytes: int, tokens: int | None = None) -> int:
        """Feed-forward segments that may be held beside `kv_bytes` of key/value blocks.

        tokens: of the widest pass whose scratch memory is held; without it, of the widest that there can be.
        """
        if not self.offloads_weights:
            return self.segment.total
        idle = 0 if tokens is None else self.activation_bytes - self.working_bytes(tokens)
        left = self.budget_bytes - self._fixed_bytes - kv_bytes + idle
        return max(0, min(self.segment.total, left // self.segment.nbytes))

    def working_bytes(self, tokens: int) -> int:
        """What is kept for passes of so many tokens: in proportion from narrow to widest, and a margin."""
        more = max(0, tokens - DECODE_TOKENS)
        span = max(1, self.pass_tokens - DECODE_TOKENS)
        idle = self.activation_bytes - self.decode_activation_bytes
        line = self.decode_activation_bytes + -(-idle * more // span)
        return min(self.activation_bytes, line + QUOTA_MARGIN_BYTES)

    def with_budget(self, budget_bytes: int) -> Plan:
        """The same model and process under another budget."""
        return replace(self, budget_bytes=budget_bytes)

    def to_json(self) -> dict[str, int | str | bool]:
        """The plan as `inspect --json` prints it; the `_bytes` parts add up to `total_bytes`.

        They are those of the widest pass; the counts of segments are those while decoding.
        """
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
            "other_models_bytes": self.others_bytes,
            "sparsity": self.sparsity,
            "fits": self.fits,
            "minimum_budget_bytes": self.minimum_budget_bytes,
            "full_bytes": self.full_bytes,
            "max_context": self.max_context,
            "wanted_context": self.wanted_context,
            "limit_bytes": 0 if self.limit is None else self.limit.limit_bytes,
            "segment_bytes": self.segment.nbytes,
            "segments": self.segments_for(self.kv_cache_bytes, DECODE_TOKENS),
            "segments_at_start": self.segments_for(self.kv_block_bytes, DECODE_TOKENS),
            "segments_total": self.segment.total,
        }

    @cached_property
    def _unstreamed_bytes(self) -> int:
        """All feed-forward weights resident beside a full context."""
        segments = (self.segment.total - self.segment.least) * self.segment.nbytes
        return max(self._bare_bytes + segments, self._loading_bytes, self._opening_bytes)

    @property
    def _bare_bytes(self) -> int:
        """All that a full context takes with the fewest feed-forward segments."""
        least = self.segment.least * self.segment.nbytes
        return self._always_bytes + self.stream.nbytes + self.kv_cache_bytes + least

    @property
    def _loading_bytes(self) -> int:
        """The peak while weights are loaded: read ahead, bytes lie in a piece and in a block or a buffer."""
        ahead = min(LOADING_BYTES, 2 * self.weights_bytes)
        ahead += min(LOADING_PREDICTORS_BYTES, self.predictor_bytes)
        return self._always_bytes - self.activation_bytes + ahead

    @property
    def _opening_bytes(self) -> int:
        return self.opening_bytes + self.others_bytes

    @property
    def _always_bytes(self) -> int:
        held = self.process_bytes + self.unread_bytes + self.others_bytes
        return held + self.weights_bytes + self.activation_bytes + self.predictor_bytes + self.draft_bytes

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
    predictors: Predictors | None = None,
    streams: MultiStreams | None = None,
    draft_model_bytes: int = 0,
    operand_bytes: int = 0,
) -> Plan:
    """Divide `budget_bytes`. `process_bytes` is the process's memory before anything of the model is loaded.

    draft_model_bytes: of a second model that drafts, loaded and with its context full. operand_bytes: of what
    the MLX backend's matrices multiply in.
    runtime.sparsity is settled: what isn't `exact`, `threshold`, or `predicted` with `predictors`, is planned
    as `dense`. Raises UsageError if the context asked for is longer than the model's; a budget that is too
    small gives a plan that says so (`fits`).
    """
    kv = KVLayout(config, runtime.kv_bits)
    max_context, widest = context_tokens(config, runtime), widest_pass(config, runtime)
    # The allocator keeps about a quarter more than is in use; MLX has a limit for that.
    wide, narrow = (
        mlx_activation_bytes(config, runtime, tokens, operand_bytes)
        if runtime.backend == "mlx"
        else activation_bytes(config, quant, runtime, threads, tokens, streams) * 5 // 4
        for tokens in (widest, min(widest, DECODE_TOKENS))
    )
    plan = Plan(
        budget_bytes=budget_bytes,
        weights_bytes=weights_bytes(config, quant),
        embedding_bytes=config.vocab_size * embedding_layout(config, quant).stride,
        max_context=max_context,
        kv_block_bytes=kv.block_bytes,
        kv_cache_bytes=kv.blocks(max_context) * kv.block_bytes,
        segment=segment_shape(config, quant),
        stream=stream_shape(config, quant),
        activation_bytes=wide,
        decode_activation_bytes=narrow,
        pass_tokens=widest,
        process_bytes=process_bytes + PROCESS_ALLOWANCE_BYTES,
        draft_bytes=draft_bytes(config, quant, runtime, threads, streams, draft_model_bytes),
    )
    predictors = predictors if runtime.sparsity == "predicted" else None
    predicted = predictors is not None
    if runtime.sparsity in GATED or predicted:
        slots = slot_shape(config, quant, whole=predicted)
        selecting = neuron_table_bytes(config) + (0 if predicted else gates_bytes(config, quant))
        wide, narrow = (
            sparse_activation_bytes(config, runtime, predictors, tokens)
            for tokens in (widest, min(widest, DECODE_TOKENS))
        )
        plan = replace(
            plan,
            weights_bytes=plan.weights_bytes + selecting,
            predictor_bytes=0 if predictors is None else predictors_bytes(config, predictors),
            segment=slots,
            stream=fetch_shape(slots.slot_bytes),
            activation_bytes=plan.activation_bytes + wide,
            decode_activation_bytes=plan.decode_activation_bytes + narrow,
            sparsity=runtime.sparsity,
        )
    if runtime.backend == "mlx":
        return _mlx_plan(plan, config, quant, runtime, predictors, streams, operand_bytes)
    return plan if runtime.backend != "reference" else _reference_plan(plan, config, quant, runtime)


def _mlx_plan(
    plan: Plan,
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    predictors: Predictors | None,
    streams: MultiStreams | None,
    operand_bytes: int,
) -> Plan:
    """That engine holds scales in its operands' type, and streams a segment at a time."""
    sparse = isinstance(plan.segment, SlotShape)
    adapters = streams if runs_streams(runtime.speculation, streams) else None
    more = mlx_weights_bytes(config, quant, predictors, runtime.sparsity in GATED, operand_bytes)
    return replace(
        plan,
        weights_bytes=plan.weights_bytes + more,
        segment=plan.segment if sparse else mlx_segment_shape(config, quant, operand_bytes),
        stream=replace(plan.stream, packed_bytes=mlx_stage_bytes(config, quant, operand_bytes))
        if sparse
        else mlx_stream_shape(config, quant, operand_bytes),
        draft_bytes=plan.draft_bytes + mlx_stream_bytes(config, adapters, operand_bytes),
    )


def _reference_plan(plan: Plan, config: ModelConfig, quant: QuantConfig, runtime: RuntimeConfig) -> Plan:
    """That backend holds every matrix in float32, reads embedding rows from flash and streams nothing."""
    activations = plan.activation_bytes + reference_bytes(config, runtime)
    return replace(
        plan,
        weights_bytes=4 * matrix_elements(config),
        embedding_bytes=0,
        segment=replace(segment_shape(config, quant), per_layer=0),
        stream=StreamShape(0, 0, 0, 0),
        activation_bytes=activations,
        decode_activation_bytes=activations,
    )
