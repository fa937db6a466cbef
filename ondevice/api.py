"""The public face: `load` a model, generate and score with it, hold sessions; `inspect` and `convert`.

Every call may come from any thread; the model's owner thread does the work. Nothing is printed: results,
callbacks and `logging` are the only outputs. All errors derive from `OndeviceError`.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ondevice.backends.base import Float32
from ondevice.budget.plan import Plan
from ondevice.budget.pressure import DEFAULT_PRESSURE
from ondevice.budget.pressure_sources import system_source
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import Report
from ondevice.bundle.verify import verify as verify_bundle
from ondevice.chat_template import ChatTemplate
from ondevice.config import QuantConfig, RuntimeConfig, SamplingConfig, WhenFull
from ondevice.errors import UsageError, system_refusals
from ondevice.generate import Event, check_context, require_one, token_ids, token_stream
from ondevice.kernels import _native
from ondevice.response import LastStats, Response, gather
from ondevice.runtime.budget_watch import BudgetWatch, MemoryPressure
from ondevice.runtime.engine import Engine, IsCancelled
from ondevice.runtime.models import ConversionProgress, bundle_target, find_checkpoint, find_model
from ondevice.runtime.owner import OwnerThread
from ondevice.runtime.resolving import ResolvedModel, budget_bytes, resolve, warn_of_budget
from ondevice.scoring import Score, Tally, benchmark_prompt, scoring_windows
from ondevice.session import Session
from ondevice.settings import runtime_options, sampling_options
from ondevice.stats import GenerationStats
from ondevice.tokenizer import Tokenizer

Name = str | os.PathLike[str]


def load(model: Name | None = None, **options: Any) -> Model:
    """Load a model by path, name or alias; without one, the model that ships.

    options: fields of RuntimeConfig, such as dram_budget="4GB". Raises ModelNotFoundError,
    UnsupportedModelError, BundleError, BackendUnavailableError, UsageError and, before anything is read,
    BudgetError with the smallest budget that works.
    """
    return Model(open_model(model, runtime_options(options)))


def inspect(model: Name | None = None, **options: Any) -> Plan:
    """What `load` with the same arguments would hold in memory, without loading. It may not fit."""
    return open_model(model, runtime_options(options)).plan


def convert(
    source: Name,
    output: Name | None = None,
    quant: str = QuantConfig().name,
    *,
    on_progress: Callable[[ConversionProgress], None] | None = None,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
) -> Path:
    """Turn a checkpoint (a folder, a llama2.c file, a repository id or alias) into a bundle at `output`.

    Without one, it is made where models are found by name, under the source's. resume continues what was
    interrupted; force replaces an existing output; offline forbids downloads. Returns the bundle's path.
    Raises CheckpointError, UnsupportedModelError, ModelNotFoundError, UsageError and OSError.
    """
    from ondevice.converters.convert import convert as run

    target = bundle_target(source, output)
    return run(
        find_checkpoint(source, offline), target, quant, resume=resume, force=force, on_progress=on_progress
    )


def verify(model: Name | None = None, *, on_progress: Callable[[int, int], None] | None = None) -> Report:
    """Read every byte of a bundle and compare it with every size, hash and checksum.

    on_progress gets (bytes read, bytes in all). Raises BundleError at the first damage.
    """
    return verify_bundle(find_model(model), _native.crc32c, on_progress)


def open_model(model: Name | None, runtime: RuntimeConfig) -> ResolvedModel:
    """What `load` does before it reads a weight; raises what it raises, but not BudgetError."""
    with system_refusals():
        return resolve(Bundle.open(find_model(model)), runtime)


def text_tokenizer(resolved: ResolvedModel) -> Tokenizer:
    """The model's tokenizer. Raises UsageError if it was converted without one.

    And BudgetError where the budget has no room for reading it.
    """
    if resolved.tokenizer is None and resolved.bundle.manifest.tokenizer.kind is not None:
        resolved.require_fit()
    if resolved.tokenizer is None:
        raise UsageError(
            f"{resolved.bundle.name} has no tokenizer, so it takes token ids and no text: in Python, "
            "ondevice.load(...).generate(tokens=[...]); the command line has nothing for that"
        )
    return resolved.tokenizer


class Model:
    """A loaded model. Made by `load`; closed by `close`, by leaving its `with`, or when it is collected."""

    def __init__(self, resolved: ResolvedModel) -> None:
        """Use `load`."""
        resolved.require_fit()
        resolved.warn()
        self.name = resolved.bundle.name
        self.config = resolved.bundle.config
        self.bundle = resolved.bundle
        self.runtime = resolved.runtime
        self._resolved = resolved
        self._last_stats = LastStats()
        self._keys = itertools.count()
        # MLX keeps a thread of its own for every one that it has ever computed for.
        kept = resolved.runtime.backend == "mlx"
        self._owner: OwnerThread[Any] = OwnerThread(f"ondevice-{self.name}", kept)
        urgent = self._owner.run_urgent
        with ExitStack() as undo:
            undo.callback(self._owner.close)
            # An interrupt leaves the iterator, and so cancels the loading.
            (engine,) = self._owner.stream(
                lambda cancelled: iter([Engine(resolved, cancelled, between_passes=urgent)])
            )
            self._engine: Engine = engine
            self._owner.when_idle(engine.fill_ahead)
            undo.pop_all()
        self._watch = BudgetWatch(self._owner, engine, DEFAULT_PRESSURE)
        if self.runtime.memory_pressure == "auto":
            self._watch.start(system_source)
        self._finalizer = weakref.finalize(self, _close, self._watch, self._owner, engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """`encode(text)` and `decode(ids)`. Raises UsageError if the model was converted without one."""
        return text_tokenizer(self._resolved)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """How conversations become token ids. Raises BundleError for a template that can't be used."""
        file = self.bundle.manifest.tokenizer.chat_template
        source = None if file is None else self.bundle.read_small(file)
        return ChatTemplate.load(source, self.tokenizer)

    @property
    def stats(self) -> GenerationStats:
        """Figures of the generation that finished last, be it cancelled; waits until a cancelled one has."""
        self._owner.require_own_process()
        return self._last_stats.get()

    @property
    def plan(self) -> Plan:
        """How the budget is divided now."""
        return self._engine.plan

    @property
    def memory_pressure(self) -> MemoryPressure:
        """How scarce memory is, what that leaves of the budget, and how often it has changed it."""
        return self._watch.state

    @property
    def kernel_target(self) -> str:
        """The instruction set that multiplies."""
        return self._engine.kernel_target

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        sampling: SamplingConfig | None = None,
        **options: Any,
    ) -> Response:
        """Continue a text, or token ids, as it stands. options: fields of SamplingConfig; greedy by default.

        Raises ContextOverflowError for a prompt longer than the context, UsageError, FlashReadError.
        """
        return gather(self.stream(prompt, tokens=tokens, sampling=sampling, **options))

    def stream(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        sampling: SamplingConfig | None = None,
        **options: Any,
    ) -> Iterator[Event]:
        """`generate`, one event per token and a last one with `finish_reason` and `stats`.

        The work begins with the first event asked for; closing the iterator cancels it.
        """
        self._require_open()
        ids = self.prompt_ids(prompt, tokens)
        return self.stream_ids(None, ids, sampling_options(sampling, options))

    async def agenerate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        sampling: SamplingConfig | None = None,
        **options: Any,
    ) -> Response:
        """`generate` for asyncio; cancelling the task cancels the work."""
        async with aclosing(self.astream(prompt, tokens=tokens, sampling=sampling, **options)) as events:
            return gather([event async for event in events])

    def astream(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        sampling: SamplingConfig | None = None,
        **options: Any,
    ) -> AsyncGenerator[Event, None]:
        """`stream` for asyncio."""
        self._require_open()
        ids = self.prompt_ids(prompt, tokens)
        return self.astream_ids(None, ids, sampling_options(sampling, options))

    def session(self, instructions: str | None = None, *, when_full: WhenFull = "stop") -> Session:
        """A conversation that keeps its keys and values between turns. instructions: a system message.

        when_full: `stop` refuses a turn that the context has no room for, `drop` forgets the oldest ones.
        """
        self._require_open()
        return Session(self, instructions, when_full)

    def logits(self, tokens: Sequence[int]) -> Float32:
        """Logits of what follows each of tokens (T,): (T, V) float32, which is the caller's memory."""
        self._require_open()
        ids = token_ids(tokens)
        check_context(len(ids), self.plan.max_context)
        out = np.empty((len(ids), self.config.vocab_size), dtype=np.float32)

        def fill(cancelled: IsCancelled) -> Iterator[int]:
            done = 0
            for piece in self._engine.logits(ids, cancelled):
                out[done : done + len(piece)] = piece
                done += len(piece)
                yield done

        for _ in self._owner.stream(fill):
            pass
        return out

    def score(
        self,
        text: str | None = None,
        *,
        tokens: Iterable[int] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Score:
        """How well the model predicts a text: perplexity over pieces that fill a context each.

        tokens: taken as they are needed, so that a text of any length can be scored. on_progress gets the
        tokens predicted. Raises UsageError for a text too short to predict, BudgetError where the budget
        had no room for the default context: scores depend on it.
        """
        self._require_open()
        require_one(text, tokens)
        if tokens is None:
            tokens = chain.from_iterable(self.tokenizer.encode_parts([text or ""]))
        tally = Tally()
        for piece in scoring_windows(self._resolved, token_stream(tokens)):
            for done in self._owner.stream(self._score_work(piece, tally)):
                if on_progress is not None:
                    on_progress(done)
        return tally.score()

    def measure(self, prompt_tokens: int, max_tokens: int) -> GenerationStats:
        """Figures of one run over a made-up prompt, with the ends of text ruled out: for benchmarks."""
        prompt = benchmark_prompt(prompt_tokens, self.config.vocab_size)
        ends = dict.fromkeys(self.bundle.manifest.tokenizer.eos_ids, -math.inf)
        return self.generate(tokens=prompt, max_tokens=max_tokens, logit_bias=ends).stats

    def set_dram_budget(self, budget: str | int) -> Plan:
        """Keep to another budget from now on; while a generation runs, from its next token on.

        Under memory pressure less is kept to, never more. What other models have claimed by now counts.
        Returns the new plan. Raises BudgetError, and changes nothing, if the model can't run in it.
        """
        self._require_open()
        nbytes = budget_bytes(budget, self._engine.replanned)
        self._watch.set_user_budget(nbytes)
        warn_of_budget(budget, self.plan, self.name)
        return self.plan

    def close(self) -> None:
        """Cancel what runs, refuse what waits, free everything. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Model:
        self._require_open()
        return self

    def _require_open(self) -> None:
        """Raises OndeviceError once the model is closed, and in a child of fork()."""
        self._owner.require_open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prompt_ids(self, prompt: str | None, tokens: Sequence[int] | None) -> list[int]:
        """Token ids of a text given one way or the other.

        Raises UsageError if it is both or neither, or neither text nor integers.
        """
        require_one(prompt, tokens)
        if tokens is not None:
            return token_ids(tokens)
        return self.tokenizer.encode(prompt or "", most=self.plan.max_context)

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a transcript, up to where the model's next turn begins."""
        return self.chat_template.encode(messages, self.tokenizer, most=self.plan.max_context)

    def new_key(self) -> int:
        """Names a key/value cache that doesn't exist yet."""
        return next(self._keys)

    def copy_cache(self, source: int, target: int) -> None:
        """Give `target` what the cache of `source` holds."""
        self._owner.call(lambda: self._engine.fork(source, target))

    def retire(self, key: int) -> None:
        """Nobody needs the cache of `key` any more; it goes before the next piece of work."""
        self._engine.kv.retired.put(key)

    def stream_ids(self, key: int | None, ids: list[int], sampling: SamplingConfig) -> Iterator[Event]:
        """Events of continuing `ids` with the KV cache of `key`, or one of its own."""
        with self._last_stats.noted(self._work(key, ids, sampling)) as work:
            yield from self._owner.stream(work)

    async def astream_ids(
        self, key: int | None, ids: list[int], sampling: SamplingConfig
    ) -> AsyncGenerator[Event, None]:
        """`stream_ids` for asyncio."""
        with self._last_stats.noted(self._work(key, ids, sampling)) as work:
            async with aclosing(self._owner.astream(work)) as events:
                async for event in events:
                    yield event

    def _work(
        self, key: int | None, ids: list[int], sampling: SamplingConfig
    ) -> Callable[[IsCancelled], Iterator[Event]]:
        return lambda cancelled: self._engine.generate(key, ids, sampling, cancelled)

    def _score_work(self, ids: list[int], tally: Tally) -> Callable[[IsCancelled], Iterator[int]]:
        """Adds every token of ids but the first to the tally; yields how many it has."""

        def work(cancelled: IsCancelled) -> Iterator[int]:
            # Summed where they are computed: nobody's queue fills with logits.
            targets = iter(ids[1:])
            for logits in self._engine.logits(ids[:-1], cancelled):
                tally.add(logits, list(itertools.islice(targets, len(logits))))
                yield tally.tokens

        return work


def _close(watch: BudgetWatch, owner: OwnerThread[Any], engine: Engine) -> None:
    watch.stop()
    owner.close(engine.close)
    watch.join()
