"""One loaded model under its budget: weights, key/value blocks, feed-forward residency, the decode loop.

An engine belongs to the thread that made it and is used there only (`owner.py`): anywhere else, what touches
its caches raises WrongThreadError. It allocates by the plan of the model that was resolved for it
(`resolving.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ondevice.backends.base import Float32, KVLayout
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend
from ondevice.budget.claims import Claim, replanned
from ondevice.budget.plan import Plan
from ondevice.budget.sizes import (
    DECODE_TOKENS,
    FETCH_DEPTH,
    SlotShape,
    draft_nodes,
    logits_rows,
    stream_bytes,
)
from ondevice.config import SamplingConfig
from ondevice.errors import OndeviceError, check_thread, system_refusals
from ondevice.flash.cost_model import UNMEASURED, device_costs
from ondevice.flash.reader import DEFAULT_THREADS, FlashReader
from ondevice.generate import Event, Generator
from ondevice.meter import Counters
from ondevice.model.kv_cache import KVCache, common_prefix
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.stream_loading import load_streams
from ondevice.model.transformer import Cancelled, Transformer
from ondevice.runtime.backend_choice import BudgetBackend, make_backend
from ondevice.runtime.draft_model import load_draft
from ondevice.runtime.key_value_store import KVMemory
from ondevice.runtime.models import operating_point
from ondevice.runtime.neuron_memory import neuron_memory
from ondevice.runtime.resolving import ResolvedModel
from ondevice.sparsity.fetch import DEFAULT_FETCH, FetchOptions, NeuronFetcher
from ondevice.sparsity.prefetch import PrefetchQuality
from ondevice.sparsity.segments import SegmentPool
from ondevice.speculation.drafting import Drafting
from ondevice.speculation.registry import LEAST_PASS_SECONDS, Target, make_drafter, runs_streams
from ondevice.stats import GenerationStats, PassTimes
from ondevice.units import format_bytes, process_memory, trim_heap

log = logging.getLogger(__name__)

IsCancelled = Callable[[], bool]
FILL_SECONDS = 0.0005
"""Between two looks at what is read ahead while nothing is asked."""


class Engine:
    """The loaded model. Generations are named by a key; each key keeps a key/value cache between them."""

    def __init__(
        self,
        resolved: ResolvedModel,
        cancelled: IsCancelled,
        fetch: FetchOptions = DEFAULT_FETCH,
        between_passes: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises BudgetError before anything is read, FlashReadError and BundleError for damaged weights.

        Cancelled when `cancelled()` holds between two pieces of the weights. between_passes may set budgets.
        """
        self._thread = threading.get_ident()
        self._between_passes = between_passes
        self._fetch = fetch
        resolved.require_fit()
        self.plan = resolved.plan
        self._bundle = resolved.bundle
        self._runtime = resolved.runtime
        self._claim = Claim(self._held_bytes)
        layout = KVLayout(self._bundle.config, self._runtime.kv_bits)
        self.kv = KVMemory(layout, self.plan, self._claim, self._yield_to)
        self._loaded_bytes = self._embedding_bytes = 0
        """Of what is in memory for sure from the end of loading on, and of the embedding while it is."""
        self._pass_tokens = DECODE_TOKENS
        """Of the widest pass whose scratch memory is held; neurons get what wider ones would need."""
        self._segments = 0
        """Feed-forward segments within the quota; forward passes fill them."""
        self._neurons: SegmentPool | NeuronFetcher | None = None
        self._backend: BudgetBackend | None = None
        self._drafting: Drafting | None = None
        self._draftings: dict[str, Drafting | None] = {}
        """By `--speculation`: what has been drafted with, `_drafting` among it."""
        self._costs, threads = UNMEASURED, DEFAULT_THREADS
        if isinstance(self.plan.segment, SlotShape):
            layers = range(self._bundle.config.num_layers)
            self._costs = device_costs([self._bundle.neuron_file(layer) for layer in layers])
            threads = min(FETCH_DEPTH, self._costs.threads(self.plan.segment.slot_bytes))
        self._reader = FlashReader(
            bundle_files(self._bundle, self._runtime.sparsity, self._runs_streams),
            self._runtime.io,
            threads,
            ring=isinstance(self.plan.segment, SlotShape),
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            undo.enter_context(system_refusals())
            self.plan = self._claim.promise(self.plan, self._bundle.name)
            self._generator = self._load(resolved, cancelled)
            undo.pop_all()

    @property
    def _runs_streams(self) -> bool:
        return runs_streams(self._runtime.speculation, self._bundle.streams)

    @property
    def kernel_target(self) -> str:
        """The instruction set that multiplies; `numpy` for the reference backend."""
        return "numpy" if self._backend is None else self._backend.target

    @property
    def io(self) -> str:
        """How flash is read: `direct` or `buffered`."""
        return self._reader.io

    @property
    def feed_forward_bytes(self) -> int:
        """Memory that holds neurons now."""
        return 0 if self._neurons is None else self._neurons.nbytes

    def counters(self) -> Counters:
        """Totals since the engine was made."""
        flash = self._reader.stats
        times = PassTimes() if self._neurons is None else self._neurons.times
        prefetching = (
            self._neurons.prefetching if isinstance(self._neurons, NeuronFetcher) else PrefetchQuality()
        )
        return Counters(
            flash_bytes_read=flash.bytes_read,
            flash_reads=flash.reads,
            flash_read_seconds=flash.read_seconds,
            flash_cpu_seconds=flash.cpu_seconds,
            waited_seconds=times.waited,
            managed_seconds=times.managed,
            neuron_cache_hits=0 if self._neurons is None else self._neurons.hits,
            neuron_cache_lookups=0 if self._neurons is None else self._neurons.lookups,
            prefetched_used=prefetching.used,
            prefetch_wasted_bytes=prefetching.wasted_bytes,
            synchronisations=0 if self._backend is None else self._backend.synchronisations,
            synchronised_seconds=0.0 if self._backend is None else self._backend.synchronised_seconds,
            peak_memory_bytes=process_memory().peak_bytes,
        )

    def generate(
        self, key: int | None, prompt: Sequence[int], sampling: SamplingConfig, cancelled: IsCancelled
    ) -> Iterator[Event]:
        """Continue `prompt` with the cache of `key`, or with a cache of its own that ends with it."""
        check_thread(self._thread)
        self.kv.drop_retired()
        kv = self.kv.new_cache() if key is None else self.kv.cache(key)
        with self.kv.work_on(kv):
            try:
                kv.truncate(common_prefix(kv.tokens, prompt))
                self._allocate_more(kv, len(prompt) + 1)
                with system_refusals():
                    yield from self._generator.stream(prompt, kv, sampling, cancelled)
            finally:
                if key is None:
                    kv.truncate(0)

    def logits(self, tokens: Sequence[int], cancelled: IsCancelled) -> Iterator[Float32]:
        """Logits (at most `logits_rows`, V) of all tokens, piece by piece, from an empty cache."""
        check_thread(self._thread)
        kv = self.kv.new_cache()
        with self.kv.work_on(kv):
            try:
                self._allocate_more(kv, len(tokens))
                with system_refusals():
                    yield from self._generator.logits(tokens, kv, logits_rows(self._bundle.config), cancelled)
            except Cancelled:
                raise OndeviceError("the computation was cancelled") from None
            finally:
                kv.truncate(0)

    def fork(self, source: int, target: int) -> None:
        """Give `target` a copy of the cache of `source`, if there is room for two."""
        check_thread(self._thread)
        with system_refusals():
            self.kv.fork(source, target)

    @property
    def replanned(self) -> Plan:
        """The plan beside what other models have claimed by now, which needn't fit. Safe from any thread."""
        return replanned(self.plan, self._claim)

    def set_budget(self, budget_bytes: int) -> None:
        """Keep to the user's new budget. Raises BudgetError, and changes nothing, if it is too small."""
        check_thread(self._thread)
        self._keep_to(self._claim.promise(self.plan.with_budget(budget_bytes), self._bundle.name))

    def shift_budget(self, budget_bytes: int) -> bool:
        """Keep to one up to the user's, for memory pressure; False where other models have taken the rest."""
        check_thread(self._thread)
        plan = self.plan.with_budget(budget_bytes)
        if not self._claim.follow(plan):
            return False
        self._keep_to(plan)
        return True

    def draft_as(self, resolved: ResolvedModel) -> None:
        """Draft, and divide the memory, as `resolved` says: the same model with another `--speculation`.

        What is not resident is read anew, as if just loaded; what each way of drafting has learned stays for
        the next time, and which neurons fire. This engine must have been made with streams if they are to
        draft. What those that rest hold is in no plan. Raises BudgetError, and what making a drafter raises.
        """
        check_thread(self._thread)
        plan = self._claim.promise(resolved.plan, self._bundle.name)
        name, transformer = resolved.runtime.speculation, self._generator.transformer
        if name not in self._draftings:
            self._draftings[name] = self._make_drafting(transformer, resolved, lambda: False)
        self._drafting, labels = self._draftings[name], replace(self._generator.labels, speculation=name)
        self._generator = replace(self._generator, drafting=self._drafting, labels=labels)
        if self.plan.offloads_weights or plan.offloads_weights:
            self._allocate_segments(self.plan.segment.least)
        self._keep_to(plan)
        while self.fill_ahead():
            time.sleep(FILL_SECONDS)

    def _keep_to(self, plan: Plan) -> None:
        self.plan = plan
        if self._backend is not None:
            self._backend.keep_to(plan.budget_bytes)
        if not plan.embedding_resident and self._backend is not None:
            self._embedding_bytes = 0
            self._backend.hold_embedding(False)
        self.kv.keep_to(plan)
        self._allocate_segments(self._room(self.kv.nbytes))
        if plan.embedding_resident and self._backend is not None:
            with system_refusals():
                self._backend.hold_embedding(True)
            self._embedding_bytes = plan.embedding_bytes
            self._reader.trim()

    def fill_ahead(self) -> bool:
        """While nothing is asked: read a little of what is known to fire often. False: nothing more to do."""
        check_thread(self._thread)
        if self._bundle.hotness is None or not isinstance(self._neurons, NeuronFetcher):
            return False
        return self._neurons.fill()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._loaded_bytes = 0  # from here on nothing is sure
        self.kv.close()
        if self._neurons is not None:
            self._neurons.close()
            self._neurons = None
        self._reader.close()
        for drafting in filter(None, self._draftings.values()):
            drafting.close()
        # They refer back to the engine: memory mustn't wait for the collector of cycles.
        self._draftings.clear()
        self._drafting = self._generator = None  # type: ignore[assignment]
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        self._claim.release()

    def _held_bytes(self) -> int:
        """What is in memory for sure; 0 until loading ends. Safe from any thread."""
        neurons = self._neurons
        if not self._loaded_bytes:
            return 0
        filled = 0 if neurons is None else neurons.filled_bytes
        return self._loaded_bytes + self._embedding_bytes + self.kv.nbytes + filled

    def _load(self, resolved: ResolvedModel, cancelled: IsCancelled) -> Generator:
        config, plan, runtime = self._bundle.config, self.plan, self._runtime
        backend = make_backend(config, self._bundle.quant, runtime, plan)
        self._backend = self.kv.backend = None if isinstance(backend, ReferenceBackend) else backend
        point = operating_point(runtime, self._bundle.predictors, self._bundle.thresholds)
        weights = load_weights(self._bundle, self._reader, backend, cancelled, runtime.sparsity, point)
        streams = None
        if self._runs_streams:
            last = len(bundle_files(self._bundle, runtime.sparsity))
            streams = load_streams(self._bundle, self._reader, backend, last, cancelled)
        transformer = Transformer(config, backend, weights, streams)
        if self._backend is not None:
            self._neurons = neuron_memory(
                self._bundle, plan, self._backend.feed_forwards, self._reader, self._costs, self._fetch
            )
            self._allocate_segments(self._room(plan.kv_block_bytes))
        self._drafting = self._make_drafting(transformer, resolved, cancelled)
        self._draftings[runtime.speculation] = self._drafting
        self._reader.trim()
        trim_heap()
        self._embedding_bytes = plan.resident_weights_bytes - plan.weights_bytes
        self._loaded_bytes = plan.weights_bytes + plan.predictor_bytes
        self._loaded_bytes += 0 if resolved.draft is None else resolved.draft.loaded_bytes
        if self._bundle.streams is not None and self._runs_streams:
            self._loaded_bytes += stream_bytes(config, self._bundle.streams)
        log.info("loaded %s: %s planned", self._bundle.name, format_bytes(plan.total_bytes))
        return Generator(
            transformer,
            resolved.tokenizer,
            frozenset(self._bundle.manifest.tokenizer.eos_ids),
            max_context=plan.max_context,
            prefill_chunk=runtime.prefill_chunk,
            counters=self.counters,
            before_pass=self._before_pass,
            drafting=self._drafting,
            labels=GenerationStats(
                backend=backend.name,
                sparsity=runtime.sparsity,
                speculation=runtime.speculation,
                io=self._reader.io,
            ),
        )

    def _make_drafting(
        self, transformer: Transformer, resolved: ResolvedModel, cancelled: IsCancelled
    ) -> Drafting | None:
        second = None
        if resolved.draft is not None and isinstance(self._backend, CpuBackend):
            second = load_draft(resolved.draft, self._backend.engine, cancelled)
        nodes = draft_nodes(self._runtime)
        config, context = self._bundle.config, self.plan.max_context
        target = Target(config, context, nodes, transformer, lambda: self.plan.offloads_weights, second)
        drafter = make_drafter(resolved.runtime.speculation, target)
        least = LEAST_PASS_SECONDS if resolved.runtime.speculation == "auto" else 0.0
        return None if drafter is None else Drafting(drafter, nodes, least)

    def _allocate_more(self, kv: KVCache, tokens: int) -> None:
        """Before the work: take the memory that `tokens` of kv will leave for segments."""
        grown = max(0, self.kv.layout.blocks(min(tokens, self.plan.max_context)) - len(kv.blocks))
        target = self._room(self.kv.nbytes + grown * self.kv.layout.block_bytes)
        if target > self._segments:
            self._allocate_segments(target)

    def _before_pass(self, batch: ForwardBatch) -> None:
        # A draft is made by what is in memory, and is to find it there.
        if not batch.draft_rows:
            self._between_passes()
        self._make_room(len(batch.tokens))

    def _make_room(self, tokens: int) -> None:
        """Before a pass: a wide one takes memory from neurons, the next prune one gives it back."""
        if tokens > self._pass_tokens:
            self._pass_tokens = tokens
            self._yield_to(self.kv.nbytes)
        elif (
            tokens <= DECODE_TOKENS < self._pass_tokens
            and self._backend is not None
            and self.plan.offloads_weights
        ):
            self._backend.trim()
            trim_heap()
            self._pass_tokens = DECODE_TOKENS
            self._allocate_segments(self._room(self.kv.nbytes))

    def _yield_to(self, kv_bytes: int) -> None:
        """Take back the segments that so many bytes of keys and values leave no room for."""
        room = self._room(kv_bytes)
        if room < self._segments:
            self._allocate_segments(room)

    def _room(self, kv_bytes: int) -> int:
        """Segments that fit beside so many bytes of keys and values."""
        return self.plan.segments_for(kv_bytes, self._pass_tokens)

    def _allocate_segments(self, segments: int) -> None:
        if self._neurons is not None:
            quota = segments if self._fetch.keep else self.plan.segment.least
            self._neurons.resize(self.plan.segment.quota(quota))
            self._segments = segments
