"""`/v1/completions`: continues a text, or token ids, as it stands."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.generate import Event
from ondevice.serve.asked import MAX_TOKENS, Asked
from ondevice.serve.exchange import (
    Service,
    generation,
    json_answer,
    new_id,
    read_object,
    sse,
    streamed,
    with_errors,
)
from ondevice.serve.fields import Fields
from ondevice.serve.models import ModelFacts
from ondevice.serve.openai_chat import take_stream
from ondevice.serve.openai_common import (
    IGNORED,
    LEAST_LOGPROB,
    MAX_CHOICES,
    finish_reason,
    ids_of,
    shown_token,
    summed,
    take_sampling,
    usage,
)
from ondevice.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""What OpenAI documents for this path."""
MAX_PROMPTS = 16
MAX_LOGPROBS = 5


@dataclass(frozen=True)
class _Request:
    asked: tuple[Asked, ...]
    """One for each choice: all choices of a prompt, then those of the next."""
    choices: int
    stream: bool
    include_usage: bool


def routes(service: Service) -> list[Route]:
    return [Route("/v1/completions", partial(_complete, service), methods=["POST"])]


async def _complete(service: Service, request: Request) -> Response:
    wanted = _read(service, await read_object(request))
    head = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": wanted.asked[0].model.name,
    }
    if wanted.stream:
        return await streamed(with_errors(request.url.path, _chunks(service, wanted, head), sse))
    choices, usages = [], []
    for index, asked in enumerate(wanted.asked):
        async with generation(service, asked) as running:
            events = [event async for event in running]
            choices.append(
                {
                    "index": index,
                    "text": "".join(event.text for event in events),
                    "logprobs": _logprobs(events, running.tokenizer, asked),
                    "finish_reason": finish_reason(events[-1]),
                }
            )
        usages.append(_usage(events[-1]))
    return json_answer(head | {"choices": choices, "usage": summed(usages, wanted.choices)})


def _read(service: Service, fields: Fields) -> _Request:
    model = service.models.find(fields.text("model"))
    prompts = _prompts(fields, model)
    options = take_sampling(fields, model)
    most = fields.integer("max_tokens", 0, MAX_TOKENS)
    options["max_tokens"] = DEFAULT_MAX_TOKENS if most is None else most
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    if logprobs is not None:
        options["top_logprobs"] = logprobs
    choices = fields.integer("n", 1, MAX_CHOICES) or 1
    fields.neutral("best_of", 1, choices, why="choices aren't ranked")
    stream, include_usage = take_stream(fields)
    fields.neutral("echo", False)
    fields.neutral("suffix", "")
    fields.ignore(*IGNORED)
    fields.close()
    asked = [Asked(model, prompt=prompt, options=options) for prompt in prompts]
    first, *rest = (each.again(index) for each in asked for index in range(choices))
    every = (first, *(replace(each, follows=True) for each in rest))
    return _Request(every, choices, stream, include_usage)


def _prompts(fields: Fields, model: ModelFacts) -> list[str | tuple[int, ...]]:
    """The prompts: a text, token ids, or a list of either."""
    value = fields.take("prompt")
    wanted = "must be a string, a list of token ids, or a list of either"
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        fields.refuse("prompt", wanted)
    if len(value) > MAX_PROMPTS:
        fields.refuse("prompt", f"has {len(value)} prompts; it may have {MAX_PROMPTS}")
    if not all(isinstance(each, str) or _are_ids(each) for each in value):
        fields.refuse("prompt", wanted)
    ids = (token for each in value if isinstance(each, list) for token in each)
    if any(not 0 <= token < model.vocab_size for token in ids):
        fields.refuse("prompt", f"has a token id that isn't the model's; {ids_of(model)}")
    return [each if isinstance(each, str) else tuple(each) for each in value]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _logprobs(
    events: list[Event], tokenizer: Tokenizer, asked: Asked, offset: int = 0
) -> dict[str, Any] | None:
    """The tokens, their log-probabilities, and where each one's text begins, as far as it is known.

    offset: where the events' text begins.
    """
    if "top_logprobs" not in asked.options:
        return None
    tokens: list[str] = []
    chances: list[float] = []
    likeliest: list[dict[str, float]] = []
    offsets: list[int] = []
    for event in events:
        if event.token is not None and event.logprob is not None:
            tokens.append(shown_token(tokenizer, event.token))
            chances.append(max(event.logprob, LEAST_LOGPROB))
            likeliest.append(
                {
                    shown_token(tokenizer, each): max(chance, LEAST_LOGPROB)
                    for each, chance in event.top_logprobs
                }
            )
            offsets.append(offset)
        offset += len(event.text)
    return {"tokens": tokens, "token_logprobs": chances, "top_logprobs": likeliest, "text_offset": offsets}


def _usage(last: Event) -> dict[str, Any]:
    assert last.stats is not None
    return usage(last.stats)


async def _chunks(service: Service, wanted: _Request, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    if wanted.include_usage:
        head = head | {"usage": None}
    usages = []
    for index, asked in enumerate(wanted.asked):
        offset = 0
        async with generation(service, asked) as running:
            async for event in running:
                last = event.finish_reason is not None
                if event.text or last or event.logprob is not None:
                    choice = {
                        "index": index,
                        "text": event.text,
                        "logprobs": _logprobs([event], running.tokenizer, asked, offset)
                        if event.token is not None
                        else None,
                        "finish_reason": finish_reason(event) if last else None,
                    }
                    yield sse(head | {"choices": [choice]})
                offset += len(event.text)
                if last:
                    usages.append(_usage(event))
    if wanted.include_usage:
        yield sse(head | {"choices": [], "usage": summed(usages, wanted.choices)})
    yield b"data: [DONE]\n\n"
