"""The public API: `load` a model, generate and score with it, hold sessions; `inspect` and `convert`.

Every call may come from any thread; the model's owner thread does the work. Nothing is printed: results,
callbacks and `logging` are the only outputs. All errors derive from `OndeviceError`.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from ondevice.backends.base import Float32
from ondevice.budget.plan import Plan
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import Report
from ondevice.bundle.verify import verify as verify_bundle
from ondevice.callbacks import IsCancelled, OnBytes, OnCount, OnPrompt, ignore_count
from ondevice.chat_template import ChatTemplate
from ondevice.chat_template.messages import Message
from ondevice.chat_template.tools import PromptOptions, Think
from ondevice.config import (
    AUTO_QUANT,
    RuntimeConfig,
    RuntimeOptions,
    SamplingConfig,
    SamplingOptions,
    WhenFull,
)
from ondevice.constraints.constraint import Constraint
from ondevice.errors import UsageError, system_refusals
from ondevice.generate import Event, check_context, require_one, token_ids, token_stream
from ondevice.host import Host, text_tokenizer
from ondevice.kernels import _native
from ondevice.meter import Counters
from ondevice.model.layer_range import LaterLayers
from ondevice.response import Response, gather, without_reuse
from ondevice.runtime.budget_watch import MemoryPressure
from ondevice.runtime.models import ConversionProgress, find_model
from ondevice.runtime.resolving import (
    ResolvedModel,
    budget_bytes,
    require_full_model,
    resolve,
    warn_of_budget,
)
from ondevice.sampling import log_probabilities
from ondevice.scoring import Score, Tally, TokenScore, benchmark_prompt, scoring_windows
from ondevice.session import Session, Tools
from ondevice.settings import runtime_options, sampling_options
from ondevice.stats import GenerationStats
from ondevice.tokenizer import Tokenizer
from ondevice.tokenizer.infill import InfillTokens

Name = str | os.PathLike[str]


def load(model: Name | None = None, **options: Unpack[RuntimeOptions]) -> Model:
    """Load a model by path, name or alias. The default is the model that ships with the package.

    options: fields of RuntimeConfig, such as dram_budget="4GB".

    Raises ModelNotFoundError, UnsupportedModelError, BundleError, BackendUnavailableError and UsageError.
    Raises BudgetError, which holds the smallest budget that works, before anything is read.
    """
    return Model(open_model(model, runtime_options(options)))


def inspect(model: Name | None = None, **options: Unpack[RuntimeOptions]) -> Plan:
    """The memory plan of `load` with the same arguments, without loading. The plan may not fit."""
    return open_model(model, runtime_options(options), sliced=True).plan


def convert(
    source: Name,
    output: Name | None = None,
    quant: str = AUTO_QUANT,
    *,
    on_progress: Callable[[ConversionProgress], None] | None = None,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    keep_source: bool = False,
    remove_source: bool = False,
    chat_template: Name | None = None,
) -> Path:
    """Turn a checkpoint into a bundle.

    Args:
        source: a folder, a GGUF or llama2.c file, a repository id, a GGUF file of one
            (`owner/name:file.gguf`), or an alias.
        output: the bundle's folder. The default has the source's name, where models are found by name.
        quant: `q4`, `q5`, `q6`, `q8` or `f16`. `auto` copies the codes of quantised weights where it can, and
            is `q4` for floating-point ones.
        on_progress: called with the progress.
        resume: continue a conversion that was interrupted.
        force: replace an existing output.
        offline: forbid downloads.
        keep_source: keep a repository's files in the hub's cache. Otherwise its weights are converted as they
            arrive and aren't stored.
        remove_source: delete the source, a local GGUF file with all its parts, once every byte of the bundle
            is verified.
        chat_template: a file with a Jinja template that replaces the checkpoint's.

    Returns the bundle's path. Raises CheckpointError, UnsupportedModelError, ModelNotFoundError, UsageError
    and OSError, DownloadError if a repository can't be read to its end, and BundleError if the bundle is
    damaged and the source was to be removed.
    """
    from ondevice.runtime.conversion import prepare
    from ondevice.runtime.local_source import removable_source

    removable = removable_source(source) if remove_source else None
    with prepare(
        source, output, quant, offline=offline, keep_source=keep_source, chat_template=chat_template
    ) as prepared:
        path = prepared.run(on_progress, resume=resume, force=force)
    if removable is not None:
        removable.remove(path)
    return path


def verify(model: Name | None = None, *, on_progress: OnBytes | None = None) -> Report:
    """Read every byte of a bundle and compare it with every size, hash and checksum.

    Raises BundleError at the first damage.
    """
    return verify_bundle(find_model(model), _native.crc32c, on_progress)


def write_slice(bundle: Bundle, output: Name, *, force: bool = False) -> Path:
    """Write a slice of a model, as `Bundle.slice` returns it, to a new bundle, and return the bundle's path.

    Raises UsageError if the output exists and `force` is False, FlashReadError for damage, and OndeviceError
    if the disk refuses.
    """
    from ondevice.converters.slices import write_slice as write

    return write(bundle, Path(output), force)


def open_model(model: Name | None, runtime: RuntimeConfig, *, sliced: bool = False) -> ResolvedModel:
    """The first part of `load`: resolve a model without reading weights.

    sliced: whether the bundle may be a slice of a model.

    Raises what `load` raises, except BudgetError.
    """
    bundle = Bundle.open(find_model(model))
    if not sliced:
        require_full_model(bundle)
    with system_refusals():
        return resolve(bundle, runtime)


class Model:
    """A loaded model, made by `load`.

    It closes on `close`, at the end of its `with` block, or when it is garbage-collected.
    """

    def __init__(self, resolved: ResolvedModel, later: LaterLayers | None = None) -> None:
        """Use `load` instead of calling this. later: layers that other machines run."""
        if later is None:
            require_full_model(resolved.bundle)
        resolved.require_fit()
        resolved.warn()
        self.name = resolved.bundle.name
        self.config = resolved.bundle.config
        self.bundle = resolved.bundle
        self.runtime = resolved.runtime
        self._resolved = resolved
        self._host = Host(resolved, later)
        self._engine = self._host.engine
        self._owner = self._host.owner
        self._watch = self._host.watch

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with `encode(text)` and `decode(ids)`.

        Raises UsageError if the model was converted without one.
        """
        return text_tokenizer(self._resolved)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that renders conversations to token ids. Raises BundleError if it can't be used."""
        return self._host.chat_template

    @property
    def stats(self) -> GenerationStats:
        """Stats of the generation that ended last. Waits until a cancelled generation has ended."""
        self._owner.require_own_process()
        return self._host.last_stats.get()

    @property
    def plan(self) -> Plan:
        """The current memory plan: how the budget is divided."""
        return self._engine.plan

    @property
    def replanned(self) -> Plan:
        """The plan that the model would get if it were planned now, next to the other loaded models."""
        self._require_open()
        return self._engine.replanned

    @property
    def counters(self) -> Counters:
        """Running totals since the model was loaded, scoring included; up to date at every token."""
        self._require_open()
        counters: Counters = self._owner.call(self._engine.counters, urgent=True)
        return counters

    @property
    def memory_pressure(self) -> MemoryPressure:
        """The current memory pressure, and its effect on the budget."""
        return self._watch.state

    @property
    def kernel_target(self) -> str:
        """The instruction set or device that multiplies: such as `avx2`, `mlx-gpu`, `mlx-cpu` or `numpy`."""
        return self._engine.kernel_target

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        special: bool = True,
        suffix: str | None = None,
        cache_prompt: bool = False,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Response:
        """Continue a text or token ids, or fill the gap between two texts.

        Args:
            prompt: the text.
            tokens: token ids, instead of a text.
            special: whether special tokens' names in the prompt become those tokens. Pass False for text from
                others, so that it can't speak for the model or end a turn.
            suffix: the text after a gap that follows the prompt. The gap is filled with the tokens that code
                models have for that. Both texts are plain text.
            cache_prompt: whether to reuse keys and values of earlier texts that begin alike, and to keep this
                text's for later ones, as far as memory allows.
            sampling: the options in one object.
            options: fields of SamplingConfig. The default is greedy decoding.

        Raises ContextOverflowError for a prompt longer than the context, InfillNotSupportedError for a suffix
        if the model has no tokens for it, UsageError, FlashReadError.
        """
        events = self.stream(
            prompt,
            tokens=tokens,
            special=special,
            suffix=suffix,
            cache_prompt=cache_prompt,
            sampling=sampling,
            **options,
        )
        return gather(events)

    def stream(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        special: bool = True,
        suffix: str | None = None,
        cache_prompt: bool = False,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Event]:
        """`generate` as a stream: one event per token, then one with `finish_reason` and `stats`.

        Work begins when the first event is requested. Closing the iterator cancels it.
        """
        self._require_open()
        ids = self._prompt_ids(prompt, tokens, special, suffix)
        return self._host.stream_ids(None, ids, self._sampling(sampling, options, suffix), keep=cache_prompt)

    async def agenerate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        special: bool = True,
        suffix: str | None = None,
        cache_prompt: bool = False,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Response:
        """`generate` for asyncio; cancelling the task cancels the work."""
        stream = self.astream(
            prompt,
            tokens=tokens,
            special=special,
            suffix=suffix,
            cache_prompt=cache_prompt,
            sampling=sampling,
            **options,
        )
        async with aclosing(stream) as events:
            return gather([event async for event in events])

    def astream(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        special: bool = True,
        suffix: str | None = None,
        cache_prompt: bool = False,
        on_prompt: OnPrompt | None = None,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Event, None]:
        """`stream` for asyncio. on_prompt: called on the model's thread as the prompt is read."""
        self._require_open()
        ids = self._prompt_ids(prompt, tokens, special, suffix)
        config = self._sampling(sampling, options, suffix)
        return self._host.astream_ids(None, ids, config, keep=cache_prompt, on_prompt=on_prompt)

    async def astream_scored(
        self,
        tokens: Sequence[int],
        *,
        top: int = 0,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[TokenScore | Event, None]:
        """Yield a `TokenScore` for each of `tokens` except the first, one for the likeliest token after them,
        then the events of the text that continues them.

        top: number of likeliest tokens in each score. Like `logits`, it shares no passes.

        Raises ContextOverflowError if the context has no room for the tokens, UsageError, FlashReadError.
        """
        self._require_open()
        ids, config, key = token_ids(tokens), sampling_options(sampling, options), self._host.new_key()
        check_context(len(ids), self.plan.max_context)
        try:
            async with aclosing(self._owner.astream(self._scoring(ids, top, key))) as pieces:
                async for scores in pieces:
                    for score in scores:
                        yield score
            async with aclosing(self._host.astream_ids(key, ids, config)) as events:
                async for event in events:
                    yield without_reuse(event)
        finally:
            self._host.retire(key)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Tools = (),
        schema: Mapping[str, Any] | bool | str | None = None,
        think: Think = None,
        cache_prompt: bool = False,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Response:
        """The reply to a conversation, which is a list of messages or the text of the first user message.

        Unlike a `session`, it keeps nothing for a next turn. schema: a JSON schema that the reply follows
        unless it calls tools. The other arguments are those of `Session.respond` and `generate`.

        Raises what these raise, and ConstraintError for a schema that can't be enforced.
        """
        events = self.stream_chat(
            messages,
            tools=tools,
            schema=schema,
            think=think,
            cache_prompt=cache_prompt,
            sampling=sampling,
            **options,
        )
        return gather(events)

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Tools = (),
        schema: Mapping[str, Any] | bool | str | None = None,
        think: Think = None,
        cache_prompt: bool = False,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Event]:
        """`chat`, event by event. Closing the iterator cancels it."""
        config = sampling_options(sampling, options)
        if schema is not None and config.constraint is not None:
            raise UsageError("schema and constraint are both given; a reply can obey one of them")
        if schema is not None:
            config = replace(config, constraint=Constraint.json_schema(schema))
        session = self.session(cache_prompt=cache_prompt)
        return session.stream_response(messages, tools=tools, think=think, sampling=config)

    def session(
        self,
        instructions: str | None = None,
        *,
        when_full: WhenFull = "stop",
        cache_prompt: bool = False,
    ) -> Session:
        """A conversation that keeps its keys and values between turns, so that only new messages are
        computed.

        instructions: the system message. when_full: `stop` refuses a turn that doesn't fit the context,
        `drop` forgets the oldest turns. cache_prompt: whether to reuse keys and values of earlier texts that
        begin alike, and to keep this session's for later texts, as far as memory allows.
        """
        self._require_open()
        return Session(self._host, instructions, when_full, cache_prompt)

    @property
    def state_bytes(self) -> int:
        """Bytes of all keys and values in memory: of running texts, of sessions, and of kept texts."""
        return self._engine.kv.nbytes

    def drop_prefixes(self) -> None:
        """Free the keys and values that `cache_prompt` has kept."""
        self._require_open()
        self._host.drop_prefixes()

    def logits(self, tokens: Sequence[int]) -> Float32:
        """Next-token logits at each position of tokens (T,): (T, V) float32, owned by the caller."""
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
        on_progress: OnCount = ignore_count,
    ) -> Score:
        """Perplexity of a text, scored in pieces of one context each.

        Args:
            text: the text, or None for `tokens`.
            tokens: token ids, taken as they are needed, so that a text of any length can be scored.
            on_progress: called with the number of tokens predicted so far.

        Raises UsageError for a text too short to score. Raises BudgetError where the budget has no room for
        the default context, because scores depend on the context.
        """
        self._require_open()
        require_one(text, tokens)
        if tokens is None:
            tokens = chain.from_iterable(self.tokenizer.encode_parts([text or ""]))
        tally = Tally()
        for piece in scoring_windows(self._resolved, token_stream(tokens)):
            for done in self._owner.stream(self._score_work(piece, tally)):
                on_progress(done)
        return tally.score()

    def measure(self, prompt_tokens: int, max_tokens: int) -> GenerationStats:
        """Stats of one benchmark run over a synthetic prompt, with end-of-text tokens banned."""
        prompt = benchmark_prompt(prompt_tokens, self.config.vocab_size)
        ends = dict.fromkeys(self.bundle.manifest.tokenizer.eos_ids, -math.inf)
        return self.generate(tokens=prompt, max_tokens=max_tokens, logit_bias=ends).stats

    def set_dram_budget(self, budget: str | int) -> Plan:
        """Change the budget and return the new plan, which applies from the next token of a generation on.

        Memory pressure may keep the model below the budget, and what other models have claimed by now counts.
        Raises BudgetError, and changes nothing, if the model can't run in the budget.
        """
        self._require_open()
        nbytes = budget_bytes(budget, self._engine.replanned)
        self._watch.set_user_budget(nbytes)
        warn_of_budget(budget, self.plan, self.name)
        return self.plan

    def close(self) -> None:
        """Cancel running work, refuse waiting work and free everything. Idempotent."""
        self._host.close()

    def __enter__(self) -> Model:
        self._require_open()
        return self

    def _require_open(self) -> None:
        """Check that the model can be used. Raises OndeviceError after `close`, and in a child of fork()."""
        self._host.require_open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        think: Think = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the model's next turn begins. Arguments as in `chat`."""
        return self._host.chat_ids(messages, PromptOptions.checked(tools, think))

    def prompt_ids(self, prompt: str, *, special: bool = True, suffix: str | None = None) -> list[int]:
        """Token ids that `generate` continues for these arguments.

        If the prompt is longer than the context, returns only a few more ids than the context has room for.
        """
        most = self.plan.max_context
        if suffix is not None:
            return self.infill.prompt(self.tokenizer, prompt, suffix, most=most)
        return self.tokenizer.encode(prompt, special=special, most=most)

    @property
    def infill(self) -> InfillTokens:
        """The tokens that mark a prefix, a suffix and the middle between them.

        Raises InfillNotSupportedError if the model has none.
        """
        return self.bundle.manifest.tokenizer.infill or InfillTokens.of(self.tokenizer)

    def _prompt_ids(
        self, prompt: str | None, tokens: Sequence[int] | None, special: bool, suffix: str | None
    ) -> list[int]:
        """Token ids of a prompt given either as text or as ids.

        Raises UsageError if both or neither are given, and for a value of another type.
        """
        require_one(prompt, tokens)
        if suffix is not None:
            require_one(suffix, tokens)
        if tokens is not None:
            return token_ids(tokens)
        return self.prompt_ids(prompt or "", special=special, suffix=suffix)

    def _sampling(
        self, sampling: SamplingConfig | None, options: SamplingOptions, suffix: str | None
    ) -> SamplingConfig:
        """The options of a generation. With a suffix, the marks that follow a filled gap end it too."""
        config = sampling_options(sampling, options)
        if suffix is None:
            return config
        return replace(config, end_tokens=(*config.end_tokens, *self.infill.ends))

    def _scoring(
        self, ids: list[int], top: int, key: int
    ) -> Callable[[IsCancelled], Iterator[list[TokenScore]]]:
        """A function that yields scores of `ids` in pieces, and leaves keys and values in cache `key`."""

        def work(cancelled: IsCancelled) -> Iterator[list[TokenScore]]:
            # This runs on the owner thread, so that no queue fills with logits.
            targets = iter(ids[1:])
            for logits in self._engine.logits(ids, cancelled, key):
                following = [next(targets, int(row.argmax())) for row in logits]
                yield [
                    TokenScore(token, *log_probabilities(row, token, top))
                    for row, token in zip(logits, following, strict=True)
                ]

        return work

    def _score_work(self, ids: list[int], tally: Tally) -> Callable[[IsCancelled], Iterator[int]]:
        """A function that scores every token of `ids` except the first, and yields the tally's count."""

        def work(cancelled: IsCancelled) -> Iterator[int]:
            # The sum is taken on the owner thread, so that no queue fills with logits.
            targets = iter(ids[1:])
            for logits in self._engine.logits(ids[:-1], cancelled):
                tally.add(logits, list(itertools.islice(targets, len(logits))))
                yield tally.tokens

        return work
