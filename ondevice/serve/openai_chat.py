"""`/v1/chat/completions`: OpenAI's chat, at once or as server-sent events.

Thinking is sent as `reasoning_content`, as most servers send it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.callbacks import PromptProgress
from ondevice.chat_template import SWITCHES
from ondevice.chat_template.messages import Message
from ondevice.chat_template.reply_prefix import ReplyPrefix
from ondevice.chat_template.tools import PromptOptions
from ondevice.config import MAX_TOP_LOGPROBS
from ondevice.generate import Event
from ondevice.records import dataclass
from ondevice.serve.exchange import (
    Service,
    generation,
    json_answer,
    new_id,
    read_object,
    reading_of,
)
from ondevice.serve.fields import Fields
from ondevice.serve.formats import take_response_format
from ondevice.serve.generation_request import GenerationRequest, take_limit
from ondevice.serve.models import ModelFacts
from ondevice.serve.openai_common import (
    IGNORED,
    MAX_CHOICES,
    NO_FUNCTIONS,
    call_entry,
    finish_reason,
    logprob_entry,
    summed,
    take_messages,
    take_sampling,
    usage,
)
from ondevice.serve.streaming import PromptReading, progress_field, sse, sse_dialect, streamed
from ondevice.serve.tools import (
    CallStep,
    CallSteps,
    chosen_tools,
    function_tool,
    nested_name,
    take_choice,
    take_effort,
    take_tools,
)
from ondevice.tokenizer import Tokenizer


@dataclass(frozen=True)
class _ChatRequest:
    generation: GenerationRequest
    choices: int
    stream: bool
    include_usage: bool
    tells_progress: bool


def routes(service: Service) -> list[Route]:
    return [Route("/v1/chat/completions", partial(_chat, service), methods=["POST"])]


async def _chat(service: Service, request: Request) -> Response:
    wanted = _read(service, await read_object(service, request))
    head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": wanted.generation.model.name}
    if wanted.stream:
        head |= {"object": "chat.completion.chunk"} | ({"usage": None} if wanted.include_usage else {})
        reading = reading_of(service, wanted.generation)
        progress = partial(_progress, head) if wanted.tells_progress else None
        dialect = sse_dialect(request.url.path, progress)
        return await streamed(_chunks(service, wanted, head, reading), reading, dialect)
    choices, usages = [], []
    for index in range(wanted.choices):
        async with generation(service, wanted.generation.again(index)) as running:
            events = [event async for event in running]
            choices.append(_choice(index, events, running.tokenizer, wanted.generation))
        usages.append(_usage(events))
    body = {"object": "chat.completion", "choices": choices, "usage": summed(usages, wanted.choices)}
    return json_answer(head | body)


def _read(service: Service, fields: Fields) -> _ChatRequest:
    model = service.models.find(fields.text("model"))
    messages = take_messages(fields)
    options = take_sampling(fields, model)
    limits = [take_limit(fields, name) for name in ("max_tokens", "max_completion_tokens")]
    if any(limits):
        options["max_tokens"] = min(filter(None, limits))
    most = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs"):
        options["top_logprobs"] = most or 0
    elif most:
        fields.refuse("top_logprobs", "has no meaning without logprobs")
    if constraint := take_response_format(fields):
        options["constraint"] = constraint
    choices = fields.integer("n", 1, MAX_CHOICES) or 1
    stream, include_usage = take_stream(fields)
    tells_progress = fields.boolean("return_progress")
    prompting = take_prompting(fields, model)
    if fields.boolean("continue_final_message"):
        messages, prefix = _cut_reply(fields, messages)
        prompting = replace(prompting, reply_prefix=prefix)
        fields.ignore("add_generation_prompt")
    fields.neutral("functions", [], why=NO_FUNCTIONS)
    fields.neutral("function_call", "none", "auto", why=NO_FUNCTIONS)
    fields.neutral("modalities", ["text"])
    fields.neutral("audio")
    fields.neutral("moderation")
    for name in ("verbosity", "prediction", "web_search_options"):
        if fields.peek(name) not in (None, "medium"):
            fields.leave_out(name, why="is something that this server doesn't have")
    fields.ignore("verbosity")
    # Nothing is stored, whatever it says.
    fields.boolean("store")
    fields.ignore(*IGNORED)
    fields.close()
    generation_request = GenerationRequest(
        model, messages, prompting=prompting, options=options, constraint_field="response_format"
    )
    return _ChatRequest(generation_request, choices, stream, include_usage, tells_progress)


def take_prompting(fields: Fields, model: ModelFacts) -> PromptOptions:
    """The tools, and whether to think, from OpenAI's fields, or other servers' `chat_template_kwargs`."""
    tools, choice = take_tools(fields, function_tool), take_choice(fields, nested_name)
    prompting = chosen_tools(fields, tools, choice, fields.boolean("parallel_tool_calls", True))
    think = take_effort(fields, "reasoning_effort", model)
    variables = fields.object("chat_template_kwargs")
    if variables is not None:
        for name in SWITCHES:
            if name in variables.names():
                think = variables.boolean(name, True)
        variables.close()
    return replace(prompting, think=think)


def _cut_reply(fields: Fields, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], ReplyPrefix]:
    """The messages before an unfinished reply, and the text of that reply, which the model continues."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not (last["content"] or last.get("thinking")):
        fields.refuse(
            "continue_final_message", "needs an assistant's message with text, and no calls, as the last"
        )
    return messages[:-1], ReplyPrefix(last["content"], last.get("thinking") or "")


def take_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream the answer, and whether the stream includes the usage."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    include_usage = options.boolean("include_usage")
    options.ignore("include_obfuscation")
    options.close()
    return stream, include_usage and stream


def _choice(
    index: int, events: list[Event], tokenizer: Tokenizer, request: GenerationRequest
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(event.text for event in events if not event.thinking),
        "refusal": None,
    }
    if thought := "".join(event.text for event in events if event.thinking):
        message["reasoning_content"] = thought
    if calls := [call_entry(event.tool_call) for event in events if event.tool_call is not None]:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(events, tokenizer) if "top_logprobs" in request.options else None,
        "finish_reason": finish_reason(events[-1], len(calls)),
    }


def _logprobs(events: list[Event], tokenizer: Tokenizer) -> dict[str, Any]:
    """The object `logprobs` for a reply's tokens. Tokens of thinking aren't in it."""
    content = [
        logprob_entry(tokenizer, event.token, event.logprob)
        | {"top_logprobs": [logprob_entry(tokenizer, *each) for each in event.top_logprobs]}
        for event in events
        if event.token is not None and event.logprob is not None and not event.thinking
    ]
    return {"content": content, "refusal": None}


def _usage(events: list[Event]) -> dict[str, Any]:
    stats = events[-1].stats
    assert stats is not None
    return usage(stats, sum(event.thinking and event.token is not None for event in events))


def _chunk(head: dict[str, Any], index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chunk of a stream. more: further fields of its choice."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
    return head | {"choices": [choice]}


def _progress(head: dict[str, Any], reading: PromptReading, progress: PromptProgress) -> bytes:
    return sse(_chunk(head, reading.index, {}) | progress_field(progress))


async def _chunks(
    service: Service, wanted: _ChatRequest, head: dict[str, Any], reading: PromptReading
) -> AsyncGenerator[bytes, None]:
    """Yields the stream's chunks. head: the fields that all chunks have."""
    usages = []

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        return sse(_chunk(head, index, delta, **more))

    for index in range(wanted.choices):
        reading.index = index
        events: list[Event] = []
        begun = calls = 0
        steps = CallSteps()
        async with generation(service, wanted.generation.again(index), reading) as running:
            async for event in running:
                if not events:
                    yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
                events.append(event)
                for step in steps.take(event):
                    begun += step.kind == "begins"
                    calls += step.kind == "ends"
                    if step.kind in ("begins", "arguments"):
                        yield chunk(index, _call_delta(step, begun - 1))
                more = {}
                if event.logprob is not None:
                    more["logprobs"] = _logprobs([event], running.tokenizer)
                if event.text or more:
                    name = "reasoning_content" if event.thinking else "content"
                    yield chunk(index, {name: event.text}, **more)
                if event.finish_reason is not None:
                    yield chunk(index, {}, finish_reason=finish_reason(event, calls))
        usages.append(_usage(events))
    if wanted.include_usage:
        yield sse(head | {"choices": [], "usage": summed(usages, wanted.choices)})
    yield b"data: [DONE]\n\n"


def _call_delta(step: CallStep, index: int) -> dict[str, Any]:
    """The delta for one step of a call: the call's name, or a part of its arguments."""
    if step.kind == "begins":
        begun = {"id": step.id, "type": "function", "function": {"name": step.name, "arguments": ""}}
        return {"tool_calls": [{"index": index} | begun]}
    return {"tool_calls": [{"index": index, "function": {"arguments": step.text}}]}
