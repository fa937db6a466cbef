"""Memory for a loaded model's neurons, and how much of it the plan allows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from ondevice.backends.base import Float32
from ondevice.backends.budgeted import BudgetedBackend
from ondevice.budget.plan import Held, Plan
from ondevice.budget.sizes import (
    DECODE_TOKENS,
    BufferShape,
    SegmentShape,
    SlotShape,
    fetch_neurons,
    prefetch_neurons,
)
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import Cancelled, IsCancelled, never_cancelled
from ondevice.flash.cost_model import CostModel
from ondevice.flash.reader import FlashReader
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.fetch import FetchOptions, NeuronFetcher
from ondevice.sparsity.held_experts import HeldExperts
from ondevice.sparsity.matrix_stream import MatrixStream
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import make_policy
from ondevice.sparsity.prefetch import PrefetchQuality
from ondevice.sparsity.segments import SegmentPool
from ondevice.stats import PassTimes
from ondevice.units import trim_heap


class NeuronMemory(Protocol):
    """The memory that holds a model's neurons and provides them to its layers.

    It is a SegmentPool in dense mode, a NeuronFetcher if neurons are selected, an ExpertFetcher in models
    with experts, within WholeExperts for `mlx`, and NoNeuronMemory for a backend that holds every neuron
    itself.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of memory for neurons, filled or not."""

    @property
    def filled_bytes(self) -> int:
        """Bytes that certainly hold neurons. Safe from any thread."""

    @property
    def lookups(self) -> int:
        """Number of lookups: neurons that were multiplied, counted once per pass and layer."""

    @property
    def hits(self) -> int:
        """Number of lookups whose neuron was already in memory before the layer."""

    @property
    def times(self) -> PassTimes:
        """Seconds spent on waiting for neurons, and on managing their memory."""

    @property
    def prefetching(self) -> PrefetchQuality: ...

    def resize(self, quota: Sequence[int]) -> None:
        """Keep to a quota of segments, in the form of the plan's `quota`."""

    def keep_dense(self, quota: Sequence[int]) -> None:
        """Keep to a quota of segments for each layer's dense part, in the form of `Plan.dense_quota`."""

    def fill(self) -> bool:
        """Read a little ahead while the model is idle. Returns False if there is nothing to read."""

    def close(self) -> None:
        """Free all memory. Idempotent."""


class NoNeuronMemory:
    """The neuron memory of a backend that holds every neuron itself, and of a closed model."""

    nbytes = filled_bytes = lookups = hits = 0
    times = PassTimes()
    prefetching = PrefetchQuality()

    def resize(self, quota: Sequence[int]) -> None:
        """Do nothing: there are no segments."""

    def keep_dense(self, quota: Sequence[int]) -> None:
        """Do nothing: there are no segments."""

    def fill(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there is no memory to free."""


def open_neuron_memory(
    bundle: Bundle,
    plan: Plan,
    backend: BudgetedBackend,
    reader: FlashReader,
    costs: CostModel,
    options: FetchOptions,
    cancelled: IsCancelled = never_cancelled,
) -> NeuronMemory:
    """The neuron memory that a model's plan describes. It is empty at first, except for
    `Plan.dense_segments`.

    Args:
        bundle: the model.
        plan: its plan.
        backend: the backend that has loaded its layers.
        reader: reads the bundle's files.
        costs: the costs of that reader's reads.
        options: how selected neurons are kept and read.
        cancelled: called between two pieces of neurons.

    Raises FlashReadError, MemoryError, and Cancelled if `cancelled()` holds.
    """
    config, segment, layers = bundle.config, plan.segment, backend.feed_forwards
    if not layers:
        return NoNeuronMemory()
    if config.experts is not None:
        return _expert_memory(bundle, plan, backend, reader, options, cancelled)
    if not isinstance(segment, SlotShape):
        return segment_pool(backend, reader, segment, plan.buffers)
    cache = NeuronCache(
        config.widths,
        slot_bytes=segment.slot_bytes,
        segment_slots=segment.slots,
        reserve=segment.reserve,
        policy=make_policy(options.policy, config.widths, bundle.frequencies()),
        keep=options.keep,
    )
    return NeuronFetcher(
        layers,
        reader,
        cache,
        part_bytes=bundle.neuron_file(0).crc_units,
        batch=fetch_neurons(config),
        prefetched=prefetch_neurons(config),
        costs=costs,
        options=options,
    )


def _expert_memory(
    bundle: Bundle,
    plan: Plan,
    backend: BudgetedBackend,
    reader: FlashReader,
    options: FetchOptions,
    cancelled: IsCancelled,
) -> NeuronMemory:
    """The neuron memory of a model with experts. Arguments and errors are those of `open_neuron_memory`."""
    config, segment, layers = bundle.config, plan.segment, backend.feed_forwards
    assert isinstance(segment, SlotShape)
    with ExitStack() as undo:
        dense = None
        if plan.dense is not None:
            dense = segment_pool(backend, reader, plan.dense, plan.buffers)
            # Pool and layers refer to each other, so only `close` frees memory at once.
            undo.callback(dense.close)
            dense.resize(plan.dense_quota)
            if not dense.hold(cancelled):
                raise Cancelled
        fetcher = ExpertFetcher(
            layers,
            reader,
            [layer.experts for layer in config.layers],
            segment.slot_bytes,
            segment.slots,
            segment.reserve,
            options.keep,
            options.prefetch and backend.name == "cpu",
            _expert_shares(bundle),
            dense,
            config.experts,
        )
        undo.pop_all()
    if backend.name == "mlx" and config.expert_layers:
        return HeldExperts(fetcher, layers, segment.least, segment.total)
    return fetcher


def segment_pool(
    backend: BudgetedBackend, reader: FlashReader, segments: SegmentShape, buffers: BufferShape
) -> SegmentPool:
    """A pool that provides a backend's layers with neurons."""
    return SegmentPool(
        backend.feed_forwards,
        reader,
        segment_bytes=segments.layer_bytes,
        piece_neurons=buffers.neurons,
        slot_bytes=buffers.slot_bytes,
        slots=buffers.slots,
    )


def _expert_shares(bundle: Bundle) -> list[Float32] | None:
    """For each layer with experts, (E,) the share of calibration tokens that chose each expert. None without
    a calibration.
    """
    use, counts = bundle.expert_use, bundle.expert_counts()
    return None if use is None or counts is None else list(counts.astype(np.float32) / use.tokens)


class WeightQuota:
    """The quota of a model's weights: units of matrices, then segments of neurons.

    Weights get what the plan has left after keys, values and scratch memory, and forward passes fill it. Wide
    passes take scratch memory from weights, and decoding gives it back.
    """

    def __init__(
        self,
        neurons: NeuronMemory,
        matrices: MatrixStream | None,
        backend: BudgetedBackend,
        plan: Plan,
        keep: bool,
    ) -> None:
        """Args:
        neurons: the memory of segments.
        matrices: the memory of units; None if matrices are always resident.
        backend: holds the scratch memory.
        plan: the model's plan.
        keep: whether neurons may stay in memory after a pass.
        """
        self._neurons = neurons
        self._matrices = matrices
        self._backend = backend
        self._plan = plan
        self._keep = keep
        self._pass_tokens = DECODE_TOKENS
        """Tokens of the widest pass with allocated scratch memory."""
        self._held = Held(0, 0)
        """The present quota of units and segments."""

    @property
    def segments(self) -> int:
        """The number of segments that neurons may hold now."""
        return self._held.segments

    @property
    def holds_draft(self) -> bool:
        """Whether all matrices that a draft's pass needs may be in memory now."""
        shape = self._plan.matrices
        return shape is None or self._held.units >= shape.draft_units

    def keep_to(self, plan: Plan, kv_bytes: int) -> None:
        """Keep to a plan, when keys and values take `kv_bytes`."""
        self._plan = plan
        self._neurons.keep_dense(plan.dense_quota)
        self._allocate(self._room(kv_bytes))

    def clear(self) -> None:
        """Shrink to the least memory that works."""
        self._allocate(Held(0, self._plan.segment.least))

    def grow(self, kv_bytes: int) -> None:
        """Grow to the memory that is left when keys and values take `kv_bytes`."""
        room = self._room(kv_bytes)
        if room > self._held:
            self._allocate(room)

    def yield_to(self, kv_bytes: int) -> None:
        """Shrink to the memory that is left when keys and values take `kv_bytes`."""
        room = self._room(kv_bytes)
        if room < self._held:
            self._allocate(room)

    def before_pass(self, tokens: int, kv_bytes: int) -> None:
        """Make room for a pass over `tokens` tokens. A wide pass takes memory from weights, decoding gives it
        back.
        """
        if tokens > self._pass_tokens:
            self._pass_tokens = tokens
            self.yield_to(kv_bytes)
        elif tokens <= DECODE_TOKENS < self._pass_tokens and self._plan.offloads_weights:
            self._backend.trim()
            trim_heap()
            self._pass_tokens = DECODE_TOKENS
            self._allocate(self._room(kv_bytes))

    def _room(self, kv_bytes: int) -> Held:
        """The weights that fit when keys and values take `kv_bytes`. More memory never gives
        fewer weights.
        """
        return self._plan.held_weights(kv_bytes, self._pass_tokens)

    def _allocate(self, held: Held) -> None:
        shape = self._plan.segment
        if self._matrices is not None:
            self._matrices.resize(held.units)
        self._neurons.resize(shape.quota(held.segments if self._keep else shape.least))
        self._held = held
