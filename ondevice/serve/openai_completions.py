"""`/v1/completions`: continues a text, or token ids, without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.generate import Event
from ondevice.records import dataclass
from ondevice.scoring import TokenScore
from ondevice.serve.exchange import (
    Generation,
    Service,
    generation,
    json_answer,
    new_id,
    read_object,
    reading_of,
)
from ondevice.serve.fields import Fields
from ondevice.serve.generation_request import GenerationRequest, take_limit
from ondevice.serve.models import ModelFacts
from ondevice.serve.openai_chat import take_stream
from ondevice.serve.openai_common import (
    IGNORED,
    MAX_CHOICES,
    MIN_LOGPROB,
    finish_reason,
    ids_of,
    shown_token,
    summed,
    take_sampling,
    usage,
)
from ondevice.serve.raw_text import prompt_parts
from ondevice.serve.streaming import PromptReading, sse, sse_dialect, streamed
from ondevice.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's documented default for this path."""
MAX_PROMPTS = 64
MAX_LOGPROBS = 5


@dataclass(frozen=True)
class _CompletionRequest:
    generations: tuple[GenerationRequest, ...]
    """One for each choice: all choices of a prompt, then those of the next."""
    choices: int
    stream: bool
    include_usage: bool
    echo: bool
    """Whether answers begin with the prompt."""


@dataclass(frozen=True)
class _Echo:
    """The prompt, repeated at the beginning of an answer: its text, and `logprobs` of its tokens. Empty by
    default.
    """

    text: str = ""
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] = ()
    text_offset: tuple[int, ...] = ()


def routes(service: Service) -> list[Route]:
    return [Route("/v1/completions", partial(_complete, service), methods=["POST"])]


async def _complete(service: Service, request: Request) -> Response:
    wanted = _read(service, await read_object(service, request))
    head = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": wanted.generations[0].model.name,
    }
    if wanted.stream:
        reading = reading_of(service, wanted.generations[0])
        parts = _chunks(service, wanted, head, reading)
        return await streamed(parts, reading, sse_dialect(request.url.path))
    choices, usages = [], []
    for index, each in enumerate(wanted.generations):
        async with generation(service, each) as running:
            events = [event async for event in running]
            echo = _echo(running, each) if wanted.echo else _Echo()
            text, logprobs = "".join(event.text for event in events), _logprobs(events, running, each, echo)
            choices.append(
                {
                    "index": index,
                    "text": echo.text + text,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(events[-1]),
                }
            )
        usages.append(_usage(events[-1]))
    return json_answer(head | {"choices": choices, "usage": summed(usages, wanted.choices)})


def _read(service: Service, fields: Fields) -> _CompletionRequest:
    model = service.models.find(fields.text("model"))
    prompts = _prompts(fields, model)
    options = take_sampling(fields, model)
    given = fields.peek("max_tokens") is not None
    most = take_limit(fields, "max_tokens", 0)
    if most is not None or not given:
        options["max_tokens"] = DEFAULT_MAX_TOKENS if most is None else most
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    if logprobs is not None:
        options["top_logprobs"] = logprobs
    choices = fields.integer("n", 1, MAX_CHOICES) or 1
    fields.neutral("best_of", 1, choices, why="choices aren't ranked")
    stream, include_usage = take_stream(fields)
    echo, suffix = fields.boolean("echo"), _take_suffix(fields, prompts)
    if echo and suffix is not None:
        fields.refuse("echo", "has no meaning beside suffix: the text is what belongs between the two")
    fields.boolean("store")
    fields.ignore(*IGNORED)
    fields.close()
    scores = logprobs if echo else None
    requests = [
        GenerationRequest(model, prompt=prompt, suffix=suffix, scores=scores, options=options)
        for prompt in prompts
    ]
    first, *rest = (each.again(index) for each in requests for index in range(choices))
    every = (first, *(replace(each, follows=True) for each in rest))
    return _CompletionRequest(every, choices, stream, include_usage, echo)


def _take_suffix(fields: Fields, prompts: Sequence[str | tuple[int, ...]]) -> str | None:
    """The text after the gap; None if it is empty."""
    suffix = fields.text("suffix") or None
    if suffix is not None and not all(isinstance(prompt, str) for prompt in prompts):
        fields.refuse("suffix", "needs a prompt that is text, not token ids")
    return suffix


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


def _echo(running: Generation, request: GenerationRequest) -> _Echo:
    """The repeated prompt for a generation that has had an event. Its first token has no log-probability."""
    parts = prompt_parts(running.tokenizer, request.prompt, running.prompt)
    text = request.prompt if isinstance(request.prompt, str) else "".join(parts)
    if request.scores is None:
        return _Echo(text)
    return _Echo(
        text,
        tuple(shown_token(running.tokenizer, token) for token in running.prompt),
        (None, *(max(score.logprob, MIN_LOGPROB) for score in running.scores[:-1])),
        (None, *(_shown_top(running.tokenizer, score.top_logprobs) for score in running.scores[:-1])),
        tuple(min(end - len(part), len(text)) for part, end in zip(parts, _ends(parts), strict=True)),
    )


def _ends(parts: Sequence[str]) -> Iterator[int]:
    """Yields the position at which each part of a text ends."""
    return accumulate(map(len, parts))


def _shown_top(tokenizer: Tokenizer, top: Iterable[tuple[int, float]]) -> dict[str, float]:
    """The log-probabilities of the likeliest tokens, by text. If tokens have the same text, the likeliest
    counts.
    """
    shown: dict[str, float] = {}
    for token, chance in top:
        shown.setdefault(shown_token(tokenizer, token), max(chance, MIN_LOGPROB))
    return shown


def _logprobs(
    events: list[Event], running: Generation, request: GenerationRequest, echo: _Echo, offset: int = 0
) -> dict[str, Any] | None:
    """The object `logprobs`: the tokens, their log-probabilities, and the offset of each one's text as far as
    known.

    echo: the prompt repeated before them. offset: where the events' text begins, counted from the end of the
    echo.
    """
    if "top_logprobs" not in request.options:
        return None
    tokens, chances = [*echo.tokens], [*echo.token_logprobs]
    likeliest, offsets = [*echo.top_logprobs], [*echo.text_offset]
    offset += len(echo.text)
    for event in events:
        if event.token is not None and event.logprob is not None:
            tokens.append(shown_token(running.tokenizer, event.token))
            chances.append(max(event.logprob, MIN_LOGPROB))
            likeliest.append(_shown_top(running.tokenizer, event.top_logprobs))
            offsets.append(offset)
        offset += len(event.text)
    if (end := _silent_end(events, running, request)) is not None:
        tokens.append(shown_token(running.tokenizer, end.token))
        chances.append(max(end.logprob, MIN_LOGPROB))
        likeliest.append(_shown_top(running.tokenizer, end.top_logprobs))
        offsets.append(offset)
    return {"tokens": tokens, "token_logprobs": chances, "top_logprobs": likeliest, "text_offset": offsets}


def _silent_end(
    events: Sequence[Event], running: Generation, request: GenerationRequest
) -> TokenScore | None:
    """The score of the end-of-text token that ended a reply without tokens, if it was the likeliest and
    scores are requested; else None.

    Programs that score by `echo` and a `max_tokens` of 1, such as lm-eval, ignore the last token.
    """
    as_it_is = not request.options.get("temperature") and "logit_bias" not in request.options
    written = any(event.token is not None for event in events)
    if not running.scores or written or not as_it_is or not events or events[-1].finish_reason != "stop":
        return None
    likeliest = running.scores[-1]
    return likeliest if likeliest.token in running.tokenizer.eos_ids else None


def _usage(last: Event) -> dict[str, Any]:
    assert last.stats is not None
    return usage(last.stats)


async def _chunks(
    service: Service, wanted: _CompletionRequest, head: dict[str, Any], reading: PromptReading
) -> AsyncGenerator[bytes, None]:
    if wanted.include_usage:
        head = head | {"usage": None}
    usages = []
    for index, request in enumerate(wanted.generations):
        async with generation(service, request, reading) as running:
            async for choice, event in _choices(running, request, wanted.echo):
                yield sse(head | {"choices": [{"index": index} | choice]})
                if event.finish_reason is not None:
                    usages.append(_usage(event))
    if wanted.include_usage:
        yield sse(head | {"choices": [], "usage": summed(usages, wanted.choices)})
    yield b"data: [DONE]\n\n"


async def _choices(
    running: Generation, request: GenerationRequest, echoes: bool
) -> AsyncIterator[tuple[dict[str, Any], Event]]:
    """Yields the choice for each chunk of a generation, with its event. The repeated prompt comes with the
    first event.
    """
    offset, echo = 0, None
    async for event in running:
        begins = echo is None
        if echoes and echo is None:
            echo = _echo(running, request)
            logprobs = _logprobs([], running, request, echo)
            first = replace(event, finish_reason=None)
            yield {"text": echo.text, "logprobs": logprobs, "finish_reason": None}, first
            offset = len(echo.text)
        last = event.finish_reason is not None
        if event.text or last or event.logprob is not None:
            tells = event.token is not None or (echoes and begins)
            logprobs = _logprobs([event], running, request, _Echo(), offset) if tells else None
            yield (
                {
                    "text": event.text,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(event) if last else None,
                },
                event,
            )
        offset += len(event.text)
