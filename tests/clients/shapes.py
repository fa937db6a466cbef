"""The complete shape of an answer in each dialect: its official client's types, and the order of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import anthropic.types as anthropic_types
import ollama
import openai.types.chat as chat_types
import openai.types.responses as response_types
from pydantic import TypeAdapter

_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic_types.RawMessageStreamEvent)
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(response_types.ResponseStreamEvent)
PINGS = ("ping",)
"""Names of events that only keep a connection open."""


@dataclass
class Reply:
    """What an answer says. calls: names and arguments. new_tokens: those of the prompt that were computed."""

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ended: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def read_answer(path: str, body: bytes, streamed: bool) -> Reply:
    """The reply in the answer to a request to `path`. Fails where its shape isn't complete."""
    plain = path.partition("?")[0]
    readers = {
        "/v1/messages": (_message, _message_stream),
        "/v1/chat/completions": (_chat, _chat_stream),
        "/v1/responses": (_response, _response_stream),
        "/api/chat": (_ollama, _ollama_stream),
    }
    return readers[plain][streamed](body)


def events_of(body: bytes) -> list[tuple[str, str]]:
    """Names and data of server-sent events, without comments."""
    found = []
    for block in body.decode().split("\n\n"):
        fields = [line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":")]
        data = "\n".join(value for name, value in fields if name == "data")
        if data:
            found.append((dict(fields).get("event", ""), data))
    return found


def _message(body: bytes) -> Reply:
    return _of_message(anthropic_types.Message.model_validate_json(body))


def _of_message(message: anthropic_types.Message) -> Reply:
    assert (message.type, message.role) == ("message", "assistant")
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    reply = Reply(
        "".join(block.text for block in message.content if block.type == "text"),
        [(block.name, block.input) for block in message.content if block.type == "tool_use"],
        message.stop_reason or "",
        usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached,
        cached,
    )
    assert reply.ended in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    return reply


def _message_stream(body: bytes) -> Reply:
    events = [(name, json.loads(data)) for name, data in events_of(body) if name not in PINGS]
    for name, data in events:
        assert name == data["type"] != "error", data
        _MESSAGE_EVENT.validate_python(data)
    kinds = [name for name, _ in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    message = events[0][1]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    parts: dict[int, str] = {}
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
            parts[data["index"]] = ""
        elif name == "content_block_delta":
            delta = data["delta"]
            field = {"input_json_delta": "partial_json", "text_delta": "text", "thinking_delta": "thinking"}
            parts[data["index"]] += delta[field[delta["type"]]]
        else:
            assert name == "content_block_stop"
            block, written = message["content"][data["index"]], parts.pop(data["index"])
            if block["type"] == "tool_use":
                block["input"] = json.loads(written or "{}")
            else:
                block[block["type"]] += written
    assert not parts
    delta = events[-2][1]
    message |= delta["delta"]
    message["usage"] |= {name: value for name, value in delta["usage"].items() if value is not None}
    return _message(json.dumps(message).encode())


def _chat(body: bytes) -> Reply:
    completion = chat_types.ChatCompletion.model_validate_json(body)
    (choice,) = completion.choices
    reply = Reply(choice.message.content or "", ended=choice.finish_reason)
    for call in choice.message.tool_calls or ():
        assert call.type == "function"
        assert call.id
        reply.calls.append((call.function.name, json.loads(call.function.arguments)))
    _add_usage(reply, completion.usage)
    return reply


def _add_usage(reply: Reply, usage: Any) -> None:
    if usage is not None:
        reply.prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        reply.cached_tokens = (details.cached_tokens or 0) if details else 0


def _chat_stream(body: bytes) -> Reply:
    *events, (_, last) = events_of(body)
    assert last == "[DONE]"
    chunks = [chat_types.ChatCompletionChunk.model_validate_json(data) for _, data in events]
    assert len({chunk.id for chunk in chunks}) == 1
    reply, calls = Reply(), dict[int, list[str]]()
    told = [choice for chunk in chunks for choice in chunk.choices]
    assert told[0].delta.role == "assistant"
    for choice in told:
        reply.text += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            assert part.function
            name, arguments = calls.setdefault(part.index, ["", ""])
            assert part.id or name, "a call begins with its id"
            calls[part.index] = [
                name or part.function.name or "",
                arguments + (part.function.arguments or ""),
            ]
    assert [choice.finish_reason for choice in told[:-1]] == [None] * (len(told) - 1)
    reply.ended = told[-1].finish_reason or ""
    reply.calls = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    _add_usage(reply, chunks[-1].usage)
    return reply


def _response(body: bytes) -> Reply:
    return _of_response(response_types.Response.model_validate_json(body))


def _of_response(response: response_types.Response) -> Reply:
    assert response.status in ("completed", "incomplete")
    reply = Reply(response.output_text, ended=response.status)
    for item in response.output:
        if item.type == "function_call":
            reply.calls.append((item.name, json.loads(item.arguments)))
    assert response.usage is not None
    reply.prompt_tokens = response.usage.input_tokens
    reply.cached_tokens = response.usage.input_tokens_details.cached_tokens
    return reply


def _response_stream(body: bytes) -> Reply:
    events = [(name, json.loads(data)) for name, data in events_of(body) if name not in PINGS]
    typed = []
    for at, (name, data) in enumerate(events):
        assert (name, at) == (data["type"], data["sequence_number"])
        typed.append(_RESPONSE_EVENT.validate_python(data))
    kinds = [event.type for event in typed]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    reply = _of_response(typed[-1].response)
    assert kinds[-1] == f"response.{reply.ended}"
    begun, ended = (kinds.count(f"response.output_item.{what}") for what in ("added", "done"))
    assert begun == ended == len(typed[-1].response.output)
    assert "".join(event.delta for event in typed if event.type == "response.output_text.delta") == reply.text
    return reply


def _ollama(body: bytes) -> Reply:
    answer = ollama.ChatResponse.model_validate_json(body)
    assert answer.done
    calls = [(call.function.name, dict(call.function.arguments)) for call in answer.message.tool_calls or ()]
    return Reply(answer.message.content or "", calls, answer.done_reason or "", answer.prompt_eval_count or 0)


def _ollama_stream(body: bytes) -> Reply:
    parts = [ollama.ChatResponse.model_validate_json(line) for line in body.splitlines()]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    reply = _ollama(body.splitlines()[-1])
    reply.text = "".join(part.message.content or "" for part in parts)
    told = [call for part in parts for call in part.message.tool_calls or ()]
    reply.calls = [(call.function.name, dict(call.function.arguments)) for call in told]
    return reply
