"""Memory for a loaded model's neurons: the object that holds them, and the quota that the plan allows it."""

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
    """The memory that holds a model's neurons and feeds them to its layers.

    It is a SegmentPool in dense mode, a NeuronFetcher where neurons are selected, an ExpertFetcher in models
    with experts, within WholeExperts for `mlx`, and NoNeuronMemory for a backend that holds every neuron
    itself.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of memory for neurons, filled or not."""
        ...

    @property
    def filled_bytes(self) -> int:
        """Bytes that neurons are sure to hold. Safe from any thread."""
        ...

    @property
    def lookups(self) -> int:
        """Neurons that passes have multiplied, counted once per pass and layer."""
        ...

    @property
    def hits(self) -> int:
        """Lookups whose neuron was in memory when the pass came to its layer."""
        ...

    @property
    def times(self) -> PassTimes:
        """Seconds that passes have waited for neurons and managed their memory."""
        ...

    @property
    def prefetching(self) -> PrefetchQuality: ...

    def resize(self, quota: Sequence[int]) -> None:
        """Keep to a quota of segments, divided as the plan's shape divides it."""
        ...

    def keep_dense(self, quota: Sequence[int]) -> None:
        """Allow each layer that many segments of neurons that aren't an expert's, as `Plan.dense_quota`."""
        ...

    def fill(self) -> bool:
        """Read a little ahead while the model is idle. Returns False if there is nothing more to read."""
        ...

    def close(self) -> None:
        """Free all memory. Idempotent."""
        ...


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
    """Make the neuron memory of a model by its plan. It has no segments yet but `Plan.dense_segments`.

    Args:
        bundle: The model.
        plan: Its plan.
        backend: The backend that has loaded its layers.
        reader: Reads the bundle's files.
        costs: The costs of that reader's reads.
        options: How selected neurons are kept and read.
        cancelled: Asked between two pieces of the neurons that are read now.

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
    """`open_neuron_memory` of a model with experts."""
    config, segment, layers = bundle.config, plan.segment, backend.feed_forwards
    assert isinstance(segment, SlotShape)
    with ExitStack() as undo:
        dense = None
        if plan.dense is not None:
            dense = segment_pool(backend, reader, plan.dense, plan.buffers)
            # Pool and layers refer to each other, so only `close` frees what it holds at once.
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
    """Provides a loaded model's layers with neurons in these segments, read through these buffers."""
    return SegmentPool(
        backend.feed_forwards,
        reader,
        segment_bytes=segments.layer_bytes,
        piece_neurons=buffers.neurons,
        slot_bytes=buffers.slot_bytes,
        slots=buffers.slots,
    )


def _expert_shares(bundle: Bundle) -> list[Float32] | None:
    """For each layer with experts, (E,) share of the calibration's tokens that chose each."""
    use, counts = bundle.expert_use, bundle.expert_counts()
    return None if use is None or counts is None else list(counts.astype(np.float32) / use.tokens)


class WeightQuota:
    """The quota of a model's weights: units of matrices, then segments of neurons.

    The plan allows what keys and values and scratch memory leave. Forward passes fill it. Wide passes take
    scratch memory from weights; decoding gives it back.
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
        neurons: The memory that gets the segments.
        matrices: The memory that gets the units; None where matrices always stay.
        backend: The backend, which holds scratch memory.
        plan: The model's plan.
        keep: True if neurons may stay in memory after the pass that read them.
        """
        self._neurons = neurons
        self._matrices = matrices
        self._backend = backend
        self._plan = plan
        self._keep = keep
        self._pass_tokens = DECODE_TOKENS
        """Tokens of the widest pass whose scratch memory is held."""
        self._held = Held(0, 0)
        """The units and segments that the plan allows now."""

    @property
    def segments(self) -> int:
        """Segments within the quota now."""
        return self._held.segments

    @property
    def holds_draft(self) -> bool:
        """Whether the matrices that a draft's pass needs are within the quota now."""
        shape = self._plan.matrices
        return shape is None or self._held.units >= shape.draft_units

    def keep_to(self, plan: Plan, kv_bytes: int) -> None:
        """Allocate what a plan allows beside `kv_bytes` of keys and values."""
        self._plan = plan
        self._neurons.keep_dense(plan.dense_quota)
        self._allocate(self._room(kv_bytes))

    def clear(self) -> None:
        """Shrink to the fewest weights that work."""
        self._allocate(Held(0, self._plan.segment.least))

    def grow(self, kv_bytes: int) -> None:
        """Take the memory that keys and values of `kv_bytes` will leave."""
        room = self._room(kv_bytes)
        if room > self._held:
            self._allocate(room)

    def yield_to(self, kv_bytes: int) -> None:
        """Give up the weights that keys and values of `kv_bytes` leave no room for."""
        room = self._room(kv_bytes)
        if room < self._held:
            self._allocate(room)

    def before_pass(self, tokens: int, kv_bytes: int) -> None:
        """Make room for a pass over `tokens` tokens: a wide one takes memory, decoding gives it back."""
        if tokens > self._pass_tokens:
            self._pass_tokens = tokens
            self.yield_to(kv_bytes)
        elif tokens <= DECODE_TOKENS < self._pass_tokens and self._plan.offloads_weights:
            self._backend.trim()
            trim_heap()
            self._pass_tokens = DECODE_TOKENS
            self._allocate(self._room(kv_bytes))

    def _room(self, kv_bytes: int) -> Held:
        """Weights that fit beside `kv_bytes` of keys and values. More bytes never compare as less."""
        return self._plan.held_weights(kv_bytes, self._pass_tokens)

    def _allocate(self, held: Held) -> None:
        shape = self._plan.segment
        if self._matrices is not None:
            self._matrices.resize(held.units)
        self._neurons.resize(shape.quota(held.segments if self._keep else shape.least))
        self._held = held
