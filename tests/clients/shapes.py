"""The complete shape of an answer in each dialect: fields that it must have, and the order of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MESSAGE = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
MESSAGE_USAGE = ("input_tokens", "output_tokens")
CHAT = ("id", "object", "created", "model", "choices")
CHAT_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
RESPONSE = ("id", "object", "created_at", "status", "model", "output", "usage", "error", "incomplete_details")
RESPONSE += (
    "instructions",
    "metadata",
    "parallel_tool_calls",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
)
RESPONSE_USAGE = ("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details")
RESPONSE_USAGE += ("total_tokens",)
ITEMS = {
    "message": ("id", "role", "status", "content"),
    "function_call": ("id", "call_id", "name", "arguments", "status"),
    "reasoning": ("id", "summary"),
}
OLLAMA = ("model", "created_at", "message", "done")
OLLAMA_END = ("done_reason", "total_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count")
OLLAMA_END += ("eval_duration", "load_duration")
DELTAS = {"input_json_delta": "partial_json", "text_delta": "text", "thinking_delta": "thinking"}
PING = "ping"


@dataclass
class Reply:
    """What an answer says. calls: names and arguments. ended: why, in the dialect's word."""

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ended: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt_tokens - self.cached_tokens


def read_answer(path: str, body: bytes, streamed: bool) -> Reply:
    """The reply in the answer to a request to `path`. Fails where its shape isn't complete."""
    return READERS[path.partition("?")[0]][streamed](body)


def events_of(body: bytes) -> list[tuple[str, str]]:
    """Names and data of server-sent events, without comments."""
    found = []
    for block in body.decode().split("\n\n"):
        fields = [line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":")]
        data = "\n".join(value for name, value in fields if name == "data")
        if data:
            found.append((dict(fields).get("event", ""), data))
    return found


def has(value: dict[str, Any], names: Iterable[str]) -> None:
    """Fails where a field isn't there."""
    assert [name for name in names if name not in value] == [], value


def _message(body: bytes) -> Reply:
    return _of_message(json.loads(body))


def _of_message(message: dict[str, Any]) -> Reply:
    has(message, MESSAGE)
    has(message["usage"], MESSAGE_USAGE)
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    usage = message["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    reply = Reply(ended=message["stop_reason"], cached_tokens=cached)
    reply.prompt_tokens = usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0) + cached
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block["id"]
            reply.calls.append((block["name"], block["input"]))
        elif block["type"] == "text":
            reply.text += block["text"]
    return reply


def _message_stream(body: bytes) -> Reply:
    events = [(name, json.loads(data)) for name, data in events_of(body) if name != PING]
    for name, data in events:
        assert name == data["type"] != "error", data
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
            parts[data["index"]] += delta[DELTAS[delta["type"]]]
        else:
            assert name == "content_block_stop"
            block, said = message["content"][data["index"]], parts.pop(data["index"])
            if block["type"] == "tool_use":
                is_cut = events[-2][1]["delta"]["stop_reason"] == "max_tokens"
                block["input"] = arguments_of(said or "{}", is_cut)
            else:
                block[block["type"]] += said
    assert not parts
    message |= events[-2][1]["delta"]
    message["usage"] |= events[-2][1]["usage"]
    return _of_message(message)


def arguments_of(text: str, is_cut: bool) -> Any:
    """The arguments of a call, or their text where the reply ended within them, as `is_cut` allows."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        if not is_cut:
            raise
        return text


def _chat(body: bytes) -> Reply:
    completion = json.loads(body)
    has(completion, (*CHAT, "usage"))
    assert completion["object"] == "chat.completion"
    (choice,) = completion["choices"]
    message = choice["message"]
    assert message["role"] == "assistant"
    reply = Reply(message["content"] or "", ended=choice["finish_reason"])
    for call in message.get("tool_calls") or ():
        assert (call["type"], bool(call["id"])) == ("function", True)
        arguments = arguments_of(call["function"]["arguments"], reply.ended == "length")
        reply.calls.append((call["function"]["name"], arguments))
    _add_usage(reply, completion["usage"])
    return reply


def _add_usage(reply: Reply, usage: dict[str, Any]) -> None:
    has(usage, CHAT_USAGE)
    reply.prompt_tokens = usage["prompt_tokens"]
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _chat_stream(body: bytes) -> Reply:
    *events, (_, last) = events_of(body)
    assert last == "[DONE]"
    chunks = [json.loads(data) for _, data in events]
    for chunk in chunks:
        has(chunk, CHAT)
        assert (chunk["object"], chunk["id"]) == ("chat.completion.chunk", chunks[0]["id"])
    reply, calls = Reply(), dict[int, list[str]]()
    told = [choice for chunk in chunks for choice in chunk["choices"]]
    assert told[0]["delta"]["role"] == "assistant"
    for choice in told:
        reply.text += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls") or ():
            function = part["function"]
            if part["index"] not in calls:
                assert (part["type"], bool(part["id"])) == ("function", True)
                calls[part["index"]] = [function["name"], ""]
            calls[part["index"]][1] += function.get("arguments") or ""
    assert [choice["finish_reason"] for choice in told[:-1]] == [None] * (len(told) - 1)
    reply.ended = told[-1]["finish_reason"]
    is_cut = reply.ended == "length"
    reply.calls = [(name, arguments_of(arguments, is_cut)) for name, arguments in calls.values()]
    for chunk in chunks:
        if chunk.get("usage"):
            _add_usage(reply, chunk["usage"])
    return reply


def _response(body: bytes) -> Reply:
    return _of_response(json.loads(body))


def _of_response(response: dict[str, Any]) -> Reply:
    has(response, RESPONSE)
    has(response["usage"], RESPONSE_USAGE)
    assert response["status"] in ("completed", "incomplete")
    reply = Reply(ended=response["status"], prompt_tokens=response["usage"]["input_tokens"])
    reply.cached_tokens = response["usage"]["input_tokens_details"]["cached_tokens"]
    for item in response["output"]:
        has(item, ITEMS[item["type"]])
        if item["type"] == "function_call":
            reply.calls.append((item["name"], arguments_of(item["arguments"], reply.ended == "incomplete")))
        elif item["type"] == "message":
            reply.text += "".join(part["text"] for part in item["content"])
    return reply


def _response_stream(body: bytes) -> Reply:
    events = [(name, json.loads(data)) for name, data in events_of(body) if name != PING]
    for at, (name, data) in enumerate(events):
        assert (name, at) == (data["type"], data["sequence_number"])
    kinds = [name for name, _ in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    response = events[-1][1]["response"]
    reply = _of_response(response)
    assert kinds[-1] == f"response.{reply.ended}"
    begun, ended = (kinds.count(f"response.output_item.{what}") for what in ("added", "done"))
    assert begun == ended == len(response["output"])
    deltas = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    assert deltas == reply.text
    return reply


def _ollama(body: bytes) -> Reply:
    answer = json.loads(body)
    has(answer, (*OLLAMA, *OLLAMA_END))
    message = answer["message"]
    assert (answer["done"], message["role"]) == (True, "assistant")
    reply = Reply(message["content"], ended=answer["done_reason"], prompt_tokens=answer["prompt_eval_count"])
    for call in message.get("tool_calls") or ():
        reply.calls.append((call["function"]["name"], call["function"]["arguments"]))
    return reply


def _ollama_stream(body: bytes) -> Reply:
    parts = [json.loads(line) for line in body.splitlines()]
    for part in parts:
        has(part, OLLAMA)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    reply = _ollama(body.splitlines()[-1])
    reply.text = "".join(part["message"]["content"] for part in parts)
    told = [call["function"] for part in parts for call in part["message"].get("tool_calls") or ()]
    reply.calls = [(function["name"], function["arguments"]) for function in told]
    return reply


READERS: dict[str, tuple[Callable[[bytes], Reply], Callable[[bytes], Reply]]] = {
    "/v1/messages": (_message, _message_stream),
    "/v1/chat/completions": (_chat, _chat_stream),
    "/v1/responses": (_response, _response_stream),
    "/api/chat": (_ollama, _ollama_stream),
}
"""Readers of whole answers and of streams, by paths."""
