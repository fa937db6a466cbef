"""`/v1/messages`: Anthropic's API, whole or as server-sent events, and the count of a prompt's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.chat_template.messages import Message
from ondevice.chat_template.tools import PromptOptions, Think
from ondevice.constraints.constraint import Constraint
from ondevice.errors import OndeviceError
from ondevice.generate import Event, check_prompt
from ondevice.serve.asked import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
    Asked,
    chosen,
    take_temperature,
    take_top_p,
)
from ondevice.serve.errors import RequestError
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
from ondevice.serve.formats import take_text_format
from ondevice.serve.models import ModelFacts
from ondevice.serve.tools import (
    AUTO,
    NONE,
    REQUIRED,
    CallSteps,
    Choice,
    anthropic_tool,
    call_message,
    checked_messages,
    chosen_tools,
    take_tools,
)
from ondevice.stats import PromptUse

DROPPED_BLOCKS = ("thinking", "redacted_thinking")
"""Blocks of an assistant's turn that aren't its text."""
TOOL_BLOCKS = {"assistant": "tool_use", "user": "tool_result"}
"""Blocks of each role that aren't its text."""


@dataclass(frozen=True)
class _Request:
    asked: Asked
    stream: bool

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of the request; a template may have more."""
        return tuple(self.asked.options.get("stop", ()))


def routes(service: Service) -> list[Route]:
    return [
        Route("/v1/messages", partial(_messages, service), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count, service), methods=["POST"]),
    ]


async def _messages(service: Service, request: Request) -> Response:
    wanted = _read(service, await read_object(request))
    head: dict[str, Any] = {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": wanted.asked.model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    if wanted.stream:
        parts = _events(service, wanted, head)
        return await streamed(with_errors(request.url.path, parts, partial(sse, event="error")))
    async with generation(service, wanted.asked) as running:
        events = [event async for event in running]
    calls = any(event.tool_call is not None for event in events)
    return json_answer(head | {"content": _blocks(events)} | _end(events[-1], wanted.stops, calls))


async def _count(service: Service, request: Request) -> Response:
    fields = await read_object(request)
    model, messages = _take_prompt(service, fields)
    prompting = _take_prompting(fields)
    _take_format(fields)
    _take_neutral(fields)
    fields.close()
    tools, think = prompting.tools, prompting.think
    try:
        async with service.models.at_hand(model) as loaded:
            ids = await asyncio.to_thread(loaded.model.chat_ids, messages, tools=tools, think=think)
            most = loaded.model.plan.max_context
        check_prompt(ids, most, most)
    except OndeviceError as error:
        raise RequestError.of(error) from error
    return json_answer({"input_tokens": len(ids)})


def _read(service: Service, fields: Fields) -> _Request:
    model, messages = _take_prompt(service, fields)
    if messages[-1]["role"] not in ("user", "tool"):
        fields.refuse("messages", "must end with the user's; a reply can't be begun for the model")
    most = fields.integer("max_tokens", 1, MAX_TOKENS)
    if most is None:
        fields.refuse("max_tokens", "is missing")
    options: dict[str, Any] = {
        "constraint": _take_format(fields),
        "max_tokens": most,
        "temperature": take_temperature(fields, 1.0),
        "top_p": take_top_p(fields),
        "top_k": fields.integer("top_k", 0, MAX_TOKENS),
        "stop": fields.strings("stop_sequences", MAX_STOPS, MAX_STOP_CHARS),
    }
    stream, prompting = fields.boolean("stream"), _take_prompting(fields)
    _take_neutral(fields)
    fields.close()
    asked = Asked(model, messages=messages, prompting=prompting, options=chosen(options))
    return _Request(asked, stream)


def _take_prompt(service: Service, fields: Fields) -> tuple[ModelFacts, tuple[Message, ...]]:
    model = service.models.find(fields.text("model"))
    system = _text(fields, "system", dropped=())
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for each in fields.objects("messages"):
        role = each.required_text("role")
        if role not in ("user", "assistant"):
            each.refuse("role", f"is {role[:40]!r}; it must be user or assistant")
        thought = _thought(each) if role == "assistant" else ""
        calls, results = _take_tool_blocks(each, role)
        dropped = (*(DROPPED_BLOCKS if role == "assistant" else ()), TOOL_BLOCKS[role])
        text = _text(each, "content", dropped)
        if text is None:
            each.refuse("content", "is missing")
        each.close()
        turns += results
        if text or calls or not results:
            _add_turn(turns, role, text, calls)
            turns[-1] |= {"thinking": thought} if thought else {}
    if not turns or turns[-1]["role"] == "system":
        fields.refuse("messages", "is empty; give at least one message")
    return model, checked_messages(fields, "messages", turns)


def _add_turn(turns: list[dict[str, Any]], role: str, text: str, calls: list[dict[str, Any]]) -> None:
    """Add a turn. Turns of one role that follow each other are one turn."""
    if turns and turns[-1]["role"] == role:
        turns[-1]["content"] = "\n\n".join(filter(None, (turns[-1]["content"], text)))
    else:
        turns.append({"role": role, "content": text})
    if calls:
        turns[-1].setdefault("tool_calls", []).extend(calls)


def _thought(fields: Fields) -> str:
    """The thinking in a turn's blocks."""
    value = fields.peek("content")
    blocks = [it for it in value if isinstance(it, dict)] if isinstance(value, list) else []
    texts = [it.get("thinking") for it in blocks if it.get("type") == "thinking"]
    return "".join(text for text in texts if isinstance(text, str))


def _take_tool_blocks(fields: Fields, role: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls of an assistant's turn and the results, as messages, of a user's."""
    value = fields.peek("content")
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for at, item in enumerate(value if isinstance(value, list) else []):
        if not isinstance(item, dict) or item.get("type") != TOOL_BLOCKS[role]:
            continue
        block = Fields(item, f"{fields.full('content')}[{at}]")
        block.ignore("type", "cache_control", "caller")
        if role == "assistant":
            arguments, name = block.take("input"), block.required_text("name")
            calls.append(call_message(block.required_text("id"), name, arguments or {}))
        else:
            failed, text = block.boolean("is_error"), _text(block, "content", dropped=()) or ""
            text = f"Error: {text}" if failed else text
            results.append(
                {"role": "tool", "content": text, "tool_call_id": block.required_text("tool_use_id")}
            )
        block.close()
    return calls, results


def _text(fields: Fields, name: str, dropped: tuple[str, ...]) -> str | None:
    """A string, or the text of a list of blocks; blocks of the kinds `dropped` are left out."""
    value = fields.take(name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.refuse(name, "must be a string or a list of blocks")
    texts = []
    for at, item in enumerate(value):
        block = Fields(item, f"{fields.full(name)}[{at}]")
        kind = block.required_text("type")
        if kind in dropped:
            continue
        if kind != "text":
            block.refuse("type", f"is {kind[:40]!r}; this server takes text")
        texts.append(block.required_text("text"))
        block.ignore("cache_control", "citations")
        block.close()
    return "".join(texts)


def _take_prompting(fields: Fields) -> PromptOptions:
    """Tools, and whether to think."""
    tools, (choice, parallel) = take_tools(fields, anthropic_tool), _take_choice(fields)
    return replace(chosen_tools(fields, tools, choice, parallel), think=_take_think(fields))


def _take_choice(fields: Fields) -> tuple[Choice, bool]:
    """What may be called, and whether several calls may come at once."""
    given = fields.object("tool_choice")
    if given is None:
        return AUTO, True
    kind = given.required_text("type")
    words = {"auto": AUTO, "none": NONE, "any": REQUIRED}
    if kind not in (*words, "tool"):
        given.refuse("type", f"is {kind[:40]!r}; it must be auto, any, tool or none")
    choice = words.get(kind) or Choice(must=True, name=given.required_text("name"))
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
    thinking.integer("budget_tokens", 1, MAX_TOKENS)
    thinking.ignore("display")
    thinking.close()
    return kind != "disabled"


def _take_format(fields: Fields) -> Constraint | None:
    """`output_config.format`, or `output_format`, as it was called before."""
    older = take_text_format(fields, "output_format")
    config = fields.object("output_config")
    if config is None:
        return older
    found = take_text_format(config, "format")
    config.neutral("effort", "medium")
    config.close()
    return found or older


def _take_neutral(fields: Fields) -> None:
    fields.neutral("mcp_servers", [], why="this server calls no others")
    fields.neutral("container")
    fields.ignore("metadata", "service_tier", "cache_control", "context_management", "betas", "inference_geo")


def _blocks(events: list[Event]) -> list[dict[str, Any]]:
    """The reply as blocks, one for each run of thinking or text, and for each call."""
    found: list[dict[str, Any]] = []
    for event in events:
        kind = _kind(event)
        if event.tool_call is not None:
            call = event.tool_call
            found.append(_call_block(call.id, call.name, call.arguments))
        if not event.text:
            continue
        if not found or found[-1]["type"] != kind:
            found.append(_new_block(kind))
        found[-1][kind] += event.text
    return found


def _kind(event: Event) -> str:
    return "thinking" if event.thinking else "text"


def _new_block(kind: str) -> dict[str, Any]:
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _call_block(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def _end(last: Event, stops: tuple[str, ...], calls: bool) -> dict[str, Any]:
    """Why the reply ended, and its usage."""
    stats = last.stats
    assert stats is not None
    reason = "max_tokens" if last.finish_reason == "length" else "tool_use" if calls else "end_turn"
    stop = last.stop if last.stop in stops else None
    return {
        "stop_reason": reason if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": _usage(PromptUse(stats.prompt_tokens, stats.reused_tokens), stats.generated_tokens),
    }


def _usage(prompt: PromptUse, written: int) -> dict[str, int]:
    """Tokens of a generation. A prompt's are counted apart: those that were computed, those that weren't."""
    return {
        "input_tokens": prompt.tokens - prompt.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": prompt.reused_tokens,
        "output_tokens": written,
    }


def _prompt(first: Event) -> PromptUse:
    """What the prompt came to, of a generation's first event."""
    if first.prompt is not None:
        return first.prompt
    assert first.stats is not None
    return PromptUse(first.stats.prompt_tokens, first.stats.reused_tokens)


async def _events(service: Service, wanted: _Request, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """The stream."""

    def named(kind: str, **more: Any) -> bytes:
        return sse({"type": kind} | more, kind)

    index, open_kind, begun, calls, steps = -1, "", False, False, CallSteps()
    async with generation(service, wanted.asked) as running:
        async for event in running:
            if not begun:
                begun = True
                yield named("message_start", message=head | {"usage": _usage(_prompt(event), 0)})
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
                end = _end(event, wanted.stops, calls)
                usage = end.pop("usage")
                yield named("message_delta", delta=end, usage=usage)
    yield named("message_stop")
