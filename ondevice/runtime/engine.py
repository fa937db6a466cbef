"""A loaded model under its budget: load, generate, logits, fork, set_budget, close.

An engine may be used only on the thread that created it (`owner.py`); on other threads, methods that touch
its memory raise WrongThreadError. It allocates by the plan of its resolved model (`resolving.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ondevice.backends.base import Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.row_invariance import ANY_ROWS
from ondevice.budget.sizes import draft_nodes, logits_rows
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained
from ondevice.errors import OndeviceError, UsageError, check_thread, system_refusals
from ondevice.generate import Event, Generator, Steps
from ondevice.model.layer_range import LaterLayers
from ondevice.model.shared_passes import PassRequest, PassResult, no_pass
from ondevice.runtime.draft_model import load_draft, open_draft_layer
from ondevice.runtime.joint_jobs import WAIT, JointJobs
from ondevice.runtime.loaded_model import LoadedModel
from ondevice.runtime.opening import open_datastore
from ondevice.runtime.resolving import ResolvedModel
from ondevice.runtime.state_binding import prompt_cache_at
from ondevice.sparsity.fetch import DEFAULT_FETCH, FetchOptions
from ondevice.speculation.drafting import Drafting
from ondevice.speculation.registry import MIN_PASS_SECONDS, Target, drafts_with_ngrams, make_drafter
from ondevice.stats import GenerationStats

_ALONE = (
    "needs the whole model on one machine, as states of other machines' layers aren't stored; leave it out, "
    "or run without --hosts"
)


class Engine(LoadedModel):
    """A loaded model. Each key names a key/value cache that is kept between generations."""

    _generator: Generator
    _drafting: Drafting | None = None

    def __init__(
        self,
        resolved: ResolvedModel,
        cancelled: IsCancelled,
        fetch: FetchOptions = DEFAULT_FETCH,
        between_passes: Callable[[], None] = lambda: None,
        later: LaterLayers | None = None,
    ) -> None:
        """Load a model, with the arguments of `LoadedModel`. between_passes: called between forward passes;
        may set budgets.
        """
        self._between_passes = between_passes
        self.joint = JointJobs(resolved.runtime.parallel, PassRequest, self._answered)
        """Runs generations together."""
        super().__init__(resolved, cancelled, fetch, later)

    def _load(self, resolved: ResolvedModel, cancelled: IsCancelled, fetch: FetchOptions) -> None:
        if self._later is not None and self._runtime.prompt_cache:
            raise UsageError(f"--prompt-cache {_ALONE}")
        super()._load(resolved, cancelled, fetch)
        bundle, runtime, plan = self._bundle, self._runtime, self.plan
        self._state_at = partial(prompt_cache_at, resolved=resolved, target=self.kernel_target)
        self._generator = Generator(
            self.transformer,
            resolved.tokenizer,
            frozenset(bundle.manifest.tokenizer.eos_ids),
            max_context=plan.max_context,
            prefill_chunk=runtime.prefill_chunk,
            counters=self.counters,
            before_pass=self._before_pass,
            restore=self.kv.restore,
            most_texts=runtime.parallel,
            equal_rows=resolved.widths.chain if runtime.parallel > 1 else ANY_ROWS,
            pass_seconds=self._pass_seconds,
            labels=GenerationStats(
                backend=self._backend.name,
                sparsity=runtime.sparsity,
                speculation=runtime.speculation,
                io=self.io,
                experts=runtime.experts,
            ),
        )
        self._parts.callback(self._forget_texts)
        self._drafting = self.make_drafting(resolved, cancelled)
        if self._drafting is not None:
            self._parts.callback(self._drafting.close)
        self.draft_with(runtime.speculation, self._drafting)

    def generate(
        self, key: int | None, prompt: Sequence[int], sampling: SamplingConfig, cancelled: IsCancelled
    ) -> Iterator[Event]:
        """Yields the events of `steps`, with passes that no other text shares. For measurements."""
        return self._generator.answered(self.steps(key, prompt, sampling, cancelled))

    def steps(
        self,
        key: int | None,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        cancelled: IsCancelled,
        constrained: Constrained | None = None,
        keep: bool = False,
    ) -> Steps[None]:
        """Continue `prompt` with the cache of `key`, or with a temporary one.

        It is a job for `joint`, so that several generations can share passes. keep: as in `StatePool.begin`.
        """
        check_thread(self._thread)
        if self.joint.is_leaving:
            # A cancelled text's prefix can be taken once its job has ended.
            with suppress(Cancelled):
                yield no_pass(self.kv.new_state(), cancelled)
        with self.kv.begin(key, prompt, keep) as kv:
            self.grow_weights(kv, len(prompt) + 1)
            with system_refusals():
                yield from self._generator.steps(prompt, kv, sampling, cancelled, constrained)

    def logits(
        self, tokens: Sequence[int], cancelled: IsCancelled, key: int | None = None
    ) -> Iterator[Float32]:
        """Yields the logits (at most `logits_rows`, V) of all tokens, from an empty cache.

        key: a new key, whose cache then holds the tokens, or None.
        """
        check_thread(self._thread)
        with self.kv.use(key) as kv:
            try:
                self.grow_weights(kv, len(tokens))
                with system_refusals():
                    yield from self._generator.logits(tokens, kv, logits_rows(self._bundle.config), cancelled)
            except Cancelled:
                raise OndeviceError("the computation was cancelled") from None

    def fork(self, source: int, target: int) -> None:
        """Give `target` a copy of the cache of `source`, if there is room for both."""
        check_thread(self._thread)
        with system_refusals():
            self.kv.fork(source, target)

    def save_state(self, key: int, folder: Path, cancelled: IsCancelled) -> Iterator[PassRequest]:
        """Write the state of the cache of `key` to a folder, and remove other states there.

        A job for `joint`, which runs other texts' passes between two pieces. If the cache is evicted for
        them, the folder keeps the pieces written before.
        """
        check_thread(self._thread)
        self._require_one_machine()
        store = self._state_at(folder)
        with suppress(Cancelled), self.kv.use(key) as kv, system_refusals():
            tokens, names = kv.tokens[: kv.verified], store.names(kv)
            for _ in store.write(kv):
                yield no_pass(kv, cancelled)
                if kv.tokens[: len(tokens)] != tokens:
                    break
                tokens, names = kv.tokens[: kv.verified], store.names(kv)
            store.keep_only(names)

    def load_state(
        self, key: int, tokens: Sequence[int], folder: Path, cancelled: IsCancelled
    ) -> Iterator[PassRequest]:
        """Load what a folder holds of the state after `tokens` into the cache of `key`. A job for `joint`."""
        check_thread(self._thread)
        self._require_one_machine()
        with suppress(Cancelled), self.kv.use(key, stored=True) as kv, system_refusals():
            self.kv.rewind(kv, tokens)
            for _ in self._state_at(folder).restore(kv, tokens, cancelled):
                yield no_pass(kv, cancelled)

    def _require_one_machine(self) -> None:
        """Check that no other machines are involved. Raises UsageError if they hold a part of every state."""
        if self._later is not None:
            raise UsageError(f"saving and loading a session {_ALONE}")

    def step_idle(self) -> bool:
        """Do a step of idle work: write an unsaved piece to the prompt cache, or if there is none, read
        neurons ahead.

        Returns False if there is nothing to do.
        """
        check_thread(self._thread)
        return self.kv.save_next() or self.fill_ahead()

    @property
    def drafts_from_memory(self) -> bool:
        """Whether drafts should come from a pass over only the weights in memory: such a pass reads nothing,
        but a text's pass does.
        """
        plan = self.plan
        return not plan.selects_neurons and plan.offloads_weights and self._quota.holds_draft

    def make_drafting(self, resolved: ResolvedModel, cancelled: IsCancelled) -> Drafting | None:
        """The drafting that the options of `resolved` give this model, or None. The caller must close it.

        Raises what loading a second model raises.
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
            weights, context = self.transformer.weights, resolved.plan.max_context
            state = open_draft_layer(
                resolved.bundle, layer, runtime, self._backend, weights, context, cancelled
            )
        target = Target(
            self._bundle.config,
            self.transformer,
            widths.tree if widths.branches else 0,
            lambda: self.drafts_from_memory,
            second,
            datastore,
            state,
        )
        drafter = make_drafter(runtime.speculation, target)
        nodes = min(draft_nodes(runtime), widths.nodes)
        min_seconds = MIN_PASS_SECONDS if runtime.speculation == "auto" else 0.0
        if drafter is None:
            return None
        return Drafting(drafter, nodes, min_seconds, widths.branches, runtime.parallel)

    def draft_with(self, name: str, drafting: Drafting | None) -> None:
        """Draft with `drafting` from now on. name: the value of `--speculation`, for the stats of
        generations.
        """
        labels = replace(self._generator.labels, speculation=name)
        rows = self._runtime.prefill_chunk
        # With taps, every pass is waited for, so that nothing is pipelined.
        if self._later is not None and not (drafting and drafting.taps):
            rows = self._later.prompt_rows(rows, self.transformer.equal_rows, self.plan.offloads_weights)
        self._generator = replace(self._generator, drafting=drafting, labels=labels, prefill_chunk=rows)

    def _answered(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception | object | None]:
        """The answers to the requests of the jobs of `joint`."""
        answers = self._generator.passes.answer(requests)
        self.kv.save_between_passes()
        return [WAIT if it is None else None if isinstance(it, str) else it for it in answers]

    def _pass_seconds(self) -> float:
        """The longest time in seconds that passes with prompts should take; 0: no limit.

        There is no limit without other texts, and if weights are read for each pass, since passes of few rows
        are slow then.
        """
        alone = self._runtime.parallel == 1 or self._later is not None
        fixed = self.plan.offloads_weights or self._bundle.config.experts is not None
        return 0.0 if alone or fixed else self._runtime.pass_seconds

    def _before_pass(self, batch: ForwardBatch) -> None:
        # Not between a draft and its pass, which needs the same weights in memory.
        if not batch.drafted:
            self._between_passes()
        drafting = self._generator.drafting
        self.transformer.taps = () if drafting is None else drafting.taps
        self.before_pass(batch)

    def _forget_texts(self) -> None:
        """Drop cyclic references, so that memory is freed without the garbage collector."""
        self._generator = self._drafting = None  # type: ignore[assignment]
