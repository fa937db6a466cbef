"""The scripted server speaks every dialect completely, and the relay changes nothing."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.recorder import DONE, Recorder
from tests.clients.relay import relaying
from tests.clients.rewriting import PLAIN_PATH, RECORDED, Rewriter, expanded, load_requests
from tests.clients.shapes import read_answer

TURNS = ("claude-code-{}", "codex-{}", "qwen-code-{}")


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[tuple[Recorder, str]]:
    with Recorder(tmp_path, Path(PLAIN_PATH)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def answer(url: str, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as got:
        return bytes(got.read())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("turns", TURNS)
def test_a_task_is_two_calls_and_a_sentence(
    recorder: tuple[Recorder, str], turns: str, streamed: bool
) -> None:
    called, texts = [], []
    with relaying(recorder[1]) as relay:
        for at in (1, 2, 3):
            (request,) = load_requests(RECORDED / f"{turns.format(at)}.json", share=0.01)
            body = request["body"] | {"stream": streamed}
            direct = read_answer(request["path"], answer(recorder[1], request["path"], body), streamed)
            assert read_answer(request["path"], answer(relay.url, request["path"], body), streamed) == direct
            called.append([json.dumps(arguments) for _, arguments in direct.calls])
            texts.append(direct.text)
        exchanges = relay.exchanges()
    assert [len(calls) for calls in called] == [1, 1, 0]
    assert "notes.txt" in called[0][0]
    assert "pear" in called[1][0]
    assert texts == ["", "", DONE]
    assert [(each.status, each.complete, each.streamed) for each in exchanges] == [(200, True, streamed)] * 3


def test_what_a_program_sends_is_kept_without_what_is_others() -> None:
    secret = "Written by somebody else, in /home/person/work, on the 3rd of May."
    raw = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": {"user-agent": "program/1.0 (Linux; x64)", "cookie": "c", "accept": "*/*"},
        "body": {
            "messages": [{"role": "system", "content": secret}, {"role": "user", "content": secret}],
            "tools": [{"type": "function", "function": {"name": "read", "description": secret + secret}}],
            "user": "0a1b2c3d-0000-4000-8000-0123456789ab",
            "file": "/home/person/work/notes.txt",
        },
    }
    made = Rewriter("program 1.0", "/home/person/work").request(raw)
    assert made["headers"] == {"user-agent": "program/1.0", "accept": "*/*"}
    body = expanded(made["body"])
    assert (body["user"], body["file"]) == ("00000000-0000-4000-8000-000000000000", "/workplace/notes.txt")
    first, second = body["messages"]
    assert (first["role"], second["role"]) == ("system", "user")
    assert first["content"] == second["content"]
    assert len(first["content"]) == len(secret) + len(PLAIN_PATH) - len("/home/person/work")
    assert body["tools"][0]["function"]["name"] == "read"
    assert "somebody" not in json.dumps(made)
