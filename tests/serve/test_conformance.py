"""Cases of others' suites, written anew: Open Responses' compliance tests and those of llama.cpp's server.

Only what the other files here don't test already. docs/serve.md lists the cases that this server fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.serve.config import ServeConfig
from tests.support.serving import Serving, serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
STREAMED = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True, "temperature": 0}
NULL = type(None)
RESOURCE: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "object": (str,),
    "created_at": (int,),
    "completed_at": (int, NULL),
    "status": (str,),
    "incomplete_details": (dict, NULL),
    "model": (str,),
    "previous_response_id": (str, NULL),
    "instructions": (str, NULL),
    "output": (list,),
    "error": (dict, NULL),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": (str,),
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": (int,),
    "temperature": (int, float),
    "reasoning": (dict, NULL),
    "usage": (dict, NULL),
    "max_output_tokens": (int, NULL),
    "max_tool_calls": (int, NULL),
    "store": (bool,),
    "background": (bool,),
    "service_tier": (str,),
    "metadata": (dict,),
    "safety_identifier": (str, NULL),
    "prompt_cache_key": (str, NULL),
}
"""Fields of Open Responses' response object, all required, with their types."""


@pytest.fixture(scope="module")
def shipped() -> Iterator[Serving]:
    """The model that ships, as its replies end by themselves."""
    with serving(load(threads=1)) as running:
        yield running


def check_resource(found: dict[str, Any]) -> None:
    assert {name: type(found.get(name, ...)) for name in RESOURCE if not fits(found, name)} == {}
    assert found["output"], "no items"
    assert all(item["id"] and item["status"] == "completed" for item in found["output"])


def fits(found: dict[str, Any], name: str) -> bool:
    value = found.get(name, ...)
    return isinstance(value, RESOURCE[name]) and (bool in RESOURCE[name] or not isinstance(value, bool))


def events(server: Serving, path: str, body: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of a stream's events."""
    text = server.post(path, body).body.decode()
    found = []
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines())
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


@pytest.mark.parametrize(
    "said",
    [
        [("user", "Say hello in three words.")],
        [("system", "You are a pirate."), ("user", "Say hello.")],
        [("user", "My name is Alice."), ("assistant", "Hello Alice!"), ("user", "What is my name?")],
    ],
    ids=["basic", "system prompt", "several turns"],
)
def test_a_text_conforms_to_open_responses(shipped: Serving, said: list[tuple[str, str]]) -> None:
    items = [{"type": "message", "role": role, "content": text} for role, text in said]
    found = shipped.post(RESPONSES, {"model": shipped.model.name, "input": items, "temperature": 0}).json
    check_resource(found)
    assert found["status"] == "completed"
    assert [item["type"] for item in found["output"]] == ["message"]


def test_a_stream_conforms_to_open_responses(shipped: Serving) -> None:
    items = [{"type": "message", "role": "user", "content": "Count from 1 to 5."}]
    asked = {"model": shipped.model.name, "input": items, "stream": True, "temperature": 0}
    found = events(shipped, RESPONSES, asked)
    assert all(name == data["type"] for name, data in found)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    name, last = found[-1]
    assert name == "response.completed"
    check_resource(last["response"])
    ids = {data["response"]["id"] for _, data in found if "response" in data}
    assert ids == {last["response"]["id"]}
    items_told = {data["item_id"] for _, data in found if "item_id" in data}
    assert items_told == {last["response"]["output"][0]["id"]}
    text = "".join(data["delta"] for name, data in found if name == "response.output_text.delta")
    assert text == last["response"]["output"][0]["content"][0]["text"]


def test_a_response_repeats_what_was_asked(server: Serving) -> None:
    keys = {"safety_identifier": "someone", "prompt_cache_key": "key", "temperature": 0.5, "top_p": 0.5}
    found = server.post(RESPONSES, {"input": "x", "max_output_tokens": 2} | keys).json
    check_types = {name: found[name] for name in keys}
    assert check_types == keys
    assert found["incomplete_details"] == {"reason": "max_output_tokens"} or found["status"] == "completed"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"content": "hello"}],
        [{"role": "system", "content": "test"}, {}],
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/api/chat"])
def test_messages_that_are_none_are_refused(server: Serving, path: str, messages: Any) -> None:
    answer = server.post(
        path, {"messages": messages, "max_tokens": 2} if path != "/api/chat" else {"messages": messages}
    )
    assert answer.status == 400
    assert "messages" in answer.body.decode()


def test_a_streamed_chat_has_one_id_and_ends_without_content(server: Serving) -> None:
    chunks = [data for _, data in events(server, CHAT, STREAMED)]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["model"] for chunk in chunks} == {server.model.name}
    first, *rest = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"]["role"] == "assistant"
    assert not first["delta"]["content"]
    assert not any("role" in choice["delta"] for choice in rest)
    assert rest[-1]["finish_reason"] in ("length", "stop")
    assert "content" not in rest[-1]["delta"]
    assert all(choice["finish_reason"] is None for choice in rest[:-1])


def test_a_streamed_message_has_its_events_in_order(server: Serving) -> None:
    found = events(server, MESSAGES, STREAMED)
    assert all(name == data["type"] for name, data in found)
    names = [name for name, _ in found if name != "ping"]
    middle = [name for name in names[2:-3]]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(middle) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = found[0][1]["message"]
    assert start["content"] == []
    assert start["role"] == "assistant"
    assert start["usage"]["input_tokens"] > 0
    assert start["usage"]["output_tokens"] == 0
    delta = next(data for name, data in found if name == "message_delta")
    assert delta["delta"]["stop_reason"] in ("end_turn", "max_tokens")
    assert delta["usage"]["input_tokens"] > 0
    assert delta["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 40},
        {"metadata": {"user_id": "someone"}},
        {"stop_sequences": ["\n", "END"]},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief."}]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_messages_take_anthropic_s_parameters(server: Serving, more: dict[str, Any]) -> None:
    asked = {"model": server.model.name, "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    found = server.post(MESSAGES, asked | more)
    assert found.status == 200, found.body
    message = found.json
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
    assert {"input_tokens", "output_tokens"} <= set(message["usage"])
    assert "choices" not in message
    assert "timings" not in message


def test_counting_tokens_needs_no_limit_and_says_only_the_count(server: Serving) -> None:
    asked = {"model": server.model.name, "messages": [{"role": "user", "content": "Hello"}]}
    plain = server.post(f"{MESSAGES}/count_tokens", asked).json
    more = server.post(f"{MESSAGES}/count_tokens", asked | {"system": "You are helpful."}).json
    assert set(plain) == {"input_tokens"}
    assert 0 < plain["input_tokens"] < more["input_tokens"]
    assert server.post(MESSAGES, asked).status == 400


def test_the_key_s_error_is_each_dialect_s(chat_bundle: Path) -> None:
    with serving(
        load(chat_bundle, threads=1, speculation="off"), ServeConfig(port=0, api_key="secret")
    ) as server:
        for path, kind in (
            (CHAT, "authentication_error"),
            (MESSAGES, "authentication_error"),
            ("/api/chat", None),
        ):
            for headers in ({}, {"Authorization": "Bearer invalid-key"}, {"x_api_key": "invalid-key"}):
                answer = server.post(path, {}, **headers)
                assert answer.status == 401
                error = answer.json["error"]
                assert (error["type"] if kind else None) == kind


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "file://../../x.png", "http://127.0.0.1:1/x.png", "data:image/png;base64,AA=="],
)
def test_pictures_are_refused_and_nothing_is_fetched(server: Serving, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
    assert answer.status == 400
    assert "content" in answer.json["error"]["message"]
