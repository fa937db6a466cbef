"""The one arithmetic for memory: it adds up a model's memory and divides a budget.

`inspect`, the loader and the allocator all use this module. Everything here is a pure function of a
`MemoryModel`, which has the sizes of the model's parts, and of measured numbers: the process's memory, other
models' claims, a control group's limit. All sizes are bytes.

A budget covers the whole process: matrices that every token uses, the key/value cache, feed-forward memory in
equal segments, read buffers, the scratch memory of a forward pass, the interpreter and its libraries, and
other models. The key/value cache of one full context is guaranteed; as it grows, feed-forward segments yield
to it. While tokens are decoded one by one, segments also have the scratch memory of a long prompt's passes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from operator import index
from typing import NamedTuple

from ondevice.budget.memory_model import MemoryModel
from ondevice.budget.sizes import DECODE_TOKENS, BufferShape, MatrixShape, SegmentShape, SlotShape
from ondevice.errors import UsageError
from ondevice.records import dataclass
from ondevice.units import PAGE_BYTES, MemoryRoom

PROCESS_ALLOWANCE_BYTES = 4 << 20
"""Thread stacks, allocator slack and the interpreter's growth after the process was measured."""
REPEAT_MARGIN_BYTES = 1 << 20
"""Margin of the reported minimum over the one that is needed: runs measure their process differently."""
LOADING_BYTES = 52 << 20
"""Most memory that loading takes in addition to the weights (`model/loading.py`).

It has pieces read ahead, remembered blocks, and one block in use per reading thread. It is freed before keys,
values and feed-forward segments are allocated."""
LOADING_PREDICTORS_BYTES = 16 << 20
"""Most memory for remembered blocks of the predictors' file, read alternately with the resident one."""
QUOTA_MARGIN_BYTES = 12 << 20
"""Scratch memory of wide forward passes that neurons never get, as passes leave the heap up to 7 MB larger
(`long_ceiling.py`)."""


class Held(NamedTuple):
    """What stays in memory: the number of matrix units, and the number of segments of neurons."""

    units: int
    segments: int


@dataclass(frozen=True)
class Plan:
    """The memory of every part of a model under a budget. Apart from `budget_bytes`, no field depends on the
    budget.
    """

    budget_bytes: int
    weights_bytes: int
    """Vectors, checksum tables and matrices that always stay, as every token uses them."""
    embedding_bytes: int
    """The embedding table; its rows stay on flash unless everything fits. 0 if they come from the head."""
    max_context: int
    """Tokens of context whose keys and values are guaranteed."""
    kv_block_bytes: int
    """Keys and values, and states of recurrent layers, of a first token."""
    kv_cache_bytes: int
    """Keys and values, and states of recurrent layers, of one full context."""
    segment: SegmentShape | SlotShape
    """Pieces of feed-forward memory: ranges of neurons in dense mode, else slots of neurons."""
    buffers: BufferShape
    activation_bytes: int
    """Scratch memory of the widest forward pass."""
    decode_activation_bytes: int
    """Scratch memory of a forward pass over DECODE_TOKENS tokens or fewer, with all rows of streams."""
    pass_tokens: int
    """Tokens of the widest forward pass."""
    process_bytes: int
    kv_marks_bytes: int = 0
    """Most that windowed layers keep beside that, where there is room, for a context to go back."""
    sparsity: str = "dense"
    predictor_bytes: int = 0
    draft_bytes: int = 0
    constraint_bytes: int = 0
    """Memory of texts' constraints, taken from the first text that has one."""
    opening_bytes: int = 0
    """The process while the tokenizer is read, before everything else."""
    unread_bytes: int = 0
    """Most memory of the tokenizer if it hasn't been read; once read, it counts as the process's."""
    others_bytes: int = 0
    """Memory that other models of this process hold or have claimed."""
    limit: MemoryRoom | None = None
    """The control group with the lowest limit; None if none has one."""
    wanted_context: int = 0
    """The default context if it was shortened to `max_context` to fit; else 0."""
    context_share: float = 0.0
    """Share of the budget that `max_context`, longer than the default, was given; 0 if it is no longer."""
    looks_up_head: bool = False
    """Whether rows of the embedding are looked up in the head."""
    matrices: MatrixShape | None = None
    """Units of the matrices of every token, if these may come from flash; None if they always stay."""
    dense: SegmentShape | None = None
    """Pieces for neurons that aren't experts', in a model with experts; None if they always stay."""

    @cached_property
    def full_bytes(self) -> int:
        """The budget at which everything stays in memory, with a full context. A larger one changes
        nothing.
        """
        resident = self.resident_budget_bytes + self.embedding_bytes + self.kv_marks_bytes
        return max(resident, self.minimum_budget_bytes)

    @cached_property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget that works with a full context and the fewest segments, with a margin."""
        return self.least_budget_bytes + REPEAT_MARGIN_BYTES

    @cached_property
    def least_budget_bytes(self) -> int:
        """The smallest budget that works, like `minimum_budget_bytes`, but without the margin."""
        return max(self._bare_bytes, self._loading_bytes, self._opening_bytes)

    @property
    def may_lower(self) -> bool:
        """Whether a shorter context, or keys and values of fewer bits, might make the plan fit."""
        of_context = self.kv_cache_bytes + self.activation_bytes
        return self.budget_bytes >= max(self._bare_bytes - of_context, self._opening_bytes)

    @cached_property
    def resident_budget_bytes(self) -> int:
        """The smallest budget that holds all weights except the embedding table, and a full context."""
        segments = self.segment.bytes_of(self.segment.total) - self.segment.bytes_of(self.segment.least)
        if self.dense is not None:
            segments += self.dense.bytes_of(self.dense.total)
        bare = self._bare_bytes - self._shared_bytes + self._matrices_total
        return max(bare + segments, self._loading_bytes, self._opening_bytes)

    @property
    def minimum_parts(self) -> dict[str, int]:
        """The parts of `minimum_budget_bytes` in bytes, by the names that messages use."""
        parts = {
            "weights of every token": self.weights_bytes + self.predictor_bytes,
            f"KV cache of {self.max_context} token{'s' if self.max_context > 1 else ''}": self.kv_cache_bytes,
            "buffers and scratch memory": self.buffers.nbytes
            + self.activation_bytes
            + self.segment.bytes_of(self.segment.least),
            "matrices as they are read": self._streaming_bytes,
            "drafting": self.draft_bytes,
            "constraints of texts": self.constraint_bytes,
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
        """True if the budget is enough, and the process's control group allows the total."""
        # The kernel rounds a limit down to whole pages.
        return self.suffices and (
            self.limit is None or self.total_bytes < self.limit.limit_bytes + PAGE_BYTES
        )

    @property
    def suffices(self) -> bool:
        """True if the budget is enough. Limits of control groups aren't considered."""
        return self.budget_bytes >= self.least_budget_bytes

    @property
    def offloads_weights(self) -> bool:
        """True if some weights may have to come from flash."""
        return self.budget_bytes < self.resident_budget_bytes

    @property
    def selects_neurons(self) -> bool:
        """True if only some of the neurons are multiplied for a token."""
        return self.sparsity != "dense"

    @property
    def embedding_resident(self) -> bool:
        """True if the embedding table is held in memory."""
        return self.budget_bytes >= self.resident_budget_bytes + self.embedding_bytes

    @property
    def reads_once(self) -> bool:
        """True if tokens read only such weights from flash as stay in memory from then on."""
        # A plan without an embedding table reads a row of it for every token, unless that is in the head.
        return self.embedding_resident and (self.embedding_bytes > 0 or self.looks_up_head)

    @property
    def dense_segments(self) -> int:
        """Number of segments for neurons that belong to no expert: as many as fit with the fewest experts.

        Every token uses these neurons, so they get memory before experts that aren't needed at once, after a
        full context and the widest pass. Memory of shorter contexts and narrower passes goes to experts, so
        this number changes only with the budget.
        """
        if self.dense is None:
            return 0
        left = self.budget_bytes - self._bare_bytes + self._shared_bytes - self._matrices_total
        return self.dense.fitting(left) if self.offloads_weights else self.dense.total

    @property
    def dense_quota(self) -> tuple[int, ...]:
        """`dense_segments` divided among the layers; empty if no neurons outside experts come from flash."""
        return () if self.dense is None else self.dense.quota(self.dense_segments)

    @cached_property
    def held_units(self) -> int:
        """Number of units of `matrices` that stay in memory with a full context and in the widest pass."""
        return self.held_weights(self.kv_cache_bytes).units

    @property
    def holds_matrices(self) -> bool:
        """True if every matrix that all tokens use stays in memory with a full context and in the widest
        pass.
        """
        return self.matrices is None or self.held_units == len(self.matrices.unit_bytes)

    @property
    def resident_weights_bytes(self) -> int:
        return self.weights_bytes + self._kept_weights_bytes + self._matrix_bytes(self.held_units)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers for offloaded weights.

        Even if all weights fit, the first passes, and the first ones after the budget grows, read weights
        through them.
        """
        return self.buffers.nbytes

    @property
    def model_bytes(self) -> int:
        """Bytes of all of the model's weights in memory."""
        dense = 0 if self.dense is None else self.dense.bytes_of(self.dense.total)
        neurons = self.segment.bytes_of(self.segment.total)
        return self.weights_bytes + self._matrices_total + self.embedding_bytes + dense + neurons

    @property
    def neuron_cache_bytes(self) -> int:
        """Bytes of feed-forward memory that are left in the widest pass with a full context."""
        return self.segment.bytes_of(self.segments_for(self.kv_cache_bytes))

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, with a full context."""
        held = self._matrix_bytes(self.held_units) + self.neuron_cache_bytes
        return self._fixed_bytes + self.kv_cache_bytes + held

    @property
    def start_bytes(self) -> int:
        """The part of `total_bytes` that a text takes at first. Its keys and values grow block by block.

        If weights come from flash, neurons use the remaining bytes until then.
        """
        units, segments = self.held_weights(self.kv_block_bytes)
        held = self._matrix_bytes(units) + self.segment.bytes_of(segments)
        return min(self.total_bytes, self._fixed_bytes + self.kv_block_bytes + held)

    @property
    def kv_limit_bytes(self) -> int:
        """The most bytes that the key/value caches of all sessions may hold together."""
        held = self.segment.bytes_of(self.segment.least if self.offloads_weights else self.segment.total)
        held += self._shared_bytes if self.offloads_weights else self._matrices_total
        most = self.budget_bytes if self.limit is None else min(self.budget_bytes, self.limit.limit_bytes)
        return max(self.kv_cache_bytes, most - self._fixed_bytes - held)

    @property
    def claim_bytes(self) -> int:
        """The most bytes that the model itself may hold, with one full context: without the process and other
        models.
        """
        most = self.budget_bytes if self.offloads_weights else max(self.total_bytes, self._loading_bytes)
        return most - self.process_bytes - self.others_bytes

    def held_weights(self, kv_bytes: int, tokens: int | None = None) -> Held:
        """Weights that may be held with `kv_bytes` of key/value blocks: matrices first, then neurons.

        The weights that drafts use come before others: matrices of layers and of the draft head, then high
        planes of neurons.

        tokens: width of the widest pass whose scratch memory is held, by default the widest of all.
        """
        if not self.offloads_weights:
            return Held(0 if self.matrices is None else len(self.matrices.unit_bytes), self.segment.total)
        idle = 0 if tokens is None else self.activation_bytes - self.working_bytes(tokens)
        left = self.budget_bytes - self._fixed_bytes - kv_bytes + idle
        if self.matrices is None:
            return Held(0, self.segment.fitting(left))
        units = self.matrices.fitting(left - self.segment.bytes_of(self.segment.least))
        planes = self.segment.high_planes
        if planes and units > self.matrices.draft_units:
            with_planes = self.matrices.fitting(left - self.segment.bytes_of(planes))
            fewer = max(self.matrices.draft_units, with_planes)
            # Holding all units may take less than holding fewer, beside which there are copies of the others.
            if self.matrices.bytes_of(fewer) < self.matrices.bytes_of(units):
                units = fewer
        return Held(units, self.segment.fitting(left - self.matrices.bytes_of(units)))

    def segments_for(self, kv_bytes: int, tokens: int | None = None) -> int:
        """The segments part of `held_weights(kv_bytes, tokens)`."""
        return self.held_weights(kv_bytes, tokens).segments

    @property
    def kept_slots(self) -> int:
        """Number of slots that keep neurons or experts during decoding with a full context; 0
        without slots.
        """
        return self.kept_slots_for(self.kv_cache_bytes)

    def kept_slots_for(self, kv_bytes: int) -> int:
        """Number of slots that keep neurons or experts with `kv_bytes` of key/value blocks; 0
        without slots.
        """
        if not isinstance(self.segment, SlotShape):
            return 0
        slots = self.segments_for(kv_bytes, DECODE_TOKENS) * self.segment.slots
        return max(0, slots - self.segment.reserve)

    def working_bytes(self, tokens: int) -> int:
        """Scratch memory for passes of `tokens` tokens, with a margin. Linear between a decoding pass and the
        widest pass.
        """
        more = max(0, tokens - DECODE_TOKENS)
        span = max(1, self.pass_tokens - DECODE_TOKENS)
        idle = self.activation_bytes - self.decode_activation_bytes
        line = self.decode_activation_bytes + -(-idle * more // span)
        return min(self.activation_bytes, line + QUOTA_MARGIN_BYTES)

    def with_budget(self, budget_bytes: int) -> Plan:
        """The plan of the same model and process under another budget. Raises UsageError if it isn't a number
        of bytes.
        """
        try:
            return replace(self, budget_bytes=index(budget_bytes))
        except TypeError as error:
            raise UsageError(f"budget_bytes is {budget_bytes!r}; it must be a number of bytes") from error

    def to_json(self) -> dict[str, int | float | str | bool]:
        """The plan as `inspect --json` prints it; the `_bytes` parts add up to `total_bytes`.

        Parts are for the widest pass, counts of segments for decoding.
        """
        return {
            "budget_bytes": self.budget_bytes,
            "total_bytes": self.total_bytes,
            "start_bytes": self.start_bytes,
            "resident_weights_bytes": self.resident_weights_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "neuron_cache_bytes": self.neuron_cache_bytes,
            "predictor_bytes": self.predictor_bytes,
            "draft_bytes": self.draft_bytes,
            "constraint_bytes": self.constraint_bytes,
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
            "context_share": self.context_share,
            "limit_bytes": 0 if self.limit is None else self.limit.limit_bytes,
            "segment_bytes": self.segment.nbytes,
            "segments": self.segments_for(self.kv_cache_bytes, DECODE_TOKENS),
            "segments_at_start": self.segments_for(self.kv_block_bytes, DECODE_TOKENS),
            "segments_total": self.segment.total,
        }

    @property
    def _bare_bytes(self) -> int:
        """Total memory with a full context and the fewest feed-forward segments."""
        least = self.segment.bytes_of(self.segment.least) + self._streaming_bytes
        return self._always_bytes + self.buffers.nbytes + self.kv_cache_bytes + least

    @property
    def _streaming_bytes(self) -> int:
        """Bytes of the memory through which every pass reads matrices."""
        return 0 if self.matrices is None else self.matrices.streaming_bytes

    @property
    def _shared_bytes(self) -> int:
        """Bytes for copies of matrices that don't stay in memory. They are freed once all matrices stay."""
        return 0 if self.matrices is None else self.matrices.shared_bytes

    @property
    def _matrices_total(self) -> int:
        return 0 if self.matrices is None else self.matrices.total_bytes

    @property
    def _loading_bytes(self) -> int:
        """The peak memory during loading. Bytes that are read ahead exist twice: in a piece and in a
        block.
        """
        ahead = min(LOADING_BYTES, 2 * self.weights_bytes)
        ahead += min(LOADING_PREDICTORS_BYTES, self.predictor_bytes)
        return self._always_bytes - self.activation_bytes + ahead

    @property
    def _opening_bytes(self) -> int:
        return self.opening_bytes + self.others_bytes

    @property
    def _always_bytes(self) -> int:
        held = self.process_bytes + self.unread_bytes + self.others_bytes + self.constraint_bytes
        return held + self.weights_bytes + self.activation_bytes + self.predictor_bytes + self.draft_bytes

    @property
    def _kept_weights_bytes(self) -> int:
        """Bytes of dense segments, of the embedding table if it stays in memory, and of the slots through
        which units are read.
        """
        dense = 0 if self.dense is None else self.dense.bytes_of(self.dense_segments)
        slots = 0 if self.matrices is None else self.matrices.slots_bytes
        return dense + slots + (self.embedding_bytes if self.embedding_resident else 0)

    def _matrix_bytes(self, units: int) -> int:
        """Bytes of the matrices if `units` units stay in memory."""
        return 0 if self.matrices is None else self.matrices.bytes_of(units)

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of everything except the key/value cache, the segments and the units of matrices."""
        return self._always_bytes + self._kept_weights_bytes + self.staging_bytes


def plan_memory(memory: MemoryModel, *, budget_bytes: int, process_bytes: int) -> Plan:
    """Divide a budget among the parts of a model. A budget that is too small gives a plan that doesn't fit.

    process_bytes: memory of the process before anything of the model is loaded. Raises UsageError if the
    context in the options is longer than the model's.
    """
    kv, widest = memory.kv, memory.pass_tokens
    decoded = min(widest, DECODE_TOKENS) + memory.stream_rows
    return Plan(
        budget_bytes=budget_bytes,
        weights_bytes=memory.weights_bytes,
        embedding_bytes=memory.embedding_bytes,
        max_context=memory.max_context,
        kv_block_bytes=kv.nbytes(1),
        kv_cache_bytes=kv.nbytes(memory.max_context),
        kv_marks_bytes=kv.marks_bytes(memory.max_context),
        segment=memory.segment,
        buffers=memory.buffers,
        activation_bytes=_pass_bytes(memory, max(widest, decoded)),
        decode_activation_bytes=_pass_bytes(memory, decoded),
        pass_tokens=widest,
        process_bytes=process_bytes
        + PROCESS_ALLOWANCE_BYTES
        + memory.library_bytes
        + memory.prompt_cache_bytes,
        sparsity=memory.sparsity,
        predictor_bytes=memory.predictor_bytes,
        draft_bytes=memory.draft_bytes,
        looks_up_head=memory.looks_up_head,
        matrices=memory.matrices,
        dense=memory.dense,
    )


def _pass_bytes(memory: MemoryModel, tokens: int) -> int:
    """Scratch memory of a pass over `tokens` tokens, and of its messages to other machines."""
    return memory.activation_bytes(tokens) + memory.joined_bytes(tokens) + memory.message_bytes(tokens)
