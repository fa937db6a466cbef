"""The official `anthropic` client, unchanged, against a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from tests.support.serving import Serving

anthropic = pytest.importorskip("anthropic")

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def reply(server: Serving, **options: Any) -> Any:
    return server.model.session("Be brief.").respond("Hello", **({"top_p": 0.9} | options))


def create(client: Any, server: Serving, **options: Any) -> Any:
    """Its client no longer has a parameter for the temperature, which the API still has."""
    asked = {"model": server.model.name, "messages": MESSAGES, "system": "Be brief.", "max_tokens": 16}
    return client.messages.create(**(asked | {"extra_body": {"temperature": 0}} | options))


def read(usage: Any) -> int:
    """The prompt's tokens: Anthropic counts those apart that weren't computed."""
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def test_a_message_is_the_session_s_reply_with_its_usage(server: Serving, client: Any) -> None:
    expected = reply(server, max_tokens=16)
    got = create(client, server)
    assert [block.text for block in got.content] == [expected.text]
    assert got.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected.finish_reason]
    assert read(got.usage) == expected.stats.prompt_tokens
    assert got.usage.output_tokens == expected.stats.generated_tokens


def test_tokens_that_are_kept_are_told_apart_from_the_start(server: Serving, client: Any) -> None:
    messages = [{"role": "user", "content": "Nobody has said this before."}]
    first, again = (create(client, server, messages=messages).usage for _ in range(2))
    assert first.cache_read_input_tokens < read(first) - 20
    # The last token always runs.
    assert (again.input_tokens, read(again)) == (1, read(first))
    start, *_, end, _ = create(client, server, messages=messages, stream=True)
    assert start.message.usage.output_tokens == 0
    for told in (start.message.usage, end.usage):
        assert (told.input_tokens, read(told)) == (1, read(first))


def test_a_stream_is_put_together_to_the_same_message(server: Serving, client: Any) -> None:
    whole = create(client, server)
    asked = {"model": server.model.name, "messages": MESSAGES, "system": "Be brief.", "max_tokens": 16}
    with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert [block.text for block in final.content] == [text]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert read(final.usage) == read(whole.usage)
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = [event.type for event in create(client, server, stream=True)]
    assert (events[0], events[1], events[-2:]) == (
        "message_start",
        "content_block_start",
        ["message_delta", "message_stop"],
    )


def test_a_stop_sequence_is_named(server: Serving, client: Any) -> None:
    text = create(client, server, max_tokens=30).content[0].text
    stop = next(text[at : at + 2] for at in range(4, len(text)) if "\ufffd" not in text[at : at + 2])
    got = create(client, server, max_tokens=30, stop_sequences=[stop, "never written"])
    assert got.content[0].text == text[: text.index(stop)]
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)


def test_blocks_of_text_and_turns_of_one_role_are_joined(server: Serving, client: Any) -> None:
    blocks = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo", "cache_control": None}]
    got = create(client, server, messages=[{"role": "user", "content": blocks}])
    assert got.content[0].text == reply(server, max_tokens=16).text
    two = create(client, server, messages=[*MESSAGES, {"role": "user", "content": "there"}])
    session = server.model.session("Be brief.")
    assert two.content[0].text == session.respond("Hello\n\nthere", max_tokens=16).text


def test_tokens_are_counted(server: Serving, client: Any) -> None:
    got = client.messages.count_tokens(model=server.model.name, messages=MESSAGES, system="Be brief.")
    assert got.input_tokens == read(create(client, server).usage)
    # A prompt that is too long is counted too: agents shorten it by what there is too much.
    long = [{"role": "user", "content": "a" * 5000}]
    count = client.messages.count_tokens(model="", messages=long).input_tokens
    assert count == len(server.model.chat_template.encode(long, server.model.tokenizer))
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, server, messages=long, system=anthropic.NOT_GIVEN)
    error = caught.value.body["error"]
    most = server.model.plan.max_context
    assert error == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {count} tokens > {most} maximum",
    }


def test_models_are_listed_in_its_own_shape(server: Serving, client: Any) -> None:
    assert [(it.type, it.id) for it in client.models.list()] == [("model", server.model.name)]
    assert client.models.retrieve(server.model.name).id == server.model.name


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Serving, asked: dict[str, Any], field: str) -> None:
    answer = server.post("/v1/messages", {"model": "", "max_tokens": 2, "messages": MESSAGES} | asked)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["message"].startswith(field)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_results_of_tools_are_text_where_the_model_has_no_place_for_them(server: Serving, path: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    asked = {"model": "", "messages": [{"role": "user", "content": [result]}]}
    answer = server.post(path, asked | ({"max_tokens": 2} if path == "/v1/messages" else {}))
    assert answer.status == 200


def test_errors_are_anthropic_s(server: Serving, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        create(client, server, model="claude-0")
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        create(client, server, tools=[{"name": "a b", "input_schema": {"type": "object"}}])
