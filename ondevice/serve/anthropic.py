"""Anthropic's API, `/v1/messages`: replies at once or as server-sent events, and counts of a
prompt's tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.chat_template.messages import Message
from ondevice.chat_template.tools import PromptOptions, Think
from ondevice.constraints.constraint import Constraint
from ondevice.errors import OndeviceError
from ondevice.generate import Event
from ondevice.records import dataclass
from ondevice.serve.anthropic_messages import take_messages
from ondevice.serve.errors import RequestError, error_body
from ondevice.serve.exchange import (
    Service,
    conversation_tokens,
    generation,
    json_answer,
    new_id,
    read_object,
    reading_of,
)
from ondevice.serve.fields import Fields
from ondevice.serve.formats import take_text_format
from ondevice.serve.generation_request import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
    GenerationRequest,
    chosen,
    take_limit,
    take_temperature,
    take_top_k,
    take_top_p,
)
from ondevice.serve.models import ModelFacts
from ondevice.serve.streaming import Dialect, PromptReading, comment, sse, streamed
from ondevice.serve.tools import (
    AUTO,
    NONE,
    NOT_RUN,
    REQUIRED,
    CallSteps,
    Choice,
    anthropic_tool,
    chosen_tools,
    take_effort,
    take_tools,
)
from ondevice.stats import PromptUse


@dataclass(frozen=True)
class _MessagesRequest:
    generation: GenerationRequest
    stream: bool
    managed: bool
    """Whether the request asks for edits of its context, which this server never makes."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The request's stop strings. A chat template may add more."""
        return tuple(self.generation.options.get("stop", ()))


def routes(service: Service) -> list[Route]:
    return [
        Route("/v1/messages", partial(_messages, service), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count, service), methods=["POST"]),
    ]


async def _messages(service: Service, request: Request) -> Response:
    wanted = _read(service, await read_object(service, request))
    head: dict[str, Any] = {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": wanted.generation.model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    if wanted.stream:
        reading, opening = reading_of(service, wanted.generation), _Opening(head)
        parts = _events(service, wanted, opening, reading)
        return await streamed(parts, reading, Dialect(opening.ping, partial(_error, request.url.path)))
    async with generation(service, wanted.generation) as running:
        events = [event async for event in running]
    calls = any(event.tool_call is not None for event in events)
    return json_answer(head | {"content": _blocks(events)} | _end(events[-1], wanted, calls))


async def _count(service: Service, request: Request) -> Response:
    fields = await read_object(service, request)
    model, messages = _take_prompt(service, fields)
    prompting, _ = _take_prompting(fields, model)
    _take_rest(fields)
    fields.close()
    try:
        async with service.models.ensure_loaded(model) as loaded:
            count = await asyncio.to_thread(conversation_tokens, loaded.model, messages, prompting)
    except OndeviceError as error:
        raise RequestError.of(error) from error
    return json_answer({"input_tokens": count})


def _read(service: Service, fields: Fields) -> _MessagesRequest:
    model, messages = _take_prompt(service, fields)
    if messages[-1]["role"] == "assistant":
        fields.refuse("messages", "must end with the user's; a reply can't be begun for the model")
    if fields.peek("max_tokens") is None:
        fields.refuse("max_tokens", "is missing")
    prompting, constraint = _take_prompting(fields, model)
    options: dict[str, Any] = {
        "constraint": constraint,
        "max_tokens": take_limit(fields, "max_tokens"),
        "temperature": take_temperature(fields, 1.0),
        "top_p": take_top_p(fields),
        "top_k": take_top_k(fields),
        "stop": fields.strings("stop_sequences", MAX_STOPS, MAX_STOP_CHARS),
    }
    stream, managed = fields.boolean("stream"), fields.peek("context_management") is not None
    _take_rest(fields)
    fields.close()
    generation_request = GenerationRequest(
        model, messages=messages, prompting=prompting, options=chosen(options)
    )
    return _MessagesRequest(generation_request, stream, managed)


def _take_prompt(service: Service, fields: Fields) -> tuple[ModelFacts, tuple[Message, ...]]:
    model = service.models.find(fields.text("model"))
    return model, take_messages(fields)


def _take_prompting(fields: Fields, model: ModelFacts) -> tuple[PromptOptions, Constraint | None]:
    """The tools and how much to think, and the constraint of the answer."""
    tools, (choice, parallel) = take_tools(fields, anthropic_tool), _take_choice(fields)
    think, (effort, constraint) = _take_think(fields), _take_output(fields, model)
    think = effort if think is not False and effort is not None else think
    return replace(chosen_tools(fields, tools, choice, parallel), think=think), constraint


def _take_choice(fields: Fields) -> tuple[Choice, bool]:
    """The request's choice of tools, and whether the model may call several at once."""
    given = fields.object("tool_choice")
    if given is None:
        return AUTO, True
    kind = given.required_text("type")
    words = {"auto": AUTO, "none": NONE, "any": REQUIRED}
    if kind not in (*words, "tool"):
        given.refuse("type", f"is {kind[:40]!r}; it must be auto, any, tool or none")
    choice = words.get(kind) or Choice(must=True, names=(given.required_text("name"),))
    parallel = not given.boolean("disable_parallel_tool_use")
    given.close()
    return choice, parallel


def _take_think(fields: Fields) -> Think:
    thinking = fields.object("thinking")
    if thinking is None:
        return None
    kind = thinking.required_text("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        thinking.refuse("type", f"is {kind[:40]!r}; it must be enabled, adaptive or disabled")
    thinking.integer("budget_tokens", 0, MAX_TOKENS)
    thinking.ignore("display")
    thinking.close()
    return kind != "disabled"


def _take_output(fields: Fields, model: ModelFacts) -> tuple[Think, Constraint | None]:
    """How much to think, from `output_config.effort`, and the constraint in `output_config.format`, or in the
    older `output_format`.
    """
    older = take_text_format(fields, "output_format")
    config = fields.object("output_config")
    if config is None:
        return None, older
    constraint, effort = take_text_format(config, "format"), take_effort(config, "effort", model)
    config.close()
    return effort, constraint or older


def _take_rest(fields: Fields) -> None:
    for name in ("mcp_servers", "container"):
        if fields.peek(name):
            fields.leave_out(name, why=f"is given, and {NOT_RUN}")
    fields.ignore("mcp_servers", "container")
    fields.ignore("metadata", "service_tier", "cache_control", "context_management", "betas", "inference_geo")


def _blocks(events: list[Event]) -> list[dict[str, Any]]:
    """The reply as blocks, one for each run of thinking or text, and for each call."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        kind = _kind(event)
        if event.tool_call is not None:
            call = event.tool_call
            blocks.append(_call_block(call.id, call.name, call.arguments))
        if not event.text:
            continue
        if not blocks or blocks[-1]["type"] != kind:
            blocks.append(_new_block(kind))
        blocks[-1][kind] += event.text
    return blocks


def _kind(event: Event) -> str:
    return "thinking" if event.thinking else "text"


def _new_block(kind: str) -> dict[str, Any]:
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _call_block(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def _end(last: Event, wanted: _MessagesRequest, calls: bool) -> dict[str, Any]:
    """Why the reply ended and its usage. Also an empty list of edits, if the request asks for edits."""
    stats = last.stats
    assert stats is not None
    reason = "max_tokens" if last.finish_reason == "length" else "tool_use" if calls else "end_turn"
    stop = last.stop if last.stop in wanted.stops else None
    edits: dict[str, Any] = {"context_management": {"applied_edits": []}} if wanted.managed else {}
    return edits | {
        "stop_reason": reason if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": _usage(PromptUse(stats.prompt_tokens, stats.reused_tokens), stats.generated_tokens),
    }


def _usage(prompt: PromptUse, written: int) -> dict[str, int]:
    """The numbers of tokens of a generation: those of the prompt, computed or reused, and generated ones."""
    return {
        "input_tokens": prompt.tokens - prompt.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": prompt.reused_tokens,
        "output_tokens": written,
    }


def _prompt(first: Event) -> PromptUse:
    """How many of the prompt's tokens were computed and reused, from a generation's first event."""
    if first.prompt is not None:
        return first.prompt
    assert first.stats is not None
    return PromptUse(first.stats.prompt_tokens, first.stats.reused_tokens)


class _Opening:
    """The first event of a stream, which is sent once: with the first token, or earlier with a ping."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = head
        self.is_told = False

    def tell(self, prompt: PromptUse) -> bytes:
        """The bytes of the event. prompt: the counts of the prompt's tokens, as far as known."""
        self.is_told = True
        message = self._head | {"usage": _usage(prompt, 0)}
        return sse({"type": "message_start", "message": message}, "message_start")

    def ping(self, reading: PromptReading) -> bytes:
        """The events that the stream sends while there is nothing else to send."""
        reused = 0 if reading.progress is None else reading.progress.reused_tokens
        start = b"" if self.is_told else self.tell(PromptUse(reading.prompt_tokens, reused))
        return start + comment(reading) + sse({"type": "ping"}, "ping")


def _error(path: str, error: RequestError) -> bytes:
    """The last event of a stream that fails."""
    return sse(error_body(path, error), "error")


async def _events(
    service: Service, wanted: _MessagesRequest, opening: _Opening, reading: PromptReading
) -> AsyncGenerator[bytes, None]:
    def named(kind: str, **more: Any) -> bytes:
        return sse({"type": kind} | more, kind)

    index, open_kind, calls, steps = -1, "", False, CallSteps()
    async with generation(service, wanted.generation, reading) as running:
        async for event in running:
            if not opening.is_told:
                yield opening.tell(_prompt(event))
            for step in steps.take(event):
                if step.kind == "begins":
                    if open_kind:
                        yield named("content_block_stop", index=index)
                    index, open_kind = index + 1, ""
                    block = _call_block(step.id, step.name, {})
                    yield named("content_block_start", index=index, content_block=block)
                elif step.kind == "arguments":
                    delta = {"type": "input_json_delta", "partial_json": step.text}
                    yield named("content_block_delta", index=index, delta=delta)
                else:
                    calls = calls or step.kind == "ends"
                    yield named("content_block_stop", index=index)
            kind = _kind(event)
            if event.text:
                if kind != open_kind:
                    if open_kind:
                        yield named("content_block_stop", index=index)
                    index, open_kind = index + 1, kind
                    yield named("content_block_start", index=index, content_block=_new_block(kind))
                delta = {"type": f"{kind}_delta", kind: event.text}
                yield named("content_block_delta", index=index, delta=delta)
            if event.finish_reason is not None:
                if open_kind:
                    yield named("content_block_stop", index=index)
                end = _end(event, wanted, calls)
                told = {name: end.pop(name) for name in ("usage", "context_management") if name in end}
                yield named("message_delta", delta=end, **told)
    yield named("message_stop")
