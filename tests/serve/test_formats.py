"""Answers in JSON, asked for in every dialect by its official client, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")


from ondevice import Constraint
from tests.support.serving import Serving

openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
UNSUPPORTED = {"type": "string", "not": {"const": "a"}}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def expected(server: Serving) -> str:
    """What the Python API answers."""
    constraint = Constraint.json_schema(SCHEMA)
    answer = server.model.session().respond("Hello", constraint=constraint, temperature=0, top_p=0.9)
    assert set(json.loads(answer.text)) == {"city", "warm"}
    return answer.text


@pytest.fixture(scope="module")
def client(server: Serving) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def asked_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": schema}}


def test_chat_completions_obey_a_schema(server: Serving, client: Any, expected: str) -> None:
    asked = {
        "model": server.model.name,
        "messages": MESSAGES,
        "temperature": 0,
        "response_format": asked_format(SCHEMA),
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == (expected, "stop")
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    both = client.chat.completions.create(**asked, n=2).choices
    assert [choice.message.content for choice in both] == [expected, expected]


def test_chat_completions_write_objects(server: Serving, client: Any) -> None:
    answer = client.chat.completions.create(
        model=server.model.name,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        response_format={"type": "json_object"},
    )
    assert answer.choices[0].message.content.startswith("{")


def test_responses_obey_and_repeat_their_format(server: Serving, client: Any, expected: str) -> None:
    wanted = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    answer = client.responses.create(
        model=server.model.name, input="Hello", temperature=0, top_p=0.9, text={"format": wanted}
    )
    assert answer.output_text == expected
    assert answer.text.format.type == "json_schema"


def test_messages_of_anthropic_s_obey(server: Serving, expected: str) -> None:
    asked = {"model": server.model.name, "max_tokens": 100, "messages": MESSAGES, "temperature": 0}
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        answer = server.post("/v1/messages", asked | fields)
        assert answer.json["content"] == [{"type": "text", "text": expected}]


def test_ollama_s_replies_obey_a_format(server: Serving, expected: str) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url, timeout=60)
    asked = {"model": server.model.name, "options": {"temperature": 0, "num_predict": 60}}
    assert client.chat(messages=MESSAGES, format=SCHEMA, **asked).message.content == expected
    parts = client.chat(messages=MESSAGES, format=SCHEMA, stream=True, **asked)
    assert "".join(part.message.content for part in parts) == expected
    assert client.generate(prompt="Hello", format="json", **asked).response.startswith("{")


def test_true_and_false_are_schemas(server: Serving) -> None:
    """True is any JSON, false is none."""
    chat, asked = "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    wanted = server.post(chat, asked | {"response_format": asked_format({})}).json["choices"]
    for path, fields, field in (
        (chat, lambda it: {"response_format": asked_format(it)}, "response_format"),
        (chat, lambda it: {"response_format": {"type": "json_object", "schema": it}}, "response_format"),
        ("/v1/messages", lambda it: {"output_config": {"format": {"type": "json_schema", "schema": it}}}, ""),
        ("/api/chat", lambda it: {"format": it, "model": server.model.name}, ""),
        ("/completion", lambda it: {"json_schema": it, "prompt": "a"}, ""),
    ):
        assert server.post(path, asked | fields(True) | {"stream": False}).status == 200, path
        refused = server.post(path, asked | fields(False) | {"stream": False})
        assert (refused.status, "the schema is false" in str(refused.json)) == (400, True), refused.json
        assert not field or refused.json["error"]["param"] == field
    told = server.post(chat, asked | {"response_format": asked_format(True)}).json["choices"]
    assert told == wanted


def test_what_cannot_be_enforced_is_refused_with_its_field(server: Serving, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="keyword not") as caught:
        client.chat.completions.create(
            model=server.model.name, messages=MESSAGES, response_format=asked_format(UNSUPPORTED)
        )
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_constraint")
    wanted = {"type": "json_schema", "name": "x", "schema": UNSUPPORTED}
    with pytest.raises(openai.BadRequestError, match="keyword not") as caught:
        client.responses.create(model=server.model.name, input="Hello", text={"format": wanted}, stream=True)
    assert caught.value.param == "text.format"
    answer = server.post("/api/chat", {"model": "", "messages": MESSAGES, "format": UNSUPPORTED})
    assert (answer.status, "keyword not" in answer.json["error"]) == (400, True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(12)]},
        {"enum": ["long" * 20_000]},
    ],
)
def test_schemas_that_explode_are_refused_and_harm_no_other(
    server: Serving, expected: str, schema: dict[str, Any]
) -> None:
    asked = {"model": "", "messages": MESSAGES, "temperature": 0}
    answer = server.post("/v1/chat/completions", asked | {"response_format": asked_format(schema)})
    assert answer.status == 400
    answer = server.post("/v1/chat/completions", asked | {"response_format": asked_format(SCHEMA)})
    assert answer.json["choices"][0]["message"]["content"] == expected
