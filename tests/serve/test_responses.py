"""OpenAI's Responses API by its official client: the object, the typed events, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.generate import Event
from ondevice.serve.openai_responses import _Writer
from ondevice.stats import GenerationStats
from tests.support.serving import Serving

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def reply(server: Serving, **options: Any) -> Any:
    return server.model.session("Be brief.").respond("Hello", **({"top_p": 0.9} | options))


def create(client: Any, server: Serving, **options: Any) -> Any:
    asked = {"model": server.model.name, "input": "Hello", "instructions": "Be brief.", "temperature": 0}
    return client.responses.create(**(asked | options))


def test_a_response_is_the_session_s_reply_with_its_usage(server: Serving, client: Any) -> None:
    expected = reply(server, max_tokens=16)
    got = create(client, server, max_output_tokens=16)
    assert got.output_text == expected.text
    assert got.status == {"length": "incomplete", "stop": "completed"}[expected.finish_reason]
    assert got.usage.input_tokens == expected.stats.prompt_tokens
    assert got.usage.output_tokens == expected.stats.generated_tokens
    again = create(client, server, max_output_tokens=16).usage
    # The last token always runs.
    assert again.input_tokens_details.cached_tokens == again.input_tokens - 1
    assert got.instructions == "Be brief."


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"temperature": 1, "seed": 3, "top_k": 40}, {"temperature": 1, "seed": 3, "top_k": 40}),
        (
            {"temperature": 1, "seed": -1, "min_p": 0.2},
            {"temperature": 1, "seed": (1 << 64) - 1, "min_p": 0.2},
        ),
        ({"repeat_penalty": 1.8, "repeat_last_n": 8}, {"repetition_penalty": 1.8, "repeat_last_n": 8}),
        ({"logit_bias": {"200": 100}}, {"logit_bias": {200: 100}}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    ],
)
def test_sampling_is_that_of_chats(
    server: Serving, client: Any, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    got = create(client, server, max_output_tokens=16, extra_body=fields)
    text = reply(server, max_tokens=16, **options).text
    assert got.output_text == text != reply(server, max_tokens=16).text
    stopped = create(client, server, max_output_tokens=16, extra_body=fields | {"stop": text[4:6]})
    assert stopped.output_text == text[: text.index(text[4:6])]


def test_a_stream_tells_the_same_response_in_numbered_events(server: Serving, client: Any) -> None:
    create(client, server, max_output_tokens=16)
    whole = create(client, server, max_output_tokens=16)
    events = list(create(client, server, max_output_tokens=16, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-1] == f"response.{whole.status}"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert final.output_text == whole.output_text == text
    assert final.usage == whole.usage


def test_a_whole_conversation_is_taken(server: Serving, client: Any) -> None:
    session = server.model.session("Be brief.")
    said = session.respond("Hello", max_tokens=8).text
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]},
        {"role": "user", "content": "More"},
    ]
    got = create(client, server, input=items, instructions=None, max_output_tokens=8)
    assert got.output_text == session.respond("More", max_tokens=8).text


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"background": True}, "background"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Serving, asked: dict[str, Any], field: str) -> None:
    answer = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 2} | asked)
    assert answer.status == 400
    assert answer.json["error"]["param"] == field


def test_the_usual_effort_changes_nothing(server: Serving) -> None:
    body = {"input": "Hello", "max_output_tokens": 4, "temperature": 0}
    plain, usual = (
        server.post("/v1/responses", body | more) for more in ({}, {"reasoning": {"effort": "medium"}})
    )
    assert usual.status == 200, usual.body
    texts = [it.json["output"][0]["content"][0]["text"] for it in (plain, usual)]
    assert texts[0] == texts[1]


def test_thinking_is_an_item_of_its_own() -> None:
    writer = _Writer({"id": "r", "output": []})
    parts = [
        writer.take(Event("Hmm", 1, thinking=True)),
        writer.take(Event("Yes", 2)),
        writer.take(Event("", None, "stop", GenerationStats(prompt_tokens=3, generated_tokens=2))),
    ]
    kinds = [line[7:] for line in b"".join(parts).decode().splitlines() if line.startswith("event: ")]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    assert "response.reasoning_text.delta" in kinds
    assert kinds[-1] == "response.completed"
    first, second = writer.response["output"]
    assert (first["type"], first["content"][0]["text"]) == ("reasoning", "Hmm")
    assert (second["type"], second["content"][0]["text"]) == ("message", "Yes")
    assert writer.response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
