"""`/v1/responses`: OpenAI's newer API, without state: every request contains its complete conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.chat_template.tools import PromptOptions
from ondevice.constraints.constraint import Constraint
from ondevice.generate import Event
from ondevice.records import dataclass
from ondevice.serve.errors import RequestError, message
from ondevice.serve.exchange import (
    Service,
    generation,
    json_answer,
    new_id,
    read_object,
    reading_of,
)
from ondevice.serve.fields import Fields
from ondevice.serve.formats import take_text_format
from ondevice.serve.generation_request import GenerationRequest, chosen, take_limit
from ondevice.serve.models import ModelFacts
from ondevice.serve.openai_common import IGNORED, take_sampling
from ondevice.serve.openai_input import NO_STATE, Namespaces, echoed_tools, take_input
from ondevice.serve.streaming import Dialect, PromptReading, comment, sse, streamed
from ondevice.serve.tools import (
    CallStep,
    CallSteps,
    checked_messages,
    chosen_tools,
    flat_name,
    take_choice,
    take_effort,
    take_tools,
)

PATH = "/v1/responses"
MAX_METADATA, MAX_METADATA_CHARS = 16, 64


@dataclass(frozen=True)
class _ResponsesRequest:
    generation: GenerationRequest
    stream: bool
    echoed: dict[str, Any]
    """Fields of the request that the response repeats."""
    namespaces: Namespaces


def routes(service: Service) -> list[Route]:
    return [Route(PATH, partial(_respond, service), methods=["POST"])]


async def _respond(service: Service, request: Request) -> Response:
    wanted = _read(service, await read_object(service, request))
    writer = _Writer(_new_response(wanted), wanted.namespaces)
    if wanted.stream:
        reading = reading_of(service, wanted.generation)
        parts = _stream(service, wanted, writer, reading)
        return await streamed(parts, reading, Dialect(writer.ping, writer.fail))
    async with generation(service, wanted.generation) as running:
        async for event in running:
            # Without parts of calls: a call that breaks off is text.
            writer.take(replace(event, call_part=None))
    return json_answer(writer.response)


async def _stream(
    service: Service, wanted: _ResponsesRequest, writer: _Writer, reading: PromptReading
) -> AsyncGenerator[bytes, None]:
    try:
        async with generation(service, wanted.generation, reading) as running:
            async for event in running:
                if parts := writer.begin() + writer.take(event):
                    yield parts
    except RequestError as error:
        # Agents shorten a prompt that is too long only if an event tells them.
        if error.overflow is None:
            raise
        yield writer.begin() + writer.fail(error)


def _read(service: Service, fields: Fields) -> _ResponsesRequest:
    model = service.models.find(fields.text("model"))
    instructions, namespaces = fields.text("instructions"), Namespaces(fields.peek("tools"))
    prompting, echoed_prompting = _take_prompting(fields, model, namespaces)
    first = ({"role": "system", "content": instructions},) if instructions else ()
    messages = checked_messages(fields, "input", (*first, *take_input(fields, namespaces)))
    sampling, most = take_sampling(fields, model, "text.format"), take_limit(fields, "max_output_tokens")
    constraint, text_format = _take_text(fields)
    options = sampling | chosen({"max_tokens": most, "constraint": constraint})
    stream = fields.boolean("stream")
    keys = {name: fields.text(name) for name in ("prompt_cache_key", "safety_identifier")}
    usual = model.sampling
    echoed = echoed_prompting | {
        "instructions": instructions,
        "max_output_tokens": most,
        "metadata": _take_metadata(fields),
        "text": {"format": text_format},
        "temperature": sampling.get("temperature", usual.temperature),
        "top_p": sampling.get("top_p", usual.top_p),
        **{name: sampling.get(name, 0.0) for name in ("frequency_penalty", "presence_penalty")},
        **keys,
    }
    _take_neutral(fields)
    fields.close()
    if fields.ignored.names:
        echoed["ignored"] = fields.ignored.names
    generation_request = GenerationRequest(
        model,
        messages,
        prompting=prompting,
        options=options,
        messages_field="input",
        constraint_field="text.format",
    )
    return _ResponsesRequest(generation_request, stream, echoed, namespaces)


def _take_text(fields: Fields) -> tuple[Constraint | None, Any]:
    """The answer's constraint, and its format as the response repeats it."""
    text = fields.object("text")
    if text is None:
        return None, {"type": "text"}
    shown = text.peek("format") or {"type": "text"}
    constraint = take_text_format(text, "format")
    if text.peek("verbosity") not in (None, "medium"):
        text.leave_out("verbosity", why="is something that this server doesn't have")
    text.ignore("verbosity")
    text.close()
    return constraint, shown


def _take_prompting(
    fields: Fields, model: ModelFacts, namespaces: Namespaces
) -> tuple[PromptOptions, dict[str, Any]]:
    """The tools and how much to think, and the fields that the response repeats."""
    shown = fields.peek("tool_choice") or "auto"
    tools, choice = take_tools(fields, namespaces.read), take_choice(fields, flat_name)
    parallel = fields.boolean("parallel_tool_calls", True)
    reasoning, effort = fields.object("reasoning"), None
    if reasoning is not None:
        effort = take_effort(reasoning, "effort", model)
        # Thinking is sent completely, whatever summary is requested.
        reasoning.ignore("summary", "generate_summary")
        reasoning.close()
    echoed = {
        "parallel_tool_calls": parallel,
        "reasoning": {"effort": "none" if effort is False else effort, "summary": None},
        "tool_choice": shown,
        "tools": echoed_tools([tool.to_dict() for tool in tools.tools], namespaces),
    }
    return replace(chosen_tools(fields, tools, choice, parallel), think=effort), echoed


def _take_metadata(fields: Fields) -> dict[str, Any]:
    """The request's metadata, texts by name, which the response repeats."""
    given = fields.object("metadata")
    if given is None:
        return {}
    names = given.names()
    if len(names) > MAX_METADATA or any(len(name) > MAX_METADATA_CHARS for name in names):
        fields.refuse("metadata", f"may have {MAX_METADATA} names of {MAX_METADATA_CHARS} characters")
    return {name: given.text(name) for name in names}


def _take_neutral(fields: Fields) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        fields.neutral(name, why=NO_STATE)
    fields.neutral("background", False, why=NO_STATE)
    # A prompt that is too long is an error in either case.
    fields.neutral("truncation", "disabled", "auto")
    fields.neutral("top_logprobs", 0)
    # Nothing is stored in either case.
    fields.boolean("store")
    if fields.peek("context_management"):
        fields.leave_out("context_management", why="is something that this server doesn't have")
    fields.ignore(*IGNORED, "client_metadata", "context_management", "include", "max_tool_calls")
    fields.ignore("stream_options")


def _new_response(wanted: _ResponsesRequest) -> dict[str, Any]:
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_tool_calls": None,
        "model": wanted.generation.model.name,
        "output": [],
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "top_logprobs": 0,
        "truncation": "disabled",
        "usage": None,
    } | wanted.echoed


@dataclass
class _Writer:
    """Builds a response, and its stream's events, from the generation's events."""

    response: dict[str, Any]
    namespaces: Namespaces = field(default_factory=Namespaces)
    _sequence: int = 0
    _part: dict[str, Any] | None = None
    """The open part of the last item; None if no item is open."""
    _thought_tokens: int = 0
    _calls: CallSteps = field(default_factory=CallSteps)
    _parts: list[bytes] = field(default_factory=list)

    def begin(self) -> bytes:
        """The stream's first events, at the first call; empty afterwards."""
        if self._sequence:
            return b""
        self._tell("response.created", response=self.response)
        self._tell("response.in_progress", response=self.response)
        return self._told()

    def ping(self, reading: PromptReading) -> bytes:
        """The bytes that the stream sends while there is nothing else to send."""
        return self.begin() + comment(reading)

    def take(self, event: Event) -> bytes:
        """Take the next event. Returns its bytes in the stream."""
        if event.thinking and event.token is not None:
            self._thought_tokens += 1
        for step in self._calls.take(event):
            self._add_step(step)
        if event.text:
            kind = "reasoning_text" if event.thinking else "output_text"
            if self._part is None or self._part["type"] != kind:
                self._end_item("completed")
                self._begin_item(kind)
            assert self._part is not None
            self._part["text"] += event.text
            self._tell(f"response.{kind}.delta", **self._where(), delta=event.text, **_no_logprobs(kind))
        if event.finish_reason is not None:
            self._end(event)
        return self._told()

    def fail(self, error: RequestError) -> bytes:
        """The last event of a stream that fails."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "context_length_exceeded" if error.overflow else code
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": message(PATH, error)}
        self._tell("response.failed", response=self.response)
        return self._told()

    def _end(self, last: Event) -> None:
        stats, is_complete = last.stats, last.finish_reason != "length"
        assert stats is not None
        status = "completed" if is_complete else "incomplete"
        self._end_item(status)
        self.response |= {
            "status": status,
            "completed_at": int(time.time()) if is_complete else None,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": stats.reused_tokens},
                "output_tokens": stats.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
                "total_tokens": stats.prompt_tokens + stats.generated_tokens,
            },
        }
        self._tell(f"response.{status}", response=self.response)

    def _add_step(self, step: CallStep) -> None:
        """Add a step of a call to the response and to the stream."""
        if step.kind == "begins":
            self._end_item("completed")
            item = {"id": new_id("fc_"), "type": "function_call", "status": "in_progress"}
            item |= {"call_id": step.id, **self.namespaces.told(step.name), "arguments": ""}
            self.response["output"].append(item)
            self._tell("response.output_item.added", output_index=self._index, item=item)
            return
        item = self.response["output"][-1]
        where = {"item_id": item["id"], "output_index": self._index}
        if step.kind == "arguments":
            item["arguments"] += step.text
            self._tell("response.function_call_arguments.delta", **where, delta=step.text)
            return
        if step.kind == "ends":
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **where, **done)
        item["status"] = "completed" if step.kind == "ends" else "incomplete"
        self._tell("response.output_item.done", output_index=self._index, item=item)

    def _begin_item(self, kind: str) -> None:
        item: dict[str, Any]
        if kind == "reasoning_text":
            self._part = {"type": kind, "text": ""}
            item = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
        else:
            self._part = {"type": kind, "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        item |= {"status": "in_progress", "content": []}
        self.response["output"].append(item)
        self._tell("response.output_item.added", output_index=self._index, item=item)
        self._tell("response.content_part.added", **self._where(), part=self._part)
        item["content"].append(self._part)

    def _end_item(self, status: str) -> None:
        if self._part is None:
            return
        kind, item = self._part["type"], self.response["output"][-1]
        self._tell(f"response.{kind}.done", **self._where(), text=self._part["text"], **_no_logprobs(kind))
        self._tell("response.content_part.done", **self._where(), part=self._part)
        item["status"] = status
        self._tell("response.output_item.done", output_index=self._index, item=item)
        self._part = None

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _where(self) -> dict[str, Any]:
        return {
            "item_id": self.response["output"][-1]["id"],
            "output_index": self._index,
            "content_index": 0,
        }

    def _tell(self, kind: str, **more: Any) -> None:
        self._parts.append(sse({"type": kind, "sequence_number": self._sequence} | more, kind))
        self._sequence += 1

    def _told(self) -> bytes:
        told = b"".join(self._parts)
        self._parts.clear()
        return told


def _no_logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "output_text" else {}
