"""The official `ollama` client, unchanged, against a server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("starlette")

from tests.support.serving import Serving

ollama = pytest.importorskip("ollama")

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: Serving) -> Any:
    return ollama.Client(host=server.url, timeout=60)


def reply(server: Serving, **options: Any) -> Any:
    """What the Python API answers."""
    session = server.model.session("Be brief.")
    return session.respond("Hello", **({"top_p": 0.9, "temperature": 0.7} | options))


def test_a_chat_is_the_session_s_reply_whole_and_streamed(server: Serving, client: Any) -> None:
    expected = reply(server, seed=7, max_tokens=20, top_k=9, repetition_penalty=1.5)
    options = {"seed": 7, "num_predict": 20, "top_k": 9, "repeat_penalty": 1.5, "num_ctx": 4096}
    got = client.chat(server.model.name, messages=MESSAGES, options=options)
    assert got.message.content == expected.text
    assert got.done_reason == expected.finish_reason
    assert (got.prompt_eval_count, got.eval_count) == (
        expected.stats.prompt_tokens,
        expected.stats.generated_tokens,
    )
    parts = list(client.chat(f"{server.model.name}:latest", messages=MESSAGES, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == expected.text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == expected.stats.generated_tokens
    assert len(parts) > 2


def test_generate_answers_by_the_template_or_continues_raw(server: Serving, client: Any) -> None:
    options = {"seed": 1, "num_predict": 12}
    got = client.generate(server.model.name, prompt="Hello", system="Be brief.", options=options)
    assert got.response == reply(server, seed=1, max_tokens=12).text
    raw = client.generate(server.model.name, prompt="Hello", raw=True, options={"num_predict": 12})
    assert raw.response == server.model.generate("Hello", max_tokens=12).text
    parts = client.generate(
        server.model.name, prompt="Hello", raw=True, options={"num_predict": 12}, stream=True
    )
    assert "".join(part.response for part in parts) == raw.response


def test_without_a_text_the_model_is_loaded(server: Serving, client: Any) -> None:
    assert client.generate(server.model.name).done_reason == "load"
    assert client.chat(server.model.name, messages=[]).done_reason == "load"


def test_what_is_said_of_models(server: Serving, client: Any) -> None:
    name = server.model.name
    listed = client.list().models
    assert [it.model for it in listed] == [name]
    assert listed[0].size == server.model.bundle.bundle_bytes
    assert [it.model for it in client.ps().models] == [name]
    shown = client.show(name)
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["general.parameter_count"] == server.model.bundle.parameters
    assert "<|assistant|>" in shown.template
    assert re.fullmatch(r"[0-9a-f]{64}", listed[0].digest)
    # VS Code's client asks for at least 0.6.4.
    version = server.request("GET", "/api/version").json["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert server.request("GET", "/").status == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"options": {"repeat_last_n": 7}},
        {"options": {"repeat_last_n": 0, "repeat_penalty": 1.5}},
        {"truncate": True, "shift": True, "keep_alive": "1h30m"},
        {"options": {"top_k": -1, "num_ctx": 1 << 20}, "keep_alive": -1},
        {"truncate": False, "shift": False},
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_what_changes_nothing_is_accepted(server: Serving, asked: dict[str, Any], raw: bool) -> None:
    body: dict[str, Any] = {"prompt": "Hello", "raw": raw, "stream": False}
    options = {"num_predict": 4, "seed": 1}
    plain, got = (
        server.post("/api/generate", body | more | {"options": options | more.get("options", {})})
        for more in ({}, asked)
    )
    assert got.status == 200, got.body
    assert got.json["response"] == plain.json["response"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"format": "yaml"}, "format"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": []}, "options"),
        ({"think": "much"}, "think"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": True}, "keep_alive"),
        ({"options": {"num_ctx": "much"}}, "options.num_ctx"),
        ({"options": {"presence_penalty": -3}}, "options.presence_penalty"),
        ({"stream": 1}, "stream"),
        ({"messages": "x"}, "messages"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"truncate": "yes"}, "truncate"),
        ({"shift": 1}, "shift"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, "messages[0].images"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Serving, asked: dict[str, Any], field: str) -> None:
    answer = server.post("/api/chat", {"model": server.model.name, "messages": MESSAGES} | asked)
    assert answer.status == 400
    assert answer.json["error"].startswith(field)


def test_errors_are_ollama_s(server: Serving, client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("other", messages=MESSAGES)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(server.model.name, messages=[{"role": "user", "content": "a" * 5000}])
    assert caught.value.status_code == 400
    limit = f"tokens > {server.model.plan.max_context}"
    assert re.fullmatch(rf"the input length exceeds the context length: 50\d\d {limit}", caught.value.error)


def test_the_raw_stream_is_a_json_object_a_line(server: Serving) -> None:
    asked = {"model": "", "messages": MESSAGES, "options": {"num_predict": 3}}
    answer = server.post("/api/chat", asked)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[-1]["done"]
    assert lines[-1]["eval_count"] <= 3
