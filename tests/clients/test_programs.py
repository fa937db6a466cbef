"""The real programs against a real server: `make test-clients`.

AGENT_MODEL of the environment is the model of agents. What each of them did is a line of
build/clients/results.jsonl, of which `python -m tests.clients.results` makes the tables of docs/serve.md.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

import ondevice
from tests.clients.agents import AGENTS, start_agent
from tests.clients.chats import CHATS
from tests.clients.process import Served, served
from tests.clients.programs import PROGRAMS, start_chat
from tests.clients.relay import Exchange, relaying
from tests.clients.results import is_right, tell
from tests.clients.rewriting import RECORDED, load_requests
from tests.clients.shapes import READERS, Reply, read_answer
from tests.support.real_models import real_model

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(3600)]

AGENT_MODEL = os.environ.get("AGENT_MODEL", "qwen2.5-coder-1.5b")
CHAT_MODEL = "smollm2"
CONTEXT = 24576
BUDGET = "4GB"
AGENT_SECONDS = 1500
NEW_TOKENS = 300
"""Most tokens of a second turn that the server may have to read."""


def converted(name: str, folder: Path) -> Path:
    """The bundle of a real model. Skips where its file is absent."""
    return ondevice.convert(real_model(name), folder / name)


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The agents' model with a context that their prompts fit, in 4 GB."""
    folder = tmp_path_factory.mktemp("agents")
    options = ("--dram-budget", BUDGET, "--max-context", CONTEXT)
    with served(converted(AGENT_MODEL, folder), folder / "log.jsonl", *options) as running:
        yield running


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 with its own context, for one text at a time, so that a second one has to wait."""
    folder = tmp_path_factory.mktemp("chats")
    options = ("--dram-budget", "1GB", "--parallel", 1)
    with served(converted(CHAT_MODEL, folder), folder / "log.jsonl", *options) as running:
        yield running


def installed(name: str) -> None:
    """Skips where the program isn't installed."""
    if PROGRAMS[name].path is None:
        pytest.skip(f"{name} isn't installed: python -m tests.clients.install {name}")


def finished(process: subprocess.Popen[str], seconds: float) -> int:
    """The exit status of a program, which is ended after so many seconds: -1 then."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return -1


def generations(exchanges: list[Exchange]) -> list[Exchange]:
    """All generations, each of which the server ended as its dialect has it.

    What a program left and asked again is told by its last request.
    """
    asked = [each for each in exchanges if each.path.partition("?")[0] in READERS]
    again = [any(later.asked == each.asked for later in asked[at:]) for at, each in enumerate(asked, 1)]
    asked = [each for each, is_left in zip(asked, again, strict=True) if each.complete or not is_left]
    for each in asked:
        assert each.status == 200, each.body.decode(errors="replace")[:500]
        assert each.complete
    return asked


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_does_one_task_or_its_model_fails(name: str, agents_server: Served, tmp_path: Path) -> None:
    """The server answers all that it asks, and reads little for each turn behind the first."""
    installed(name)
    begun = time.monotonic()
    with relaying(agents_server.url) as relay:
        process = start_agent(name, tmp_path / "run", relay.url, AGENT_MODEL, CONTEXT)
        code = finished(process, AGENT_SECONDS)
        exchanges = relay.exchanges()
    notes = (tmp_path / "run" / "workplace" / "notes.txt").read_text()
    asked = generations(exchanges)
    said = [read_answer(each.path, each.body, each.streamed) for each in asked]
    transcript = (tmp_path / "run" / "transcript.txt").read_text()
    tell(
        client=name,
        version=PROGRAMS[name].version,
        model=AGENT_MODEL,
        exit=code,
        done="pear" in notes and "apple" not in notes,
        turns=[{"prompt": each.prompt_tokens, "new": each.new_tokens, "calls": each.calls} for each in said],
        last_words=said[-1].text[-300:] if said else "",
        seconds=round(time.monotonic() - begun, 1),
    )
    assert said, transcript[-2000:]
    # Other requests than the task's turns: a title has a short prompt, a summary is wanted without tools.
    longest = max(range(len(said)), key=lambda index: said[index].prompt_tokens)
    most, tools = said[longest].prompt_tokens, asked[longest].asked.get("tools")
    turns = [
        reply.new_tokens
        for each, reply in zip(asked, said, strict=True)
        if reply.prompt_tokens > most / 2 and each.asked.get("tools") == tools
    ]
    assert max(turns[1:2], default=0) < NEW_TOKENS
    # It came to its end: where the task isn't done, the model was given the chance.
    assert code != -1


def post(server: Served, request: dict[str, Any], most: int) -> tuple[http.client.HTTPConnection, float]:
    """Send a recorded request for `most` tokens; the connection, and when it was sent."""
    body = request["body"] | {"model": AGENT_MODEL, "stream": True, "temperature": 0}
    body["max_output_tokens" if request["path"] == "/v1/responses" else "max_tokens"] = most
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=AGENT_SECONDS)
    connection.request("POST", request["path"], json.dumps(body), request["headers"])
    return connection, time.monotonic()


def answered(server: Served, request: dict[str, Any], most: int = 8) -> tuple[Reply, float]:
    """The reply to a recorded request, and the seconds it took."""
    connection, begun = post(server, request, most)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body[:500]
    return read_answer(request["path"], body, True), time.monotonic() - begun


READING = re.compile(rb": reading (\d+)/")


def abandoned(server: Served, request: dict[str, Any], seconds: float) -> tuple[int, float]:
    """Tokens of a recorded request's prompt that were told as read, and the seconds until its client left.

    seconds: when it leaves, at the next thing that it hears.
    """
    connection, begun = post(server, request, 8)
    answer, read_tokens = connection.getresponse(), 0
    while time.monotonic() - begun < seconds and (line := answer.readline()):
        if told := READING.match(line):
            read_tokens = int(told[1])
    connection.close()
    return read_tokens, time.monotonic() - begun


FIRST_TURNS = {"claude-code": 1, "codex": 1, "opencode": 2, "qwen-code": 1}
"""Numbers of the recorded requests that begin the task."""


@pytest.mark.parametrize("name", FIRST_TURNS)
def test_what_an_abandoned_request_read_is_kept_and_a_second_turn_reads_little(
    name: str, agents_server: Served
) -> None:
    first, second = (load_requests(RECORDED / f"{name}-{FIRST_TURNS[name] + at}.json")[0] for at in range(2))
    # Another beginning than that of the agent's own run, so that nothing of it is kept yet.
    for request in (first, second):
        field = next(
            field for field in ("system", "instructions", "messages", "input") if field in request["body"]
        )
        request["body"][field] = begun_anew(request["body"][field], f"Abandoned once, by {name}.")
    before = agents_server.computed_tokens()
    read_tokens, waited = abandoned(agents_server, first, 20)
    reply, seconds = answered(agents_server, first)
    computed = read_tokens + agents_server.computed_tokens() - before
    again, _ = answered(agents_server, second)
    tell(
        client=name,
        model=AGENT_MODEL,
        abandoned_after=round(waited, 1),
        prompt=reply.prompt_tokens,
        new=reply.new_tokens,
        seconds=round(seconds, 1),
        second_turn=again.new_tokens,
        computed=computed,
    )
    speed = reply.new_tokens / seconds
    # Both together read one prompt, and again what passes of a second may have held when the first one left.
    assert computed <= reply.prompt_tokens + speed
    assert reply.cached_tokens > 0.5 * min(waited * speed, reply.prompt_tokens)
    assert again.new_tokens < NEW_TOKENS


def begun_anew(value: Any, words: str) -> Any:
    """Text, blocks or messages that begin with other words."""
    if isinstance(value, str):
        return f"{words} {value}"
    first = dict(value[0])
    field = "text" if "text" in first else "content"
    first[field] = begun_anew(first[field], words)
    return [first, *value[1:]]


FEATURES = [(name, feature) for name, client in CHATS.items() for feature in client.features]


@pytest.mark.parametrize(("name", "feature"), FEATURES, ids=map("-".join, FEATURES))
def test_a_client_has_a_feature(name: str, feature: str, chat_server: Served, tmp_path: Path) -> None:
    """In every dialect that it speaks, by its API for it. What is streamed is the answer that isn't."""
    installed(name)
    client, begun = CHATS[name], time.monotonic()
    with relaying(chat_server.url) as relay:
        process = start_chat(name, tmp_path / "run", relay.url, CHAT_MODEL, feature)
        code = finished(process, 300)
        exchanges = relay.exchanges()
    transcript = (tmp_path / "run" / "transcript.txt").read_text()
    outcomes = json.loads(transcript.splitlines()[-1])[feature] if code == 0 else {}
    wrong = [dialect for dialect, it in outcomes.items() if not is_right(client, feature, dialect, it)]
    unpinged = feature == "pings" and sum(map(is_pinged, exchanges)) < len(outcomes)
    passed = code == 0 and not wrong and not unpinged
    seconds = round(time.monotonic() - begun, 1)
    facts = {"version": PROGRAMS[name].version, "model": CHAT_MODEL, "outcomes": outcomes}
    tell(client=name, feature=feature, passed=passed, seconds=seconds, **facts)
    assert passed, (wrong, unpinged, outcomes, transcript[-2000:])


def is_pinged(exchange: Exchange) -> bool:
    """Whether a stream said that the server was at work before it had anything to tell."""
    if exchange.path.startswith("/api/"):
        first = json.loads(next(iter(exchange.body.splitlines()), b"{}"))
        return first.get("done") is False and not first.get("message", first).get("content")
    return b": working" in exchange.body or b"event: ping" in exchange.body
