"""Runs one generation for a request, and gives its events at the client's pace.

The model never waits for a client: events are kept until they are read, which `max_tokens` and the context
bound, and a turn ends when the last one is made.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ondevice.config import SamplingConfig
from ondevice.errors import (
    ConstraintError,
    ContextOverflowError,
    InfillNotSupportedError,
    OndeviceError,
    UsageError,
)
from ondevice.generate import Event, check_prompt
from ondevice.records import dataclass
from ondevice.serve.asked import Asked
from ondevice.serve.config import ServeConfig
from ondevice.serve.errors import RequestError
from ondevice.serve.fields import Fields, Ignored, parse_object
from ondevice.serve.guard import json_bytes
from ondevice.serve.metrics import IgnoredLog, Metrics, log_event
from ondevice.serve.models import LoadedModel, Models
from ondevice.serve.streaming import Reading
from ondevice.settings import sampling_options, with_model_defaults

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.chat_template.messages import Message
    from ondevice.chat_template.tools import PromptOptions
    from ondevice.scoring import TokenScore
    from ondevice.stats import GenerationStats
    from ondevice.tokenizer import Tokenizer

prompts_read: ContextVar[list[GenerationStats] | None] = ContextVar("prompts_read", default=None)
"""Where the prompts of a request are read and nothing is written behind them: their stats go here."""


@dataclass(frozen=True)
class Service:
    """What the dialects share."""

    config: ServeConfig
    models: Models
    metrics: Metrics
    ignored: IgnoredLog = field(default_factory=IgnoredLog)


async def read_object(service: Service, request: Request) -> Fields:
    """The object in a request's body. Raises RequestError."""
    return parse_object(await request.body(), Ignored(service.config.strict, service.ignored.tell))


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


class Generation:
    """The events of one generation, taken one by one. Taking raises RequestError where it failed."""

    def __init__(self, reading: Reading | None = None) -> None:
        self.reading = reading
        """Where the prompt's progress is told; None: nobody asks."""
        self.complete = False
        """Whether its last event, or an error, has been made."""
        self.prompt: list[int] = []
        """Token ids of the text that is continued, as soon as there is an event."""
        self.scores: list[TokenScore] = []
        """Scores of all of them but the first, and of the likeliest token behind them, where they were asked
        for, as soon as there is an event."""
        self._made: asyncio.Queue[Event | RequestError] = asyncio.Queue()
        self._tokenizer: Tokenizer | None = None
        self._ended = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. There is one as soon as there is an event."""
        assert self._tokenizer is not None
        return self._tokenizer

    def begin(self, tokenizer: Tokenizer) -> None:
        """The model's turn has come."""
        self._tokenizer = tokenizer

    def add(self, event: Event | RequestError) -> None:
        """Add an event, or the error that ends the generation."""
        if self.reading is not None and not isinstance(event, RequestError):
            self.reading.complete()
        self.complete = isinstance(event, RequestError) or event.finish_reason is not None
        self._made.put_nowait(event)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self._made.get()
        if isinstance(event, RequestError):
            raise event
        self._ended = event.finish_reason is not None
        return event


@asynccontextmanager
async def generation(
    service: Service, asked: Asked, reading: Reading | None = None
) -> AsyncIterator[Generation]:
    """A context with the events of a generation, which is cancelled where the context ends first."""
    running = Generation(reading)
    task = asyncio.create_task(_generate(service, asked, running))
    try:
        yield running
    finally:
        if not running.complete:
            task.cancel()
            service.metrics.add("generations_total", reason="cancelled")
        with suppress(asyncio.CancelledError):
            await task


async def _generate(service: Service, asked: Asked, running: Generation) -> None:
    """Put the generation's events, or the error that ends it, where they are taken."""
    try:
        async with service.models.turn(asked.model, asked.follows) as loaded:
            running.begin(loaded.model.tokenizer)
            kept: deque[Event] = deque()
            async with aclosing(_events(service, loaded, asked, running)) as events:
                async for event in events:
                    if event.finish_reason == "cancelled":
                        raise RequestError(503, "the server is stopping", code="server_stopping")
                    if event.token is not None:
                        service.metrics.add("generated_tokens_total")
                    if event.stats is not None:
                        service.metrics.generated(event.stats, event.finish_reason or "")
                        if (read := prompts_read.get()) is not None:
                            read.append(event.stats)
                    for each in _settled(event, kept):
                        running.add(each)
    except RequestError as error:
        running.add(error)
    except OndeviceError as error:
        answer = _refusal(error, asked)
        if answer.status >= 500:
            log_event("failed", level=logging.ERROR, model=asked.model.name, error=error.for_command_line)
        running.add(answer)
    finally:
        if not running.complete:
            # An error of the program itself: the client would wait for ever.
            running.add(RequestError(500, "the server failed", code="internal_error"))


def _refusal(error: OndeviceError, asked: Asked) -> RequestError:
    """The answer to an error of a generation, with the request's field that is at fault."""
    answer = RequestError.of(error)
    if isinstance(error, InfillNotSupportedError):
        answer.field = "suffix"
    elif isinstance(error, ConstraintError):
        answer.field = "tools" if asked.prompting.must_call else asked.constraint_field
    elif isinstance(error, ContextOverflowError):
        answer.field = "prompt" if asked.messages is None else asked.messages_field
    elif isinstance(error, UsageError) and asked.prompting.must_call:
        answer.field = answer.field or "tool_choice"
    return answer


def reading_of(service: Service, asked: Asked) -> Reading:
    """What will know how far the prompts of a request have been read. asked: its first generation."""
    return Reading(partial(_waiting_tokens, service, asked))


async def _waiting_tokens(service: Service, asked: Asked) -> int:
    """The number of a prompt's tokens while it waits for its turn; 0 if its model isn't loaded.

    Raises RequestError for a prompt that will be refused.
    """
    for loaded in service.models.residents:
        if loaded.facts is asked.model:
            with loaded.working():
                try:
                    ids = await asyncio.to_thread(_prompt_ids, loaded.model, asked)
                    check_prompt(ids, loaded.model.plan.max_context, loaded.model.config.max_context)
                except ContextOverflowError as error:
                    raise _refusal(await _counted(error, loaded.model, asked), asked) from error
                except OndeviceError as error:
                    raise _refusal(error, asked) from error
                return len(ids)
    return 0


async def _counted(error: ContextOverflowError, model: Model, asked: Asked) -> ContextOverflowError:
    """The error with all tokens of the prompt, which is read as far as the context goes: agents shorten it by
    what there is too much.
    """
    count = await asyncio.to_thread(_all_tokens, model, asked)
    return ContextOverflowError(error.for_command_line, count, error.limit)


def _all_tokens(model: Model, asked: Asked) -> int:
    """Number of tokens of a prompt, with what stands behind the gap, however long it is."""
    if asked.messages is not None:
        return conversation_tokens(model, asked.messages, _prompting(model, asked))
    if isinstance(asked.prompt, str) and asked.suffix is not None:
        return len(model.infill.prompt(model.tokenizer, asked.prompt, asked.suffix))
    if isinstance(asked.prompt, str):
        return len(model.tokenizer.encode(asked.prompt, special=True))
    return len(asked.prompt or ())


def _prompt_ids(model: Model, asked: Asked) -> Sequence[int]:
    """Token ids of a prompt; of one that is longer than the context perhaps not all, but more than that."""
    if asked.messages is not None:
        template, most = model.chat_template, model.plan.max_context
        return template.encode(asked.messages, model.tokenizer, options=_prompting(model, asked), most=most)
    if isinstance(asked.prompt, str):
        return model.prompt_ids(asked.prompt, suffix=asked.suffix)
    return asked.prompt or ()


def _prompting(model: Model, asked: Asked) -> PromptOptions:
    """Tools, and whether to think as far as the model can be told."""
    if asked.prompting.think is False and model.chat_template.always_thinks:
        return replace(asked.prompting, think=None)
    return asked.prompting


def _settled(event: Event, kept: deque[Event]) -> Iterator[Event]:
    """An event, behind the log-probabilities of tokens that no stop string can cut off any more.

    kept: those of tokens that one may cut off.
    """
    if event.token is None and event.finish_reason is None:
        yield event
        return
    if event.held and event.logprob is not None:
        kept.append(replace(event, text="", tool_call=None, call_part=None, prompt=None))
        event = replace(event, token=None, logprob=None, top_logprobs=())
    while len(kept) > event.held:
        yield kept.popleft()
    yield event


async def _events(
    service: Service, loaded: LoadedModel, asked: Asked, running: Generation
) -> AsyncGenerator[Event, None]:
    model = loaded.model
    if asked.least_context > model.plan.max_context:
        service.ignored.tell([f"num_ctx above the context of {model.plan.max_context}, {model.name}"])
    prompting = _prompting(model, asked)
    if prompting != asked.prompting:
        service.ignored.tell([f"no thinking, which {model.name} can't be told"])
    on_prompt = None if running.reading is None else running.reading.tell
    options = {"max_tokens": model.plan.max_context} | asked.options
    if prompts_read.get() is not None:
        options |= {"max_tokens": 0, "constraint": None}
    sampling = sampling_options(None, options)  # type: ignore[arg-type]
    if asked.messages is not None:
        sampling = recommended(model.bundle.manifest.generation, sampling, asked.options)
        # Its state is what an earlier text has left of the prompt, and is left for later ones.
        session = model.session(cache_prompt=True)
        reply = session.astream_messages(
            asked.messages, prompt=prompting, on_prompt=on_prompt, sampling=sampling
        )
        try:
            async with aclosing(reply) as events:
                async for event in events:
                    yield event
        except ContextOverflowError as error:
            raise await _counted(error, model, asked) from error
        return
    try:
        async with aclosing(_continued(model, asked, sampling, running)) as events:
            async for event in events:
                yield event
    except ContextOverflowError as error:
        raise await _counted(error, model, asked) from error


async def _continued(
    model: Model, asked: Asked, sampling: SamplingConfig, running: Generation
) -> AsyncGenerator[Event, None]:
    """The events of what continues a text, or of what belongs between two."""
    # On another thread, because the event loop can't wait for a long text to be encoded.
    running.prompt = list(await asyncio.to_thread(_prompt_ids, model, asked))
    if asked.suffix is not None:
        sampling = replace(sampling, end_tokens=model.infill.ends)
    if asked.scores is None:
        kept, on_prompt = asked.cache_prompt, None if running.reading is None else running.reading.tell
        written = model.astream(
            tokens=running.prompt, cache_prompt=kept, on_prompt=on_prompt, sampling=sampling
        )
        async with aclosing(written) as events:
            async for event in events:
                yield event
        return
    scored = model.astream_scored(running.prompt, top=asked.scores, sampling=sampling)
    async with aclosing(scored) as items:
        async for item in items:
            if isinstance(item, Event):
                yield item
            else:
                running.scores.append(item)


def conversation_tokens(model: Model, messages: Sequence[Message], prompting: PromptOptions) -> int:
    """Number of tokens of a conversation, however long it is. Raises what encoding raises."""
    return len(model.chat_template.encode(messages, model.tokenizer, options=prompting))


def recommended(generation: Any, sampling: SamplingConfig, chosen: dict[str, Any]) -> SamplingConfig:
    """`sampling` with what the model's authors recommend for what isn't chosen."""
    return with_model_defaults(sampling, generation, set(chosen))[0]


def json_answer(value: Any) -> Response:
    """An answer of one JSON value."""
    return Response(json_bytes(value), media_type="application/json")
