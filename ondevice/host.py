"""The `Host` that a loaded model and its sessions share: the engine, its owner thread and their shutdown."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from ondevice.budget.plan import Plan
from ondevice.budget.pressure import DEFAULT_PRESSURE
from ondevice.budget.pressure_sources import system_source
from ondevice.callbacks import IsCancelled, OnPrompt, PromptProgress
from ondevice.chat_template import ChatTemplate, read_template
from ondevice.chat_template.messages import Message
from ondevice.chat_template.tools import PLAIN, PromptOptions
from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained, Gate
from ondevice.constraints.grammars import Grammars, GrammarVocabulary, grammars_bytes, require_package
from ondevice.errors import UsageError
from ondevice.generate import Event, Steps, watched
from ondevice.model.layer_range import LaterLayers
from ondevice.model.shared_passes import PassRequest
from ondevice.response import LastStats, Work
from ondevice.runtime.budget_watch import BudgetWatch
from ondevice.runtime.engine import Engine
from ondevice.runtime.owner import OwnerThread
from ondevice.runtime.resolving import ResolvedModel, is_auto
from ondevice.tokenizer import Tokenizer

T = TypeVar("T")


class Host:
    """Runs work on the engine's owner thread, until `close` or until nothing refers to it."""

    def __init__(self, resolved: ResolvedModel, later: LaterLayers | None = None) -> None:
        """Load the model. Raises BudgetError before anything is read, and what reading raises.

        later: layers that other machines run.
        """
        self._resolved = resolved
        self._last_stats = LastStats()
        self._keys = itertools.count()
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        name, runtime = resolved.bundle.name, resolved.runtime
        # The thread is kept with MLX, which holds a thread for each thread that ever computed with it.
        self.owner: OwnerThread[Any] = OwnerThread(f"ondevice-{name}", runtime.backend == "mlx")
        urgent = self.owner.run_urgent
        with ExitStack() as undo:
            undo.callback(self.owner.close)
            # An interrupt leaves the iterator, which cancels the loading.
            (engine,) = self.owner.stream(
                lambda cancelled: iter([Engine(resolved, cancelled, between_passes=urgent, later=later)])
            )
            self.engine: Engine = engine
            self.owner.run_jointly(engine.joint)
            self.owner.when_idle(engine.step_idle)
            undo.pop_all()
        self.watch = BudgetWatch(self.owner, engine, DEFAULT_PRESSURE)
        if runtime.memory_pressure == "auto":
            self.watch.start(system_source)
        self._finalizer = weakref.finalize(self, _close, self.watch, self.owner, engine)

    @property
    def plan(self) -> Plan:
        """The current memory plan: how the budget is divided."""
        return self.engine.plan

    @property
    def last_stats(self) -> LastStats:
        """Stats of the generation that finished last."""
        return self._last_stats

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that renders conversations to token ids. Raises BundleError if it can't be used."""
        runtime, file = self._resolved.runtime, self._resolved.bundle.manifest.tokenizer.chat_template
        source = None if file is None else self._resolved.bundle.read_small(file)
        if runtime.chat_template:
            source = read_template(runtime.chat_template)
        return ChatTemplate.load(source, text_tokenizer(self._resolved), runtime.day)

    def chat_ids(self, messages: Sequence[Message], options: PromptOptions = PLAIN) -> list[int]:
        """Token ids of a conversation, up to where the model's next turn begins."""
        tokenizer = text_tokenizer(self._resolved)
        return self.chat_template.encode(messages, tokenizer, options=options, most=self.plan.max_context)

    def new_key(self) -> int:
        """A new integer to identify a key/value cache. The cache itself is created later."""
        return next(self._keys)

    def copy_cache(self, source: int, target: int) -> None:
        """Copy the key/value cache of `source` to `target`."""
        self.owner.call(lambda: self.engine.fork(source, target))

    def save_state(self, key: int, folder: Path) -> None:
        """Write the key/value cache `key` to a folder, as far as the disk has room."""
        self._run_jointly(partial(self.engine.save_state, key, folder))

    def load_state(self, key: int, messages: Sequence[Message], folder: Path) -> None:
        """Read what a folder has stored of a conversation's keys and values into the cache `key`."""
        self._run_jointly(partial(self.engine.load_state, key, self.chat_ids(messages), folder))

    def retire(self, key: int, keep: bool = False) -> None:
        """Free the cache of `key` before the next piece of work. Safe to call during garbage collection.

        keep: whether to leave it as a prefix for other texts instead, as far as memory allows.
        """
        self.engine.kv.retired.put((key, keep))

    def drop_prefixes(self) -> None:
        """Free the keys and values that ended texts left for others."""
        self.owner.call(self.engine.kv.drop_prefixes)

    def stream(self, work: Callable[[IsCancelled], Iterator[T]]) -> Iterator[T]:
        """Run `work` on the owner thread and yield what it yields."""
        return self.owner.stream(work)

    def stream_ids(
        self,
        key: int | None,
        ids: list[int],
        sampling: SamplingConfig,
        gate: Gate | None = None,
        keep: bool = False,
    ) -> Iterator[Event]:
        """Events of a generation that continues `ids` with the key/value cache of `key`.

        A `key` of None uses a new cache. gate: tells which parts obey the constraint; None: all of the text.
        keep: whether a new cache begins with keys and values that other texts left for a prefix of `ids`, and
        is left for others.

        Raises ConstraintError, and BudgetError if the budget has no room for constraints.
        """
        follow = self._constraining(sampling, gate)
        with self._last_stats.noted(self._work(key, ids, sampling, follow, keep)) as work:
            yield from self.owner.stream(work, joint=True)

    async def astream_ids(
        self,
        key: int | None,
        ids: list[int],
        sampling: SamplingConfig,
        gate: Gate | None = None,
        keep: bool = False,
        on_prompt: OnPrompt | None = None,
    ) -> AsyncGenerator[Event, None]:
        """`stream_ids` for asyncio. on_prompt: called on the owner thread."""
        follow = None
        if sampling.constraint is not None:
            import asyncio  # Slow to import, and callers of this have imported it.

            # On another thread, because reading a grammar may take a second.
            follow = await asyncio.to_thread(self._constraining, sampling, gate)
        with self._last_stats.noted(self._work(key, ids, sampling, follow, keep, on_prompt)) as work:
            async with aclosing(self.owner.astream(work, joint=True)) as events:
                async for event in events:
                    yield event

    def _constraining(self, sampling: SamplingConfig, gate: Gate | None) -> Callable[[], Constrained] | None:
        """A function that makes the `Constrained` of a new text; None without a constraint.

        The function is called when the text begins, so that waiting texts hold no grammar. The grammar is
        read once here, which may take a second; usually it is still in memory when the text begins.

        gate: as in `stream_ids`. Raises what that raises.
        """
        if sampling.constraint is None:
            return None
        with self._grammars_lock:
            grammars = self._grammars = self._grammars or self._load_grammars()
        ends = frozenset(text_tokenizer(self._resolved).eos_ids)
        constraint = sampling.constraint
        grammars.matcher(constraint)

        def follow() -> Constrained:
            unshared_matcher = partial(grammars.unshared_matcher, constraint)
            matcher, digits = grammars.matcher(constraint), grammars.digit_bound(constraint)
            return Constrained(matcher, grammars.vocab_size, ends, gate, unshared_matcher, digits)

        return follow

    def require_open(self) -> None:
        """Check that the host can be used. Raises OndeviceError after `close`, and in a child of fork()."""
        self.owner.require_open()

    def close(self) -> None:
        """Cancel running work, refuse waiting work and free everything. Idempotent."""
        self._finalizer()

    def _run_jointly(self, steps: Callable[[IsCancelled], Iterator[PassRequest]]) -> None:
        """Run work in passes that texts share. It yields no events."""
        for _ in self.owner.stream(steps, joint=True):
            pass

    def _work(
        self,
        key: int | None,
        ids: list[int],
        sampling: SamplingConfig,
        follow: Callable[[], Constrained] | None,
        keep: bool,
        on_prompt: OnPrompt | None = None,
    ) -> Work:
        def work(cancelled: IsCancelled) -> Steps[None]:
            constrained = None if follow is None else follow()
            steps = self.engine.steps(key, ids, sampling, cancelled, constrained, keep)
            return steps if on_prompt is None else watched(steps, _PromptWatch(on_prompt).see, PassRequest)

        return work

    def _load_grammars(self) -> Grammars:
        """The model's grammars. Reserves memory for them in the budget."""
        require_package()
        tokenizer, rows = text_tokenizer(self._resolved), self._resolved.bundle.config.vocab_size
        runtime = self._resolved.runtime
        self.watch.hold_constraints(grammars_bytes(rows, runtime.parallel), is_auto(runtime.dram_budget))
        known = min(rows, tokenizer.vocab_size)
        texts = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (rows - known)
        return Grammars(
            GrammarVocabulary(
                texts,
                tokenizer.special_tokens,
                tokenizer.eos_ids,
                lambda text: tokenizer.encode(text, add_bos=False),
            )
        )


class _PromptWatch:
    """Reports how far a prompt has been read, from the passes that its generation needs."""

    def __init__(self, on_prompt: OnPrompt) -> None:
        self._on_prompt = on_prompt
        self._reused_tokens = -1
        self._begun_seconds = 0.0

    def see(self, request: PassRequest) -> None:
        """Report how much of the prompt has been read, when a pass is requested."""
        if not request.unread:
            return
        if self._reused_tokens < 0:
            self._reused_tokens, self._begun_seconds = request.length, time.monotonic()
        # Reused keys and values whose memory was needed elsewhere are computed again.
        self._reused_tokens = min(self._reused_tokens, request.length)
        seconds = time.monotonic() - self._begun_seconds
        tokens = request.length + request.unread
        self._on_prompt(PromptProgress(tokens, request.length, self._reused_tokens, seconds))


def text_tokenizer(resolved: ResolvedModel) -> Tokenizer:
    """The model's tokenizer.

    Raises UsageError if the model was converted without one, BudgetError if the budget has no room to read
    it.
    """
    if resolved.tokenizer is None and resolved.bundle.manifest.tokenizer.kind is not None:
        resolved.require_fit()
    if resolved.tokenizer is None:
        raise UsageError(
            f"{resolved.bundle.name} has no tokenizer, so it takes token ids and no text: in Python, "
            "ondevice.load(...).generate(tokens=[...]); the command line has nothing for that"
        )
    return resolved.tokenizer


def _close(watch: BudgetWatch, owner: OwnerThread[Any], engine: Engine) -> None:
    watch.stop()
    owner.close(engine.close)
    watch.join()
