"""Runs one generation for a request, and gives its events at the client's pace.

The model never waits for a client: events are kept until they are read, which `max_tokens` and the context
bound, and a turn ends when the last one is made.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ondevice.config import SamplingConfig
from ondevice.errors import ConstraintError, InfillNotSupportedError, OndeviceError, UsageError
from ondevice.generate import Event
from ondevice.serve.asked import Asked
from ondevice.serve.config import ServeConfig
from ondevice.serve.errors import RequestError, error_body
from ondevice.serve.fields import Fields, parse_object
from ondevice.serve.guard import json_bytes
from ondevice.serve.metrics import Metrics, log_event
from ondevice.serve.models import LoadedModel, Models
from ondevice.settings import sampling_options, with_model_defaults

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.scoring import TokenScore
    from ondevice.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    """What the dialects share."""

    config: ServeConfig
    models: Models
    metrics: Metrics


async def read_object(request: Request) -> Fields:
    """The object in a request's body. Raises RequestError."""
    return parse_object(await request.body())


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


class Generation:
    """The events of one generation, taken one by one. Taking raises RequestError where it failed."""

    def __init__(self) -> None:
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
async def generation(service: Service, asked: Asked) -> AsyncIterator[Generation]:
    """A context with the events of a generation, which is cancelled where the context ends first."""
    running = Generation()
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
            async with aclosing(_events(loaded, asked, running)) as events:
                async for event in events:
                    if event.finish_reason == "cancelled":
                        raise RequestError(503, "the server is stopping", code="server_stopping")
                    if event.token is not None:
                        service.metrics.add("generated_tokens_total")
                    if event.stats is not None:
                        service.metrics.generated(event.stats, event.finish_reason or "")
                    for each in _settled(event, kept):
                        running.add(each)
    except RequestError as error:
        running.add(error)
    except OndeviceError as error:
        answer = RequestError.of(error)
        if isinstance(error, InfillNotSupportedError):
            answer.field = "suffix"
        elif isinstance(error, ConstraintError):
            answer.field = "tools" if asked.prompting.must_call else asked.constraint_field
        elif isinstance(error, UsageError) and asked.prompting.must_call:
            answer.field = answer.field or "tool_choice"
        if answer.status >= 500:
            log_event("failed", level=logging.ERROR, model=asked.model.name, error=error.for_command_line)
        running.add(answer)
    finally:
        if not running.complete:
            # An error of the program itself: the client would wait for ever.
            running.add(RequestError(500, "the server failed", code="internal_error"))


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


async def _events(loaded: LoadedModel, asked: Asked, running: Generation) -> AsyncGenerator[Event, None]:
    model = loaded.model
    options = {"max_tokens": model.plan.max_context} | asked.options
    sampling = sampling_options(None, options)  # type: ignore[arg-type]
    if asked.messages is not None:
        sampling = recommended(model.bundle.manifest.generation, sampling, asked.options)
        with loaded.session_for(asked.messages) as session:
            reply = session.astream_messages(asked.messages, prompt=asked.prompting, sampling=sampling)
            async with aclosing(reply) as events:
                async for event in events:
                    yield event
        return
    async with aclosing(_continued(model, asked, sampling, running)) as events:
        async for event in events:
            yield event


async def _continued(
    model: Model, asked: Asked, sampling: SamplingConfig, running: Generation
) -> AsyncGenerator[Event, None]:
    """The events of what continues a text, or of what belongs between two."""
    if isinstance(asked.prompt, str):
        # On another thread, because the event loop can't wait for a long text to be encoded.
        encode = partial(model.prompt_ids, asked.prompt, suffix=asked.suffix)
        running.prompt = await asyncio.to_thread(encode)
    else:
        running.prompt = list(asked.prompt or ())
    if asked.suffix is not None:
        sampling = replace(sampling, end_tokens=model.infill.ends)
    if asked.scores is None:
        async with aclosing(model.astream(tokens=running.prompt, sampling=sampling)) as events:
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


def recommended(generation: Any, sampling: SamplingConfig, chosen: dict[str, Any]) -> SamplingConfig:
    """`sampling` with what the model's authors recommend for what isn't chosen."""
    return with_model_defaults(sampling, generation, set(chosen))[0]


class Stream(Response):
    """An answer in parts. It begins when its first part is there, so that errors until then have a status."""

    def __init__(self, parts: AsyncGenerator[bytes, None], first: bytes, media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._parts = parts
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def streamed(parts: AsyncGenerator[bytes, None], media_type: str = "text/event-stream") -> Stream:
    """The answer whose parts these are. Raises the errors that come before the first part."""
    return Stream(parts, await anext(parts), media_type)


def json_answer(value: Any) -> Response:
    """An answer of one JSON value."""
    return Response(json_bytes(value), media_type="application/json")


def sse(value: Any, event: str = "") -> bytes:
    """One server-sent event of JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + json_bytes(value) + b"\n\n"


async def with_errors(
    path: str, parts: AsyncGenerator[bytes, None], shown: Callable[[Any], bytes]
) -> AsyncGenerator[bytes, None]:
    """The parts, and behind the first of them an error as a part of its own, as `shown` encodes it."""
    begun = False
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part
                begun = True
        except RequestError as error:
            if not begun:
                raise
            yield shown(error_body(path, error))
