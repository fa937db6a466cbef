"""A loaded model under its budget: load, generate, logits, fork, set_budget, close.

An engine belongs to the thread that made it and is used there only (`owner.py`). Elsewhere, methods that
touch its memory raise WrongThreadError. It allocates by the plan of its resolved model (`resolving.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ondevice.backends.base import Float32, KVLayout
from ondevice.backends.budgeted import BudgetedBackend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.row_invariance import ANY_ROWS
from ondevice.budget.claims import Claim, replanned
from ondevice.budget.plan import Plan
from ondevice.budget.sizes import FETCH_DEPTH, SlotShape, draft_nodes, logits_rows
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained
from ondevice.errors import OndeviceError, check_thread, system_refusals
from ondevice.flash.cost_model import UNMEASURED, CostModel, device_costs
from ondevice.flash.reader import FlashReader
from ondevice.generate import Event, Generator, Steps
from ondevice.meter import Counters
from ondevice.model.draft_head import load_draft_head
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.shared_passes import PassRequest, PassResult, no_pass
from ondevice.model.stream_loading import load_streams
from ondevice.model.transformer import Cancelled, Transformer
from ondevice.runtime.backend_choice import make_backend
from ondevice.runtime.draft_layers import open_draft_layer
from ondevice.runtime.draft_model import load_draft
from ondevice.runtime.joint_jobs import WAIT, JointJobs
from ondevice.runtime.models import operating_point
from ondevice.runtime.neuron_memory import NeuronMemory, NeuronQuota, NoNeuronMemory, open_neuron_memory
from ondevice.runtime.opening import open_datastore
from ondevice.runtime.resolving import ResolvedModel
from ondevice.runtime.state_binding import open_prompt_cache, prompt_cache_at
from ondevice.runtime.state_pool import StatePool
from ondevice.sparsity.fetch import DEFAULT_FETCH, FetchOptions
from ondevice.speculation.drafters.streams import MultiStreamDrafting
from ondevice.speculation.drafting import Drafting
from ondevice.speculation.registry import (
    MIN_PASS_SECONDS,
    Target,
    drafts_with_ngrams,
    is_drafter,
    make_drafter,
)
from ondevice.stats import GenerationStats
from ondevice.units import format_bytes, process_memory, trim_heap

log = logging.getLogger(__name__)


class Engine:
    """A loaded model. Generations are named by a key; each key keeps a key/value cache between them."""

    kv: StatePool
    _backend: BudgetedBackend
    _quota: NeuronQuota
    _generator: Generator
    _drafting: Drafting | None = None

    def __init__(
        self,
        resolved: ResolvedModel,
        cancelled: IsCancelled,
        fetch: FetchOptions = DEFAULT_FETCH,
        between_passes: Callable[[], None] = lambda: None,
    ) -> None:
        """Load a model.

        Args:
            resolved: The model, its options and its plan.
            cancelled: Asked between two pieces of the weights; Cancelled is raised when it holds.
            fetch: How selected neurons are kept and read.
            between_passes: Called between forward passes, and may set budgets.

        Raises BudgetError before anything is read, and FlashReadError and BundleError for damaged weights.
        """
        resolved.require_fit()
        self.plan = resolved.plan
        self._thread = threading.get_ident()
        self._between_passes = between_passes
        self._bundle, self._runtime = resolved.bundle, resolved.runtime
        self._loaded_bytes = 0
        """Bytes of weights that are surely in memory, the embedding table aside; 0 until loading ends."""
        self._embedding_bytes = 0
        self._neurons: NeuronMemory = NoNeuronMemory()
        self.joint = JointJobs(resolved.runtime.parallel, PassRequest, self._answered)
        """Runs generations together."""
        self._parts = ExitStack()
        """Parts that `close` closes, in reverse order."""
        self._claim = Claim(self._held_bytes)
        self._parts.callback(self._claim.release)
        with ExitStack() as undo:
            undo.callback(self.close)
            undo.enter_context(system_refusals())
            self.plan = self._claim.promise(self.plan, self._bundle.name)
            self._load(resolved, cancelled, fetch)
            undo.pop_all()

    def _load(self, resolved: ResolvedModel, cancelled: IsCancelled, fetch: FetchOptions) -> None:
        bundle, runtime, plan = self._bundle, self._runtime, self.plan
        self._reader, costs = _open_reader(resolved)
        self._parts.callback(self._reader.close)
        self.io = self._reader.io
        """The I/O mode of flash reads: `direct` or `buffered`."""
        self._backend = make_backend(bundle.config, bundle.quant, runtime, plan)
        self._parts.callback(self._backend.close)
        self.kernel_target = self._backend.target
        """The target that multiplies: an instruction set, `mlx-gpu`, `mlx-cpu` or `numpy`."""
        transformer = _load_transformer(resolved, self._reader, self._backend, cancelled)
        substitution = runtime.expert_substitution
        self._neurons = open_neuron_memory(
            bundle, plan, self._backend, self._reader, costs, fetch, substitution, cancelled
        )
        self._parts.callback(self._neurons.close)
        self._quota = NeuronQuota(self._neurons, self._backend, plan, fetch.keep)
        self._quota.keep_to(plan, plan.kv_block_bytes)
        layout = KVLayout(bundle.config, runtime.kv_bits, is_drafter(runtime.speculation))
        transformer.equal_rows = resolved.widths.chain
        self._state_at = partial(prompt_cache_at, resolved=resolved, target=self.kernel_target)
        store = open_prompt_cache(resolved, self.kernel_target)
        self.kv = StatePool(layout, plan, self._claim, self._backend, self._quota.yield_to, store)
        self._parts.callback(self.kv.close)
        self._generator = Generator(
            transformer,
            resolved.tokenizer,
            frozenset(bundle.manifest.tokenizer.eos_ids),
            max_context=plan.max_context,
            prefill_chunk=runtime.prefill_chunk,
            # Only passes over one token substitute, and scoring measures what decoding does.
            scoring_chunk=1 if substitution else 0,
            counters=self.counters,
            before_pass=self._before_pass,
            restore=self.kv.restore,
            most_texts=runtime.parallel,
            equal_rows=resolved.widths.chain if runtime.parallel > 1 else ANY_ROWS,
            labels=GenerationStats(
                backend=self._backend.name,
                sparsity=runtime.sparsity,
                speculation=runtime.speculation,
                io=self.io,
                experts=runtime.experts,
                expert_substitution=substitution,
            ),
        )
        self._parts.callback(self._forget_model)
        self._drafting = self.make_drafting(resolved, cancelled)
        if self._drafting is not None:
            self._parts.callback(self._drafting.close)
        self.draft_with(runtime.speculation, self._drafting)
        self._reader.trim()
        trim_heap()
        self._embedding_bytes = plan.embedding_bytes if plan.embedding_resident else 0
        self._loaded_bytes = resolved.loaded_bytes
        log.info("loaded %s: %s planned", bundle.name, format_bytes(plan.total_bytes))

    @property
    def feed_forward_bytes(self) -> int:
        """Bytes of memory that neurons have now."""
        return self._neurons.nbytes

    def counters(self) -> Counters:
        """Totals since the engine was made."""
        flash, neurons, backend = self._reader.stats, self._neurons, self._backend
        return Counters(
            flash_bytes_read=flash.bytes_read,
            flash_reads=flash.reads,
            flash_read_seconds=flash.read_seconds,
            flash_cpu_seconds=flash.cpu_seconds,
            waited_seconds=neurons.times.waited,
            managed_seconds=neurons.times.managed,
            neuron_cache_hits=neurons.hits,
            neuron_cache_lookups=neurons.lookups,
            prefetched_used=neurons.prefetching.used,
            prefetch_wasted_bytes=neurons.prefetching.wasted_bytes,
            substituted_experts=neurons.substituted,
            synchronisations=backend.synchronisations,
            synchronised_seconds=backend.synchronised_seconds,
            peak_memory_bytes=process_memory().peak_bytes,
        )

    def generate(
        self,
        key: int | None,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        cancelled: IsCancelled,
    ) -> Iterator[Event]:
        """The events of `steps`, whose passes are this text's alone. For measurements."""
        return self._generator.answered(self.steps(key, prompt, sampling, cancelled))

    def steps(
        self,
        key: int | None,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        cancelled: IsCancelled,
        constrained: Constrained | None = None,
    ) -> Steps[None]:
        """Continue `prompt` with the cache of `key`, or with a cache of its own that ends with it.

        In steps: a job for `joint`, which lets generations share passes.
        """
        check_thread(self._thread)
        with self._cache_of(key, prompt) as kv, system_refusals():
            yield from self._generator.steps(prompt, kv, sampling, cancelled, constrained)

    def logits(self, tokens: Sequence[int], cancelled: IsCancelled) -> Iterator[Float32]:
        """Logits (at most `logits_rows`, V) of all tokens, piece by piece, from an empty cache."""
        check_thread(self._thread)
        with self.kv.use(None) as kv:
            try:
                self._grow_beside(kv, len(tokens))
                with system_refusals():
                    yield from self._generator.logits(tokens, kv, logits_rows(self._bundle.config), cancelled)
            except Cancelled:
                raise OndeviceError("the computation was cancelled") from None

    def fork(self, source: int, target: int) -> None:
        """Give `target` a copy of the cache of `source`, if there is room for two."""
        check_thread(self._thread)
        with system_refusals():
            self.kv.fork(source, target)

    def save_state(self, key: int, folder: Path, cancelled: IsCancelled) -> Iterator[PassRequest]:
        """Write the state of the cache of `key` to a folder of its own, and remove other states there.

        A job for `joint`, which lets the passes of others go between two pieces. Where the cache loses its
        memory to them, the folder keeps what was written until then.
        """
        check_thread(self._thread)
        store = self._state_at(folder)
        with suppress(Cancelled), self.kv.use(key) as kv, system_refusals():
            tokens = kv.tokens[: kv.verified]
            for _ in store.write(kv):
                yield no_pass(kv, cancelled)
                if kv.tokens[: len(tokens)] != tokens:
                    break
                tokens = kv.tokens[: kv.verified]
            store.keep_only(tokens)

    def load_state(
        self, key: int, tokens: Sequence[int], folder: Path, cancelled: IsCancelled
    ) -> Iterator[PassRequest]:
        """Bring what a folder has of the state behind `tokens` into the cache of `key`.

        A job for `joint`, as of `save_state`.
        """
        check_thread(self._thread)
        with suppress(Cancelled), self.kv.use(key, stored=True) as kv, system_refusals():
            self.kv.rewind(kv, tokens)
            for _ in self._state_at(folder).restore(kv, tokens, cancelled):
                yield no_pass(kv, cancelled)

    def step_idle(self) -> bool:
        """While the model is idle, write a little of what the prompt cache lacks, then read neurons ahead.

        False: nothing more to do.
        """
        check_thread(self._thread)
        return self.kv.save_next() or self.fill_ahead()

    def fill_ahead(self) -> bool:
        """While the model is idle, read a few neurons or experts that are likely to be used.

        False: there is nothing more to do. Neurons are read only if it is known which ones fire: a prompt
        wants few of them, but most experts.
        """
        check_thread(self._thread)
        wanted = self._bundle.hotness is not None or self._bundle.config.experts is not None
        return wanted and self._neurons.fill()

    @property
    def replanned(self) -> Plan:
        """The plan beside what other models have claimed by now. It may not fit. Safe from any thread."""
        return replanned(self.plan, self._claim)

    def set_budget(self, budget_bytes: int) -> None:
        """Keep to the user's new budget. Raises BudgetError, and changes nothing, if it is too small."""
        self.set_plan(self.plan.with_budget(budget_bytes))

    def set_plan(self, plan: Plan, emptied: bool = False) -> None:
        """Keep to another plan of the same model. Raises BudgetError, and changes nothing, if it doesn't fit.

        emptied: neurons start with as little memory as works, as after loading.
        """
        check_thread(self._thread)
        plan = self._claim.promise(plan, self._bundle.name)
        if emptied:
            self._quota.clear()
        self._keep_to(plan)

    def shift_budget(self, budget_bytes: int) -> bool:
        """Keep to a budget up to the user's, for memory pressure. False: other models have taken the rest."""
        check_thread(self._thread)
        plan = self.plan.with_budget(budget_bytes)
        if not self._claim.follow(plan):
            return False
        self._keep_to(plan)
        return True

    def make_drafting(self, resolved: ResolvedModel, cancelled: IsCancelled) -> Drafting | None:
        """Make the drafting of this model under the options of `resolved`; None for no drafts.

        The caller closes it. Raises what loading a second model raises.
        """
        second = None
        if resolved.draft is not None:
            second = load_draft(resolved.draft, self._backend, cancelled)
        runtime, widths = resolved.runtime, resolved.widths
        datastore = None
        if drafts_with_ngrams(runtime.speculation, resolved.bundle.ngrams):
            datastore = open_datastore(resolved.bundle, runtime)
        layer, state = resolved.draft_layer, None
        if layer is not None:
            weights, context = self._generator.transformer.weights, resolved.plan.max_context
            state = open_draft_layer(
                resolved.bundle, layer, runtime, self._backend, weights, context, cancelled
            )
        target = Target(
            self._bundle.config,
            self._generator.transformer,
            widths.tree if widths.branches else 0,
            MultiStreamDrafting(streams=runtime.draft_streams, pruning_threshold=runtime.draft_pruning),
            second,
            datastore,
            state,
        )
        drafter = make_drafter(runtime.speculation, target)
        nodes = min(draft_nodes(runtime), widths.nodes)
        least_seconds = MIN_PASS_SECONDS if runtime.speculation == "auto" else 0.0
        if drafter is None:
            return None
        return Drafting(drafter, nodes, least_seconds, widths.branches, runtime.parallel)

    def draft_with(self, name: str, drafting: Drafting | None) -> None:
        """Draft with `drafting` from now on. name: its `--speculation`, for the stats of generations."""
        labels = replace(self._generator.labels, speculation=name)
        self._generator.transformer.taps = () if drafting is None else drafting.taps
        self._generator = replace(self._generator, drafting=drafting, labels=labels)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._loaded_bytes = 0  # Nothing is surely in memory from here on.
        self._parts.close()
        self._neurons = NoNeuronMemory()
        self._backend = self._quota = None  # type: ignore[assignment]

    def _forget_model(self) -> None:
        """Drop references back to the engine, so that its memory needn't wait for the garbage collector."""
        self._generator = self._drafting = None  # type: ignore[assignment]

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

    @contextmanager
    def _cache_of(self, key: int | None, prompt: Sequence[int]) -> Iterator[SequenceState]:
        """A context with the cache of `key`, which holds no more than the beginning of `prompt`."""
        with self.kv.use(key, stored=True) as kv:
            self.kv.rewind(kv, prompt)
            self._grow_beside(kv, len(prompt) + 1)
            yield kv

    def _answered(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception | object | None]:
        """Answers for `joint`."""
        answers = self._generator.passes.answer(requests)
        return [WAIT if it is None else None if isinstance(it, str) else it for it in answers]

    def _grow_beside(self, kv: SequenceState, tokens: int) -> None:
        """Give neurons the memory that `tokens` tokens in kv will leave."""
        grown = max(0, kv.layout.nbytes(min(tokens, self.plan.max_context)) - kv.nbytes)
        self._quota.grow(self.kv.nbytes + grown)

    def _before_pass(self, batch: ForwardBatch) -> None:
        # A draft is made from what is in memory, and its pass must find that there.
        if not batch.drafted:
            self._between_passes()
        self._quota.before_pass(len(batch.tokens), self.kv.nbytes)

    def _held_bytes(self) -> int:
        """Bytes that are surely in memory; 0 until loading ends. Safe from any thread."""
        if not self._loaded_bytes:
            return 0
        return self._loaded_bytes + self._embedding_bytes + self.kv.nbytes + self._neurons.filled_bytes


def _open_reader(resolved: ResolvedModel) -> tuple[FlashReader, CostModel]:
    """A reader of the model's files, and the costs of its reads: measured where neurons are selected."""
    bundle, runtime, segment = resolved.bundle, resolved.runtime, resolved.plan.segment
    files = bundle_files(bundle, runtime.sparsity, resolved.runs_streams)
    if not isinstance(segment, SlotShape) or bundle.config.experts is not None:
        # Large reads need few at once.
        return FlashReader(files, runtime.io), UNMEASURED
    costs = device_costs([bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)])
    threads = min(FETCH_DEPTH, costs.threads(segment.slot_bytes))
    return FlashReader(files, runtime.io, threads, ring=True), costs


def _load_transformer(
    resolved: ResolvedModel, reader: FlashReader, backend: BudgetedBackend, cancelled: IsCancelled
) -> Transformer:
    bundle, runtime = resolved.bundle, resolved.runtime
    point = operating_point(runtime, bundle.predictors, bundle.thresholds)
    weights = load_weights(bundle, reader, backend, cancelled, runtime.sparsity, point)
    streams = None
    if resolved.runs_streams:
        last = len(bundle_files(bundle, runtime.sparsity))
        streams = load_streams(bundle, reader, backend, last, cancelled)
    draft_head = None
    if resolved.draft_head_rows:
        draft_head = load_draft_head(bundle, reader, backend, resolved.draft_head_rows, cancelled)
    config = bundle.config.within(resolved.plan.max_context)
    return Transformer(config, backend, weights, streams, draft_head)
