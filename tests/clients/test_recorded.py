"""What real programs send is answered, whole and streamed, with all of it in the prompt that can be there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.serve.warm import read_warm
from tests.clients.rewriting import FILLER, HEAD, RECORDED, load_requests
from tests.clients.shapes import READERS, read_answer
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.chat_templates import TOOLS
from tests.support.paths import ROOT
from tests.support.scripted_replies import Script
from tests.support.serving import Serving, serving

CONTEXT = 131072
"""The recorded prompts have up to 90,000 characters, and the model one token for each."""
PROMPTS = ("messages", "system", "input", "instructions")
REQUESTS = {
    f"{path.stem}-{at}" if at else path.stem: request
    for path in sorted(RECORDED.glob("*.json"))
    for at, request in enumerate(load_requests(path))
}
POSTED = {
    name: request
    for name, request in REQUESTS.items()
    if request["method"] == "POST" and request["path"].partition("?")[0] in READERS
}
WITH_TOOLS = {name: request for name, request in POSTED.items() if request["body"].get("tools")}
Say = Callable[[str], Script]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model by the name that the recorded requests have, with a template that takes tools."""
    folder = tmp_path_factory.mktemp("recorded")
    checkpoint = write_chat_checkpoint(
        folder / "checkpoint",
        TOOLS,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        intermediate_size=64,
    )
    bundle = convert_bundle(checkpoint, folder / "recorded")
    with serving(load(bundle, threads=1, speculation="off", max_context=CONTEXT)) as running:
        yield running


@pytest.fixture
def say(recorded: Serving, monkeypatch: pytest.MonkeyPatch) -> Say:
    return lambda reply: Script([reply]).put_into(recorded.model, monkeypatch)


def asked(request: dict[str, Any], streamed: bool) -> dict[str, Any]:
    """The request's body for the model that is served."""
    return request["body"] | {"model": "recorded", "stream": streamed}


def answer(server: Serving, request: dict[str, Any], streamed: bool) -> Any:
    """The reply to a recorded request, by its headers and with its shape checked."""
    headers = {name.replace("-", "_"): text for name, text in request["headers"].items()}
    got = server.post(request["path"], asked(request, streamed), **headers)
    assert got.status == 200, got.body
    return read_answer(request["path"], got.body, streamed)


def tools_of(tools: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of functions, those in groups too, and types of tools that only another server could run."""
    functions, others = [], []
    for given in tools:
        kind = given.get("type", "function")
        if kind == "namespace":
            functions += tools_of(given["tools"])[0]
        elif kind == "function":
            functions.append(given.get("function", given)["name"])
        else:
            others.append(kind)
    return functions, others


def texts_of(value: Any, field: str = "") -> Iterator[str]:
    """Texts of messages and instructions, wherever a dialect has them."""
    if isinstance(value, list):
        for each in value:
            yield from texts_of(each, field)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name in ("content", "text", "output"):
                yield from texts_of(each, name)
    elif isinstance(value, str) and value:
        yield value


@pytest.mark.fast(
    "*-streamed", "claude-code-1-whole", "codex-1-whole", "opencode-2-whole", "qwen-code-1-whole"
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", POSTED)
def test_a_recorded_request_is_answered_with_a_text(
    recorded: Serving, say: Say, name: str, streamed: bool
) -> None:
    script = say("Two pears.")
    reply = answer(recorded, POSTED[name], streamed)
    assert (reply.text, reply.calls) == ("Two pears.", [])
    assert reply.ended in ("stop", "end_turn", "completed")
    (prompt,) = script.asked
    body = POSTED[name]["body"]
    texts = [text for field in PROMPTS for text in texts_of(body.get(field))]
    assert texts
    for text in texts:
        is_read = text.strip() in prompt
        assert is_read != text.startswith(HEAD), text[:80]


@pytest.mark.fast("claude-code-1-*", "codex-1-*", "opencode-2-*", "qwen-code-1-streamed")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_recorded_request_is_answered_with_a_call(
    recorded: Serving, say: Say, name: str, streamed: bool
) -> None:
    functions, _ = tools_of(WITH_TOOLS[name]["body"]["tools"])
    arguments = {"path": "/workplace/notes.txt", "words": ["apple", "pear"]}
    script = say(f"<tool_call>\n{json.dumps({'name': functions[-1], 'arguments': arguments})}\n</tool_call>")
    reply = answer(recorded, WITH_TOOLS[name], streamed)
    assert (reply.text.strip(), reply.calls) == ("", [(functions[-1], arguments)])
    assert reply.ended in ("tool_calls", "tool_use", "completed", "stop")
    (prompt,) = script.asked
    for tool in functions:
        assert f'"name": "{tool}"' in prompt


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_tools_that_only_another_server_runs_are_named_in_the_response(
    recorded: Serving, say: Say, streamed: bool
) -> None:
    request = POSTED["codex-1"]
    _, others = tools_of(request["body"]["tools"])
    script = say("Two pears.")
    got = recorded.post(request["path"], asked(request, streamed))
    assert others == ["web_search"]
    assert b"tools of type web_search" in got.body
    assert "web_search" not in script.asked[0]


@pytest.mark.parametrize("name", [name for name in REQUESTS if name not in POSTED])
def test_what_programs_look_up_is_there(recorded: Serving, name: str) -> None:
    request = REQUESTS[name]
    body = request["body"] and request["body"] | {
        field: "recorded:latest" for field in ("model", "name") if field in request["body"]
    }
    got = recorded.request(request["method"], request["path"], body)
    assert got.status == 200
    assert got.json


def test_a_recorded_request_can_be_warmed(recorded: Serving, tmp_path: Path) -> None:
    """As `python -m tests.clients.rewriting` prints it."""
    command = [sys.executable, "-m", "tests.clients.rewriting", str(RECORDED / "claude-code-2.json")]
    file = tmp_path / "request.json"
    file.write_bytes(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    request, posted = read_warm(str(file)), POSTED["claude-code-2"]
    assert request.path == posted["path"].partition("?")[0]
    assert request.body == posted["body"] | {"stream": False}
    counted = recorded.post(f"{request.path}/count_tokens", request.body | {"model": "recorded"})
    assert counted.json["input_tokens"] > 10_000


def test_every_recorded_text_is_filler_or_our_own() -> None:
    """Prompts and descriptions of other programs aren't kept: no long text but fillers."""
    for path in RECORDED.glob("*.json"):
        assert path.stat().st_size < 60_000
        for text in strings_of(json.loads(path.read_text())):
            assert len(text.split()) < 16 or text.startswith("{"), (path.name, text)


def strings_of(value: Any) -> Iterator[str]:
    """All strings in a JSON value but fillers'."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name != FILLER:
                yield from strings_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_of(each)
    elif isinstance(value, str):
        yield value
