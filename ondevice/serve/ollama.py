"""Ollama's API: chat and generate as lines of JSON, and facts about models.

Options that concern only speed or memory are dropped, because this server has a fixed budget and context. The
log says if the context is shorter than `num_ctx`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.chat_template import EFFORT, abilities
from ondevice.chat_template.tools import PromptOptions, Think, ToolCall
from ondevice.generate import Event
from ondevice.records import dataclass
from ondevice.serve.errors import error_body
from ondevice.serve.exchange import (
    Service,
    generation,
    json_answer,
    read_object,
    reading_of,
)
from ondevice.serve.fields import Fields
from ondevice.serve.formats import take_ollama_format
from ondevice.serve.generation_request import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
    GenerationRequest,
    chosen,
    take_penalties,
    take_repeat_last_n,
    take_seed,
    take_temperature,
    take_top_k,
    take_top_p,
)
from ondevice.serve.guard import json_bytes
from ondevice.serve.models import ModelFacts, ServedModel
from ondevice.serve.streaming import Dialect, PromptReading, streamed
from ondevice.serve.tools import LEVELS, checked_messages, function_tool, take_calls, take_tools

VERSION = "0.12.0"
"""The release of Ollama whose API this follows. Clients such as VS Code's require a minimum."""
NEVER = "9999-12-31T23:59:59Z"
"""Time at which a loaded model expires."""
SPEED_OPTIONS = (
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
    "vocab_only",
)
MAX_SECONDS, MAX_DURATION_CHARS = 1e9, 64
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|\u00b5s|ms|s|m|h)")
_Shape = Callable[[str, str], dict[str, Any]]
"""Returns a line's fields for a part of the reply's text and a part of its thinking."""


@dataclass(frozen=True)
class _OllamaRequest:
    generation: GenerationRequest
    stream: bool
    think: bool
    shape: _Shape
    keep_seconds: float | None
    """Seconds for which the model stays loaded after the answer; None: the request doesn't say."""


def routes(service: Service) -> list[Route]:
    return [
        Route("/api/version", _version, methods=["GET"]),
        Route("/api/tags", partial(_tags, service), methods=["GET"]),
        Route("/api/ps", partial(_running, service), methods=["GET"]),
        Route("/api/show", partial(_show, service), methods=["POST"]),
        Route("/api/chat", partial(_chat, service), methods=["POST"]),
        Route("/api/generate", partial(_generate, service), methods=["POST"]),
    ]


async def _version(request: Request) -> Response:
    return json_answer({"version": VERSION})


async def _tags(service: Service, request: Request) -> Response:
    return json_answer({"models": [_listed(facts, name) for name, facts in service.models.listed]})


async def _running(service: Service, request: Request) -> Response:
    return json_answer({"models": [_resident(loaded) for loaded in reversed(service.models.residents)]})


def _resident(loaded: ServedModel) -> dict[str, Any]:
    plan = loaded.model.plan
    nbytes = plan.total_bytes - plan.others_bytes
    memory = {"size": nbytes, "size_vram": 0, "context_length": plan.max_context}
    return _listed(loaded.facts, loaded.facts.name) | memory | {"expires_at": NEVER}


async def _show(service: Service, request: Request) -> Response:
    fields = await read_object(service, request)
    facts = service.models.find(fields.text("model") or fields.text("name"))
    fields.ignore("name", "verbose", "system", "template", "options", "insecure")
    fields.close()
    return json_answer(
        {
            "modelfile": "",
            "parameters": f"{'num_ctx':<30} {service.models.context_tokens(facts)}",
            "template": facts.template,
            "details": _details(facts),
            "model_info": {
                "general.architecture": facts.architecture,
                "general.parameter_count": facts.parameters,
                f"{facts.architecture}.context_length": facts.max_context,
            },
            "capabilities": [
                "completion",
                *abilities(facts.template),
                *(["insert"] if facts.fills_gaps else []),
            ],
            "modified_at": _stamp(facts.created),
        }
    )


async def _chat(service: Service, request: Request) -> Response:
    fields = await read_object(service, request)
    model = service.models.find(fields.text("model"))
    given = [_message(each) for each in fields.objects("messages")]
    messages = checked_messages(fields, "messages", given)
    options, context = _take_options(fields)
    if constraint := take_ollama_format(fields):
        options["constraint"] = constraint
    stream, think = fields.boolean("stream", True), _take_think(fields, model)
    prompting = replace(take_tools(fields, function_tool), think=think)
    kept = _take_rest(fields)
    fields.close()
    shape = partial(_said, think is not False)
    if not messages:
        return await _load(service, model, shape, kept)
    generation_request = GenerationRequest(
        model, messages=messages, prompting=prompting, options=options, least_context=context
    )
    return await _answer(
        service, request, _OllamaRequest(generation_request, stream, think is not False, shape, kept)
    )


async def _generate(service: Service, request: Request) -> Response:
    fields = await read_object(service, request)
    model = service.models.find(fields.text("model"))
    prompt, system = fields.text("prompt", "") or "", fields.text("system", "") or ""
    raw = fields.boolean("raw")
    suffix = fields.text("suffix") or None
    plain = raw or suffix is not None
    options, context = _take_options(fields)
    if constraint := take_ollama_format(fields):
        options["constraint"] = constraint
    stream, think = fields.boolean("stream", True), _take_think(fields, model)
    fields.neutral("template", "")
    fields.neutral("context", [], why="the conversation goes into /api/chat")
    fields.neutral("images", [])
    fields.neutral("tools", [], why="they go into /api/chat")
    kept = _take_rest(fields)
    fields.close()
    shape = partial(_written, think is not False)
    if not prompt and suffix is None:
        return await _load(service, model, shape, kept)
    if plain:
        # Filling a gap uses neither the template nor the system message.
        generation_request = GenerationRequest(
            model, prompt=prompt, suffix=suffix, options=options, least_context=context
        )
    else:
        first = ({"role": "system", "content": system},) if system else ()
        messages = (*first, {"role": "user", "content": prompt})
        prompting = PromptOptions(think=think)
        generation_request = GenerationRequest(
            model, messages, prompting=prompting, options=options, least_context=context
        )
    return await _answer(
        service, request, _OllamaRequest(generation_request, stream, think is not False, shape, kept)
    )


async def _load(service: Service, model: ModelFacts, shape: _Shape, kept: float | None) -> Response:
    """The answer to a request without a text: load the model, or unload it if `kept` is 0 seconds."""
    if kept != 0:
        async with service.models.ensure_loaded(model):
            pass
    service.models.keep(model, kept)
    done = {"done": True, "done_reason": "unload" if kept == 0 else "load"}
    return json_answer(_head(model) | shape("", "") | done)


async def _answer(service: Service, request: Request, wanted: _OllamaRequest) -> Response:
    if wanted.stream:
        reading, path = reading_of(service, wanted.generation), request.url.path
        dialect = Dialect(partial(_ping, wanted), lambda error: _line(error_body(path, error)))
        return await streamed(_lines(service, wanted, reading), reading, dialect, "application/x-ndjson")
    begun = time.monotonic_ns()
    try:
        async with generation(service, wanted.generation) as running:
            events = [event async for event in running]
    finally:
        service.models.keep(wanted.generation.model, wanted.keep_seconds)
    reply = "".join(event.text for event in events if not event.thinking)
    thought = "".join(event.text for event in events if event.thinking)
    body = _head(wanted.generation.model) | wanted.shape(reply, thought) | _end(events[-1], begun)
    if calls := [_call(event.tool_call) for event in events if event.tool_call is not None]:
        body["message"]["tool_calls"] = calls
    return json_answer(body)


def _ping(wanted: _OllamaRequest, reading: PromptReading) -> bytes:
    """A line without text, to keep the connection alive; lines of JSON have no comments for that."""
    return _line(_head(wanted.generation.model) | wanted.shape("", "") | {"done": False})


async def _lines(
    service: Service, wanted: _OllamaRequest, reading: PromptReading
) -> AsyncGenerator[bytes, None]:
    begun, model = time.monotonic_ns(), wanted.generation.model
    try:
        async with generation(service, wanted.generation, reading) as running:
            async for event in running:
                reply, thought = ("", event.text) if event.thinking else (event.text, "")
                if reply or (thought and wanted.think):
                    yield _line(_head(model) | wanted.shape(reply, thought) | {"done": False})
                if event.tool_call is not None:
                    message = {"role": "assistant", "content": "", "tool_calls": [_call(event.tool_call)]}
                    yield _line(_head(model) | {"message": message, "done": False})
                if event.finish_reason is not None:
                    yield _line(_head(model) | wanted.shape("", "") | _end(event, begun))
    finally:
        service.models.keep(model, wanted.keep_seconds)


def _line(value: Any) -> bytes:
    return json_bytes(value) + b"\n"


def _said(think: bool, reply: str, thought: str) -> dict[str, Any]:
    """The fields for a part of a chat's reply."""
    message = {"role": "assistant", "content": reply}
    return {"message": message | ({"thinking": thought} if thought and think else {})}


def _written(think: bool, reply: str, thought: str) -> dict[str, Any]:
    """The fields for a part of a continued text."""
    return {"response": reply} | ({"thinking": thought} if thought and think else {})


def _head(model: ModelFacts) -> dict[str, Any]:
    return {"model": model.name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _end(last: Event, begun: int) -> dict[str, Any]:
    """The fields of the last line. begun: `time.monotonic_ns()` at the request. Times are in ns."""
    stats = last.stats
    assert stats is not None
    return {
        "done": True,
        "done_reason": last.finish_reason,
        "total_duration": time.monotonic_ns() - begun,
        "load_duration": 0,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": round(1e9 * stats.time_to_first_token_seconds),
        "eval_count": stats.generated_tokens,
        "eval_duration": round(1e9 * stats.decode_seconds),
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": call.arguments}}


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.required_text("role")
    if role not in ("system", "user", "assistant", "tool"):
        fields.refuse("role", f"is {role[:40]!r}; it must be system, user, assistant or tool")
    message: dict[str, Any] = {"role": role, "content": fields.text("content", "") or ""}
    if role == "assistant":
        message |= {"tool_calls": take_calls(fields), "thinking": fields.text("thinking")}
    if role == "tool":
        name = fields.text("tool_name") or fields.text("name")
        message |= {"tool_call_id": fields.text("tool_call_id"), "name": name}
    fields.neutral("images", [])
    fields.neutral("tool_calls", [], why="only an assistant's message has calls")
    fields.ignore("thinking", "tool_name", "name", "tool_call_id")
    fields.close()
    return message


def _take_options(fields: Fields) -> tuple[dict[str, Any], int]:
    """The options of SamplingConfig in the field `options`, and `num_ctx` from there, 0 if it isn't set."""
    given = fields.object("options")
    if given is None:
        return {}, 0
    most = given.integer("num_predict", -2, MAX_TOKENS)
    options: dict[str, Any] = {
        "temperature": take_temperature(given, 100.0),
        "top_p": take_top_p(given),
        "top_k": take_top_k(given),
        "min_p": given.number("min_p", 0.0, 1.0),
        "repetition_penalty": given.number("repeat_penalty", 1e-3, 100.0),
        "repeat_last_n": take_repeat_last_n(given),
        "seed": take_seed(given),
        "stop": given.strings("stop", MAX_STOPS, MAX_STOP_CHARS),
        "max_tokens": None if most is None or most < 0 else most,
        **take_penalties(given),
    }
    given.neutral("mirostat", 0, 0.0)
    for name in ("tfs_z", "typical_p"):
        given.neutral(name, 1, 1.0)
    given.neutral("penalize_newline", True)
    given.ignore("mirostat_tau", "mirostat_eta", *SPEED_OPTIONS)
    context = given.integer("num_ctx", 0, MAX_TOKENS) or 0
    given.close()
    return chosen(options), context


def _take_think(fields: Fields, model: ModelFacts) -> Think:
    """Whether to think, or how much. False also leaves thinking out of the answer."""
    value = fields.take("think")
    if value is None or isinstance(value, bool):
        think: Think = value
        return think
    if not isinstance(value, str) or value not in LEVELS:
        fields.refuse("think", f"must be true, false, {', '.join(LEVELS)}")
    if value == "none" or EFFORT in model.template:
        return LEVELS[value]
    fields.leave_out("think", why=f"is {value!r}, and this model's template has no levels of thinking")
    return True


def _take_rest(fields: Fields) -> float | None:
    """Take the fields that don't change the text. Returns the seconds in `keep_alive`; None if it
    isn't set.
    """
    fields.neutral("logprobs", False)
    fields.neutral("top_logprobs", 0)
    # A prompt that is too long is refused, and a full context ends a text, whatever these say.
    fields.boolean("truncate")
    fields.boolean("shift")
    value = fields.take("keep_alive")
    return None if value is None else _seconds(fields, value)


def _seconds(fields: Fields, value: Any) -> float:
    """A duration in seconds, from a number of seconds or numbers with units; infinite if negative."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.inf if value < 0 else float(min(value, MAX_SECONDS))
    if not isinstance(value, str):
        _refuse_duration(fields)
    sign, text = value.startswith("-"), value.lstrip("+-")
    if text.isascii() and text.isdecimal() and len(text) < 12:
        text += "s"
    parts = _DURATION.findall(text[:MAX_DURATION_CHARS])
    if not parts or "".join(map("".join, parts)) != text:
        _refuse_duration(fields)
    return math.inf if sign else sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


def _refuse_duration(fields: Fields) -> NoReturn:
    fields.refuse("keep_alive", 'must be a number of seconds, or a duration such as "5m" or "-1"')


def _listed(facts: ModelFacts, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _stamp(facts.created),
        "size": facts.nbytes,
        "digest": facts.digest,
        "details": _details(facts),
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    count = facts.parameters
    return {
        "parent_model": "",
        "format": "ondevice",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.1f}M",
        "quantization_level": facts.quantization.upper(),
    }


def _stamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
