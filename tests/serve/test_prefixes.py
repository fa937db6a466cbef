"""What requests share of their prompts is read once: in each dialect, after edits, and when clients leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.errors import UsageError
from ondevice.model.sequence_state import common_prefix
from ondevice.serve.config import ServeConfig
from ondevice.serve.warm import read_warm
from tests.support.serving import Serving, serving, until

SYSTEM = "You answer in few words, and only with what is true. "
BILLING = "x-anthropic-billing-header: cc_version=2.1.44; cc_entrypoint=cli; cch={};"
TOOL = {"name": "read", "description": "Read a file.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Serving]:
    with serving(load(chat_bundle, threads=1, speculation="off", dram_budget="2GB")) as running:
        yield running


def chat(server: Serving, *texts: str, system: str = SYSTEM) -> Any:
    """The answer to a conversation, in which the user speaks first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {
        "messages": [{"role": "system", "content": system}, *messages],
        "max_tokens": 6,
        "temperature": 0,
    }
    return server.post("/v1/chat/completions", body).json


def kept(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def ids(server: Serving, *texts: str) -> list[int]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return server.model.chat_ids([{"role": "system", "content": SYSTEM}, *messages])


def test_an_edit_and_another_conversation_share_what_stands_before(server: Serving) -> None:
    server.model.drop_prefixes()
    told = [
        ("Who wrote it?", "She did.", "And when, do you think?"),
        ("Who wrote it?", "He did.", "And when?"),
    ]
    told.append(("Which of them is the best one?",))
    expected = []
    for texts in told:
        server.model.drop_prefixes()
        answer = chat(server, *texts)
        assert kept(answer) == 0
        expected.append(answer["choices"])
    server.model.drop_prefixes()
    before: list[list[int]] = []
    for texts, choices in zip(told, expected, strict=True):
        prompt = ids(server, *texts)
        answer = chat(server, *texts)
        assert answer["choices"] == choices
        most = max((common_prefix(prompt, other) for other in before), default=0)
        assert most <= kept(answer) < most + 8
        before.append(prompt)
    # The first one is still there: the others have copies of its beginning.
    assert kept(chat(server, *told[0])) == len(before[0]) - 1


def test_a_request_that_is_left_and_repeated_is_read_once(
    chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(load(chat_bundle, threads=1, speculation="off", prefill_chunk=4)) as server:
        passes, rows = server.model._engine._generator.passes, 0
        before = passes._before_pass

        def slow(batch: Any) -> None:
            nonlocal rows
            rows += len(batch.tokens)
            time.sleep(0.02)
            before(batch)

        monkeypatch.setattr(passes, "_before_pass", slow)
        body = {"messages": [{"role": "user", "content": "word " * 30}], "max_tokens": 1, "temperature": 0}
        connection = server.connection()
        connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}).encode())
        until(lambda: rows >= 40)
        connection.close()
        until(lambda: server.metric("running_requests") == 0)
        answer = server.post("/v1/chat/completions", body).json
        assert 36 <= kept(answer) < answer["usage"]["prompt_tokens"] - 20
        # The pass that was under way when the client went may be lost.
        assert rows <= answer["usage"]["prompt_tokens"] + 4


def test_completions_share_their_beginnings_unless_told_otherwise(server: Serving) -> None:
    text = "It was a long way home, and nobody had thought of the rain. "
    server.model.drop_prefixes()

    def complete(prompt: str, **options: Any) -> Any:
        return server.post("/completion", {"prompt": prompt, "n_predict": 4, **options}).json

    first = complete(text + "So")
    assert first["timings"]["cache_n"] == 0
    count = len(server.model.prompt_ids(text))
    assert count <= complete(text + "But")["timings"]["cache_n"] <= count + 1
    again, alone = complete(text + "So"), complete(text + "So", cache_prompt=False)
    assert again["timings"]["cache_n"] == len(server.model.prompt_ids(text + "So")) - 1
    assert alone["timings"]["cache_n"] == 0
    assert first["content"] == again["content"] == alone["content"]
    openai = server.post("/v1/completions", {"prompt": text + "And", "max_tokens": 4}).json
    assert openai["usage"]["prompt_tokens_details"]["cached_tokens"] >= count
    server.model.drop_prefixes()
    complete(text, cache_prompt=False)
    assert server.model.state_bytes == 0


def test_what_changes_at_the_head_of_claude_code_s_prompt_is_not_read(server: Serving) -> None:
    def create(*blocks: str) -> Any:
        system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in blocks]
        body = {"system": system, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        return server.post("/v1/messages", body).json["usage"]

    plain, first, again = create(SYSTEM), create(BILLING.format(1), SYSTEM), create(BILLING.format(2), SYSTEM)
    assert sum(plain.values()) == sum(first.values()) == sum(again.values())
    assert again["input_tokens"] == 1
    for number in range(2):
        said = {"role": "system", "content": f"{BILLING.format(number)}\n{SYSTEM}"}
        body = {"messages": [said, {"role": "user", "content": "Hi"}], "max_tokens": 1}
        usage = server.post("/v1/messages", body).json["usage"]
        assert (sum(usage.values()), usage["input_tokens"]) == (sum(again.values()), 1)
    # Only a system text's head is: what the user says is read.
    said = {"messages": [{"role": "user", "content": BILLING.format(3)}]}
    counted = server.post("/v1/messages/count_tokens", said).json["input_tokens"]
    assert counted > len(BILLING)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"path": "/v1/messages?beta=true", "body": {"messages": []}}, "/v1/messages"),
        ({"url": "http://localhost:1/api/chat", "body": json.dumps({"messages": []})}, "/api/chat"),
        ({"system": "Be brief.", "tools": [TOOL]}, "/v1/messages"),
        ({"messages": [], "tools": [TOOL]}, "/v1/messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "/v1/chat/completions"),
        ({"messages": [], "options": {"num_ctx": 4096}}, "/api/chat"),
        ({"instructions": "Be brief.", "tools": []}, "/v1/responses"),
        ({"prompt": "x", "n_predict": 4}, "/completion"),
        ({"prompt": "x", "system": "y"}, "/api/generate"),
        ({"prompt": "x"}, "/v1/completions"),
    ],
)
def test_a_recorded_request_s_dialect_is_recognised(tmp_path: Path, body: Any, path: str) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(body))
    request = read_warm(str(file))
    assert request.path == path
    said = request.body.get("messages" if "messages" in request.body else "input")
    assert said is None or said[-1]["role"] == "user"
    assert request.body["stream"] is False


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"model": "x"}', b'{"body": 3}', b"[" * 100_000])
def test_a_file_without_a_request_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "request.json"
    with pytest.raises(UsageError, match=r"request\.json can't be read"):
        read_warm(str(file))
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"request\.json"):
        read_warm(str(file))


def test_prompts_are_read_as_the_server_starts(chat_bundle: Path, tmp_path: Path) -> None:
    body = {"system": SYSTEM, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    body |= {"temperature": 0}
    files = []
    for name, recorded in (
        ("alone", {"system": SYSTEM}),
        ("refused", {"path": "/v1/nothing", "body": body}),
        ("recorded", {"path": "/v1/messages", "body": body | {"model": "claude-x", "stream": True}}),
    ):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(recorded))
    with serving(load(chat_bundle, threads=1, speculation="off")) as server:
        expected = server.post("/v1/messages", body).json
        assert expected["usage"]["cache_read_input_tokens"] == 0
    config = ServeConfig(port=0, warm=tuple(map(str, files)))
    with serving(load(chat_bundle, threads=1, speculation="off"), config) as server:
        until(lambda: server.metric("generations_total") == 2)
        answer = server.post("/v1/messages", body).json
        other = server.post("/v1/messages", body | {"messages": [{"role": "user", "content": "Bye"}]}).json
        assert server.metric("generated_tokens_total") == 2 * 4
    assert answer["content"] == expected["content"]
    assert answer["usage"]["input_tokens"] == 1
    assert other["usage"]["cache_read_input_tokens"] >= len(SYSTEM)
