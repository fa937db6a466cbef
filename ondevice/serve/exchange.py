"""Runs one generation for a request, and gives its events at the client's pace.

The model never waits for a client: events are kept until they are read. `max_tokens` and the context limit
their number.
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
from ondevice.serve.config import ServeConfig
from ondevice.serve.errors import RequestError
from ondevice.serve.fields import Fields, Ignored, parse_object
from ondevice.serve.generation_request import GenerationRequest
from ondevice.serve.guard import json_bytes
from ondevice.serve.metrics import IgnoredLog, Metrics, log_event
from ondevice.serve.models import Models, ServedModel
from ondevice.serve.streaming import PromptReading
from ondevice.settings import sampling_options, with_model_defaults

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.chat_template.messages import Message
    from ondevice.chat_template.tools import PromptOptions
    from ondevice.scoring import TokenScore
    from ondevice.stats import GenerationStats
    from ondevice.tokenizer import Tokenizer

prompts_read: ContextVar[list[GenerationStats] | None] = ContextVar("prompts_read", default=None)
"""Gets the stats of a request whose prompts are read without generating; None for other requests."""


@dataclass(frozen=True)
class Service:
    """The objects that all dialects share."""

    config: ServeConfig
    models: Models
    metrics: Metrics
    ignored: IgnoredLog = field(default_factory=IgnoredLog)


async def read_object(service: Service, request: Request) -> Fields:
    """The object in a request's body. Raises RequestError."""
    return parse_object(await request.body(), Ignored(service.config.strict, service.ignored.tell))


def new_id(prefix: str) -> str:
    """A new id that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


class Generation:
    """The events of one generation, taken one by one. Taking an event raises RequestError if the generation
    failed.
    """

    def __init__(self, reading: PromptReading | None = None) -> None:
        self.reading = reading
        """Gets the prompt's progress, if it is asked for."""
        self.complete = False
        """Whether the last event, or an error, has been added."""
        self.prompt: list[int] = []
        """Token ids of the text that is continued, from the first event on."""
        self.scores: list[TokenScore] = []
        """If requested, from the first event on: scores of the prompt's tokens from the second on, and of the
        likeliest next token."""
        self._events: asyncio.Queue[Event | RequestError] = asyncio.Queue()
        self._tokenizer: Tokenizer | None = None
        self._ended = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, available from the first event on."""
        assert self._tokenizer is not None
        return self._tokenizer

    def begin(self, tokenizer: Tokenizer) -> None:
        """Begin the generation, with the loaded model's tokenizer."""
        self._tokenizer = tokenizer

    def add(self, event: Event | RequestError) -> None:
        """Add an event, or the error that ends the generation."""
        if self.reading is not None and not isinstance(event, RequestError):
            self.reading.complete()
        self.complete = isinstance(event, RequestError) or event.finish_reason is not None
        self._events.put_nowait(event)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, RequestError):
            raise event
        self._ended = event.finish_reason is not None
        return event


@asynccontextmanager
async def generation(
    service: Service, request: GenerationRequest, reading: PromptReading | None = None
) -> AsyncIterator[Generation]:
    """A context with the events of a generation, which is cancelled if the context ends first."""
    running = Generation(reading)
    task = asyncio.create_task(_generate(service, request, running))
    try:
        yield running
    finally:
        if not running.complete:
            task.cancel()
            service.metrics.add("generations_total", reason="cancelled")
        with suppress(asyncio.CancelledError):
            await task


async def _generate(service: Service, request: GenerationRequest, running: Generation) -> None:
    """Run the generation and add its events, or its error, to `running`."""
    try:
        async with service.models.admitted(request.model, request.follows) as loaded:
            running.begin(loaded.model.tokenizer)
            kept: deque[Event] = deque()
            async with aclosing(_events(service, loaded, request, running)) as events:
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
        answer = _refusal(error, request)
        if answer.status >= 500:
            log_event("failed", level=logging.ERROR, model=request.model.name, error=error.for_command_line)
        running.add(answer)
    finally:
        if not running.complete:
            # An error of the program: without this the client would wait for ever.
            running.add(RequestError(500, "the server failed", code="internal_error"))


def _refusal(error: OndeviceError, request: GenerationRequest) -> RequestError:
    """The answer to an error of a generation, with the request's field at fault."""
    answer = RequestError.of(error)
    if isinstance(error, InfillNotSupportedError):
        answer.field = "suffix"
    elif isinstance(error, ConstraintError):
        answer.field = "tools" if request.prompting.must_call else request.constraint_field
    elif isinstance(error, ContextOverflowError):
        answer.field = "prompt" if request.messages is None else request.messages_field
    elif isinstance(error, UsageError) and request.prompting.must_call:
        answer.field = answer.field or "tool_choice"
    return answer


def reading_of(service: Service, request: GenerationRequest) -> PromptReading:
    """Tracks how much of a request's prompts has been read. request: its first generation."""
    return PromptReading(partial(_waiting_tokens, service, request))


async def _waiting_tokens(service: Service, request: GenerationRequest) -> int:
    """The number of tokens of a waiting prompt; 0 if its model isn't loaded.

    Raises RequestError for a prompt that will be refused.
    """
    for loaded in service.models.residents:
        if loaded.facts is request.model:
            with loaded.working():
                try:
                    ids = await asyncio.to_thread(_prompt_ids, loaded.model, request)
                    check_prompt(ids, loaded.model.plan.max_context, loaded.model.config.max_context)
                except ContextOverflowError as error:
                    raise _refusal(await _counted(error, loaded.model, request), request) from error
                except OndeviceError as error:
                    raise _refusal(error, request) from error
                return len(ids)
    return 0


async def _counted(
    error: ContextOverflowError, model: Model, request: GenerationRequest
) -> ContextOverflowError:
    """The error with the number of all the prompt's tokens, which agents use to shorten it."""
    count = await asyncio.to_thread(_all_tokens, model, request)
    return ContextOverflowError(error.for_command_line, count, error.limit)


def _all_tokens(model: Model, request: GenerationRequest) -> int:
    """The number of tokens of a prompt of any length, including its suffix."""
    if request.messages is not None:
        return conversation_tokens(model, request.messages, _prompting(model, request))
    if isinstance(request.prompt, str) and request.suffix is not None:
        return len(model.infill.prompt(model.tokenizer, request.prompt, request.suffix))
    if isinstance(request.prompt, str):
        return len(model.tokenizer.encode(request.prompt, special=True))
    return len(request.prompt or ())


def _prompt_ids(model: Model, request: GenerationRequest) -> Sequence[int]:
    """The token ids of a prompt. A prompt longer than the context may be cut, but stays longer than the
    context.
    """
    if request.messages is not None:
        template, most = model.chat_template, model.plan.max_context
        return template.encode(
            request.messages, model.tokenizer, options=_prompting(model, request), most=most
        )
    if isinstance(request.prompt, str):
        return model.prompt_ids(request.prompt, suffix=request.suffix)
    return request.prompt or ()


def _prompting(model: Model, request: GenerationRequest) -> PromptOptions:
    """The tools, and whether to think; the latter is dropped if the model's template always thinks."""
    if request.prompting.think is False and model.chat_template.always_thinks:
        return replace(request.prompting, think=None)
    return request.prompting


def _settled(event: Event, kept: deque[Event]) -> Iterator[Event]:
    """Yields log-probabilities of tokens that no stop string can cut off any more, and then the event.

    kept: log-probabilities of tokens that may still be cut off.
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
    service: Service, loaded: ServedModel, request: GenerationRequest, running: Generation
) -> AsyncGenerator[Event, None]:
    model = loaded.model
    if request.least_context > model.plan.max_context:
        service.ignored.tell([f"num_ctx above the context of {model.plan.max_context}, {model.name}"])
    prompting = _prompting(model, request)
    if prompting != request.prompting:
        service.ignored.tell([f"no thinking, which {model.name} can't be told"])
    on_prompt = None if running.reading is None else running.reading.tell
    options = {"max_tokens": model.plan.max_context} | request.options
    if prompts_read.get() is not None:
        options |= {"max_tokens": 0, "constraint": None}
    sampling = sampling_options(None, options)  # type: ignore[arg-type]
    if request.messages is not None:
        sampling = recommended(model.bundle.manifest.generation, sampling, request.options)
        # The session's state is reused from earlier texts, and left for later ones.
        session = model.session(cache_prompt=True)
        reply = session.astream_messages(
            request.messages, prompt=prompting, on_prompt=on_prompt, sampling=sampling
        )
        try:
            async with aclosing(reply) as events:
                async for event in events:
                    yield event
        except ContextOverflowError as error:
            raise await _counted(error, model, request) from error
        return
    try:
        async with aclosing(_continued(model, request, sampling, running)) as events:
            async for event in events:
                yield event
    except ContextOverflowError as error:
        raise await _counted(error, model, request) from error


async def _continued(
    model: Model, request: GenerationRequest, sampling: SamplingConfig, running: Generation
) -> AsyncGenerator[Event, None]:
    """The events of a continued text, or of the text that fills a gap."""
    # Encoding a long text would block the event loop.
    running.prompt = list(await asyncio.to_thread(_prompt_ids, model, request))
    if request.suffix is not None:
        sampling = replace(sampling, end_tokens=model.infill.ends)
    if request.scores is None:
        kept, on_prompt = request.cache_prompt, None if running.reading is None else running.reading.tell
        written = model.astream(
            tokens=running.prompt, cache_prompt=kept, on_prompt=on_prompt, sampling=sampling
        )
        async with aclosing(written) as events:
            async for event in events:
                yield event
        return
    scored = model.astream_scored(running.prompt, top=request.scores, sampling=sampling)
    async with aclosing(scored) as items:
        async for item in items:
            if isinstance(item, Event):
                yield item
            else:
                running.scores.append(item)


def conversation_tokens(model: Model, messages: Sequence[Message], prompting: PromptOptions) -> int:
    """Number of tokens of a conversation of any length. Raises what encoding raises."""
    return len(model.chat_template.encode(messages, model.tokenizer, options=prompting))


def recommended(generation: Any, sampling: SamplingConfig, chosen: dict[str, Any]) -> SamplingConfig:
    """`sampling` with what the model's authors recommend for the fields that aren't in `chosen`."""
    return with_model_defaults(sampling, generation, set(chosen))[0]


def json_answer(value: Any) -> Response:
    """An answer that consists of one JSON value."""
    return Response(json_bytes(value), media_type="application/json")
