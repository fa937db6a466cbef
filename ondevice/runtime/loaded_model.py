"""A loaded model, or a part of one, under its budget: reader, backend, weights, neurons and states.

Only the thread that created it may use it. It allocates by the plan of its resolved model (`resolving.py`).
`engine.py` generates texts with it; on other machines that share a model, `distributed/layer_server.py` runs
its layers.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import replace

from ondevice.backends.budgeted import BudgetedBackend
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.budget.claims import Claim, replanned
from ondevice.budget.plan import Plan
from ondevice.budget.sizes import FETCH_DEPTH, MATRIX_SLOTS, MatrixShape, SlotShape
from ondevice.callbacks import IsCancelled
from ondevice.errors import check_thread, system_refusals
from ondevice.flash.cost_model import UNMEASURED, CostModel, device_costs
from ondevice.flash.reader import FlashReader
from ondevice.meter import Counters
from ondevice.model.layer_range import LaterLayers
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.stream_loading import load_streams
from ondevice.model.transformer import Transformer
from ondevice.runtime.backend_choice import make_backend
from ondevice.runtime.models import operating_point
from ondevice.runtime.neuron_memory import NeuronMemory, NoNeuronMemory, WeightQuota, open_neuron_memory
from ondevice.runtime.resolving import ResolvedModel
from ondevice.runtime.state_binding import open_prompt_cache, shared_chunk
from ondevice.runtime.state_pool import StatePool
from ondevice.sparsity.fetch import DEFAULT_FETCH, FetchOptions
from ondevice.sparsity.matrix_stream import MatrixStream
from ondevice.speculation.registry import is_drafter
from ondevice.stats import RankStats
from ondevice.units import format_bytes, process_memory, trim_heap

log = logging.getLogger(__name__)


class LoadedModel:
    """The parts of a loaded model. `transformer` runs it."""

    kv: StatePool
    transformer: Transformer
    _backend: BudgetedBackend
    _quota: WeightQuota

    def __init__(
        self,
        resolved: ResolvedModel,
        cancelled: IsCancelled,
        fetch: FetchOptions = DEFAULT_FETCH,
        later: LaterLayers | None = None,
    ) -> None:
        """Load a model.

        Args:
            resolved: the model, its options and its plan.
            cancelled: called between two pieces of the weights; if it holds, Cancelled is raised.
            fetch: how selected neurons are kept and read.
            later: the layers that other machines run. None if there are none, and on these machines.

        Raises BudgetError before anything is read, and FlashReadError and BundleError for damaged weights.
        """
        resolved.require_fit()
        if later is not None:
            resolved = replace(resolved, widths=later.narrowed(resolved.widths))
        self.plan = resolved.plan
        self._thread = threading.get_ident()
        self._bundle, self._runtime, self._later = resolved.bundle, resolved.runtime, later
        self._loaded_bytes = 0
        """Bytes of weights certainly in memory, without the embedding table; 0 until loading ends."""
        self._embedding_bytes = 0
        self._neurons: NeuronMemory = NoNeuronMemory()
        self._matrices: MatrixStream | None = None
        """The matrices of every token, if they may come from flash."""
        self._parts = ExitStack()
        """Parts that `close` closes, in reverse order."""
        self._claim = Claim(self._held_bytes)
        self._parts.callback(self._claim.release)
        if later is not None:
            self._parts.callback(later.end)
        with ExitStack() as undo:
            undo.callback(self.close)
            undo.enter_context(system_refusals())
            self.plan = self._claim.promise(self.plan, self._bundle.name)
            self._load(resolved, cancelled, fetch)
            self._loaded(resolved)
            undo.pop_all()

    def _load(self, resolved: ResolvedModel, cancelled: IsCancelled, fetch: FetchOptions) -> None:
        bundle, runtime, plan, later = self._bundle, self._runtime, self.plan, self._later
        self._reader, costs = _open_reader(resolved)
        self._parts.callback(self._reader.close)
        self.io = self._reader.io
        """The I/O mode of flash reads: `direct` or `buffered`."""
        self._backend = make_backend(bundle.config, bundle.quant, runtime, plan)
        self._parts.callback(self._backend.close)
        self.kernel_target = self._backend.target
        """The compute target: an instruction set, `mlx-gpu`, `mlx-cpu` or `numpy`."""
        self.transformer = _load_transformer(resolved, self._reader, self._backend, cancelled, later)
        self._parts.callback(self._forget_model)
        if plan.matrices is not None:
            self._matrices = _open_matrices(plan.matrices, self._backend, self._reader)
            self._parts.callback(self._matrices.close)
        self._neurons = open_neuron_memory(bundle, plan, self._backend, self._reader, costs, fetch, cancelled)
        self._parts.callback(self._neurons.close)
        self._quota = WeightQuota(self._neurons, self._matrices, self._backend, plan, fetch.keep)
        self._quota.keep_to(plan, plan.kv_block_bytes)
        layout = KVLayout(bundle.config, runtime.kv_bits, is_drafter(runtime.speculation))
        if runtime.backend == "cpu":
            layout = replace(layout, pass_tokens=plan.pass_tokens)
        self.transformer.equal_rows = resolved.widths.chain
        store = open_prompt_cache(resolved, self.kernel_target)
        yield_to, chunk = self._quota.yield_to, shared_chunk(resolved)
        self.kv = StatePool(layout, plan, self._claim, self._backend, yield_to, store, later, chunk)
        self._parts.callback(self.kv.close)

    def _loaded(self, resolved: ResolvedModel) -> None:
        """Note that everything is loaded."""
        self._reader.trim()
        trim_heap()
        self._embedding_bytes = self.plan.embedding_bytes if self.plan.embedding_resident else 0
        self._loaded_bytes = resolved.loaded_bytes
        log.info("loaded %s: %s planned", self._bundle.name, format_bytes(self.plan.total_bytes))

    @property
    def feed_forward_bytes(self) -> int:
        """Bytes of the memory for neurons."""
        return self._neurons.nbytes

    def counters(self) -> Counters:
        """Running totals since the model was loaded."""
        flash, neurons, backend = self._reader.stats, self._neurons, self._backend
        return Counters(
            ranks=() if self._later is None else self._later.stats(self.rank_stats()),
            flash_bytes_read=flash.bytes_read,
            flash_reads=flash.reads,
            flash_read_seconds=flash.read_seconds,
            flash_cpu_seconds=flash.cpu_seconds,
            waited_seconds=neurons.times.waited + (self._matrices.waited if self._matrices else 0.0),
            managed_seconds=neurons.times.managed,
            neuron_cache_hits=neurons.hits,
            neuron_cache_lookups=neurons.lookups,
            prefetched_used=neurons.prefetching.used,
            prefetch_wasted_bytes=neurons.prefetching.wasted_bytes,
            synchronisations=backend.synchronisations,
            synchronised_seconds=backend.synchronised_seconds,
            peak_memory_bytes=process_memory().peak_bytes,
        )

    def rank_stats(self) -> RankStats:
        """The stats of this machine's part of a shared model, except those of messages."""
        config = self._bundle.config
        return RankStats(
            first_layer=config.part.first,
            layers=config.num_layers,
            budget_bytes=self.plan.budget_bytes,
            peak_memory_bytes=process_memory().peak_bytes,
            flash_bytes_read=self._reader.stats.bytes_read,
        )

    def fill_ahead(self) -> bool:
        """Do a step of idle work: read a few neurons or experts that are likely to be used.

        Returns False if there is nothing to do. Neurons are read only if their hotness is known, because a
        prompt uses few of them.
        """
        check_thread(self._thread)
        wanted = self._bundle.hotness is not None or self._bundle.config.experts is not None
        return wanted and self._neurons.fill()

    @property
    def replanned(self) -> Plan:
        """The plan, renewed with what other models claim now; it may not fit. Safe from any thread."""
        return replanned(self.plan, self._claim)

    def set_budget(self, budget_bytes: int) -> None:
        """Keep to a new budget set by the user. Raises BudgetError, and changes nothing, if it is
        too small.
        """
        self.set_plan(self.plan.with_budget(budget_bytes))

    def set_plan(self, plan: Plan, emptied: bool = False) -> None:
        """Keep to a new plan of the same model. Raises BudgetError, and changes nothing, if it doesn't fit.

        emptied: whether neurons start with the least memory, as after loading.
        """
        check_thread(self._thread)
        plan = self._claim.promise(plan, self._bundle.name)
        if emptied:
            self._quota.clear()
        self._keep_to(plan)

    def shift_budget(self, budget_bytes: int) -> bool:
        """Keep to a budget that is at most the user's. Returns False if other models have claimed
        the memory.
        """
        check_thread(self._thread)
        plan = self.plan.with_budget(budget_bytes)
        if not self._claim.follow(plan):
            return False
        self._keep_to(plan)
        return True

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._loaded_bytes = 0  # From here on, no weights are certainly in memory.
        self._parts.close()
        self._neurons = NoNeuronMemory()
        self._backend = self._quota = None  # type: ignore[assignment]

    def _forget_model(self) -> None:
        """Drop cyclic references, so that memory is freed without the garbage collector."""
        self.transformer = None  # type: ignore[assignment]

    def grow_weights(self, kv: SequenceState, tokens: int) -> None:
        """Give weights the memory that is left once kv holds `tokens` tokens."""
        if self._later is not None:
            self._later.expect(kv, tokens)
        grown = max(0, kv.layout.nbytes(min(tokens, self.plan.max_context)) - kv.nbytes)
        self._quota.grow(self.kv.nbytes + grown)

    def before_pass(self, batch: ForwardBatch) -> None:
        """Make room for a pass over `batch`."""
        self._quota.before_pass(len(batch.tokens), self.kv.nbytes)

    def _keep_to(self, plan: Plan) -> None:
        self.plan = plan
        self._backend.keep_to(plan.budget_bytes)
        if not plan.embedding_resident:
            self._embedding_bytes = 0
            self._backend.hold_embedding(False)
        self.kv.keep_to(plan)
        self._quota.keep_to(plan, self.kv.nbytes)
        if plan.embedding_resident:
            with system_refusals():
                self._backend.hold_embedding(True)
            self._embedding_bytes = plan.embedding_bytes
            self._reader.trim()

    def _held_bytes(self) -> int:
        """Bytes that are certainly in memory; 0 until loading has ended. Safe from any thread."""
        if not self._loaded_bytes:
            return 0
        held = self._loaded_bytes + self._embedding_bytes + self.kv.nbytes + self._neurons.filled_bytes
        return held if self._matrices is None else held + self._matrices.filled_bytes


def _open_reader(resolved: ResolvedModel) -> tuple[FlashReader, CostModel]:
    """A reader of the model's files, and the costs of its reads, measured if neurons are selected."""
    bundle, runtime, segment = resolved.bundle, resolved.runtime, resolved.plan.segment
    files = bundle_files(bundle, runtime.sparsity, resolved.runs_streams)
    of_experts = bundle.config.experts is not None
    if of_experts or not isinstance(segment, SlotShape):
        # Large reads need few threads. Experts arrive while others are multiplied, which one thread disturbs
        # less than several.
        return FlashReader(files, runtime.io, ring=of_experts), UNMEASURED
    costs = device_costs([bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)])
    threads = min(FETCH_DEPTH, costs.threads(segment.slot_bytes))
    return FlashReader(files, runtime.io, threads, ring=True), costs


def _open_matrices(shape: MatrixShape, backend: BudgetedBackend, reader: FlashReader) -> MatrixStream:
    """The stream that reads the matrices of every token from flash."""
    assert isinstance(backend, CpuBackend)
    return MatrixStream(
        backend.streamed,
        reader,
        piece_bytes=shape.piece_bytes,
        slot_bytes=shape.slot_bytes,
        slots=MATRIX_SLOTS,
    )


def _load_transformer(
    resolved: ResolvedModel,
    reader: FlashReader,
    backend: BudgetedBackend,
    cancelled: IsCancelled,
    later: LaterLayers | None,
) -> Transformer:
    bundle, runtime = resolved.bundle, resolved.runtime
    point = operating_point(runtime, bundle.predictors)
    streams_matrices = resolved.plan.matrices is not None
    weights = load_weights(bundle, reader, backend, cancelled, runtime.sparsity, point, streams_matrices)
    streams = None
    if resolved.runs_streams:
        last = len(bundle_files(bundle, runtime.sparsity))
        streams = load_streams(bundle, reader, backend, last, cancelled)
    config = bundle.config.within(resolved.plan.max_context)
    return Transformer(config, backend, weights, streams, later)
