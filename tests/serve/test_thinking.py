"""Thinking is told apart from the reply in every dialect.

No small model thinks, so a parser that takes a reply's first tokens for thinking stands in for channels.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.chat_template.replies import Kind, ReplyPiece
from tests.support.serving import Serving

THOUGHT = 5
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


class ThinksFirst:
    """The first tokens are thinking."""

    def __init__(self, *given: Any) -> None:
        self._taken = 0

    openers: frozenset[int] = frozenset()

    @property
    def kind(self) -> Kind:
        return "thinking" if 1 <= self._taken <= THOUGHT else "reply"

    def take(self, token: int | None, text: str) -> list[ReplyPiece]:
        self._taken += 1
        return [ReplyPiece(self.kind, text)]

    def finish(self) -> list[ReplyPiece]:
        return []


@pytest.fixture
def expected(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the Python API answers, as the server does meanwhile."""
    monkeypatch.setattr(server.model.chat_template, "reply_parser", ThinksFirst)
    response = server.model.session().respond("Hello", max_tokens=16, top_p=0.9)
    assert response.thinking
    assert response.text
    return response


def test_openai_has_reasoning_content(server: Serving, expected: Any) -> None:
    body = server.post("/v1/chat/completions", ASKED | {"max_tokens": 16}).json
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (expected.thinking, expected.text)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": THOUGHT}
    stream = server.post("/v1/chat/completions", ASKED | {"max_tokens": 16, "stream": True}).body.decode()
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == expected.thinking
    assert "".join(delta.get("content") or "" for delta in deltas) == expected.text


def test_anthropic_has_blocks_of_thinking(server: Serving, expected: Any) -> None:
    client = pytest.importorskip("anthropic").Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = ASKED | {"model": "", "max_tokens": 16}
    whole = server.post("/v1/messages", asked).json["content"]
    assert [(block["type"], block[block["type"]]) for block in whole] == [
        ("thinking", expected.thinking),
        ("text", expected.text),
    ]
    del asked["temperature"]
    with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        final = stream.get_final_message().content
    assert (final[0].thinking, final[1].text) == (expected.thinking, expected.text)
    client.close()


def test_ollama_has_thinking_and_leaves_it_out(server: Serving, expected: Any) -> None:
    asked = {"messages": ASKED["messages"], "options": {"temperature": 0, "num_predict": 16}}
    whole = server.post("/api/chat", asked | {"stream": False}).json["message"]
    assert (whole["thinking"], whole["content"]) == (expected.thinking, expected.text)
    lines = [json.loads(line)["message"] for line in server.post("/api/chat", asked).body.splitlines()]
    assert "".join(line.get("thinking", "") for line in lines) == expected.thinking
    assert "".join(line["content"] for line in lines) == expected.text
    quiet = server.post("/api/chat", asked | {"think": False}).body.decode()
    assert "thinking" not in quiet


def test_responses_have_items_of_reasoning(server: Serving, expected: Any) -> None:
    body = server.post("/v1/responses", {"input": "Hello", "temperature": 0, "max_output_tokens": 16}).json
    texts = [(item["type"], item["content"][0]["text"]) for item in body["output"]]
    assert texts == [("reasoning", expected.thinking), ("message", expected.text)]
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": THOUGHT}
