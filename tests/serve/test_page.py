"""The page's files and endpoints: what they hold, what they let in, and the state that they tell."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.serve import protocol
from ondevice.serve.config import STOP_SECONDS, ServeConfig
from ondevice.serve.page import routes
from ondevice.serve.page.live import shown
from tests.support.bundles import EOS
from tests.support.chat import slow_down
from tests.support.serving import Serving, serving, until

FILES = sorted(routes.OPEN_PATHS)
CHAT = "/v1/chat/completions"
MAX_PAGE_BYTES = 100_000
"""Weight of all files as they are sent; half of it is room."""
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@contextmanager
def following(server: Serving, **headers: str) -> Iterator[Iterator[Any]]:
    """The states of `/page/live`, as they come."""
    connection = server.connection()
    try:
        connection.request("GET", "/page/live", headers={k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        assert response.status == 200
        # A part of the answer is an event: reading line by line waits for the next part.
        yield (json.loads(part[6:]) for part in iter(lambda: response.read1(1 << 20), b""))
    finally:
        connection.close()


def test_the_page_has_its_script_and_style(server: Serving) -> None:
    assert {"/", "/page/app.js", "/page/style.css"} < set(FILES)


def test_the_files_are_kept_by_browsers_and_weigh_little(server: Serving) -> None:
    nbytes = 0
    for path in FILES:
        plain = server.request("GET", path)
        answer = server.request("GET", path, accept_encoding="gzip, br")
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.body) == plain.body
        nbytes += len(answer.body)
        known = server.request("GET", path, if_none_match=answer.headers["etag"])
        assert (known.status, known.body) == (304, b"")
        assert "default-src 'none'" in known.headers["content-security-policy"]
        assert server.request("GET", path, if_none_match='W/"other"').status == 200
    assert nbytes < MAX_PAGE_BYTES


@pytest.mark.parametrize("path", FILES)
def test_files_allow_nothing_from_elsewhere_and_nothing_inline(server: Serving, path: str) -> None:
    answer = server.request("GET", path)
    policy = answer.headers["content-security-policy"]
    assert answer.status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"].partition(";")[0] in {
        "text/html",
        "text/css",
        "text/javascript",
        "image/svg+xml",
    }
    text = answer.body.decode()
    sources = re.findall(r"""(?:src|href)="([^"]*)"|from "([^"]*)"|url\(([^)]*)\)""", text)
    assert all(it.startswith(("/page/", "./", "#")) for found in sources for it in found if it)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"<[^>]* (?:on\w+|style)=", text)


def test_every_file_that_others_name_is_there(server: Serving) -> None:
    for path in FILES:
        text = server.request("GET", path).body.decode()
        for name in re.findall(r'(?:"/page/|from "\./)([\w.]+\.(?:js|css|svg))"', text):
            assert f"/page/{name}" in FILES


@pytest.mark.parametrize(
    "path", ["/page/routes.py", "/page/", "/page/../routes.py", "/page/%2e%2e/app.py", "/page/x.js"]
)
def test_nothing_else_of_the_folder_is_served(server: Serving, path: str) -> None:
    assert server.request("GET", path).status == 404


def test_with_a_key_the_files_are_open_and_the_rest_is_not(chat_bundle: Path) -> None:
    config = ServeConfig(port=0, api_key="secret", allow_origin=("https://chat.example.com",))
    with serving(load(chat_bundle, threads=1, speculation="off"), config) as server:
        body = {"budget_bytes": server.model.plan.full_bytes}
        for path in FILES:
            assert server.request("GET", path).status == 200
        assert server.request("GET", "/page/live").status == 401
        assert server.post("/page/budget", body).status == 401
        assert server.post("/page/budget", body, x_api_key="secret").status == 200
        # Other origins may chat, but not change the server.
        for origin, status in (("https://chat.example.com", 403), (server.url, 200)):
            assert server.post("/page/budget", body, x_api_key="secret", Origin=origin).status == status
        with following(server, x_api_key="secret") as states:
            assert next(states)["loaded"] == server.model.name


def test_models_tell_their_context_what_is_recommended_and_what_they_can(server: Serving) -> None:
    with following(server) as states:
        told = next(states)["models"][server.model.name]
    assert told["context"] == server.model.plan.max_context
    assert told["sampling"] == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert told["abilities"] == []


def test_drafts_are_told_as_replies_end() -> None:
    question = {"role": "user", "content": "Find me a restaurant in San Jose."}
    with serving(load(threads=1)) as server, following(server) as states:
        assert next(states)["draft_tokens"] == 0
        server.post(CHAT, {"messages": [question], "temperature": 0})
        state = next(state for state, _ in zip(states, range(20), strict=False) if state["draft_tokens"])
        lines = server.request("GET", "/metrics").body.decode().splitlines()
        for name, metric in (("draft_tokens", "draft"), ("accepted_tokens", "accepted")):
            assert f"llamacpp:spec_decode_num_{metric}_tokens_total {state[name]}" in lines


def test_the_budget_changes_at_once_and_says_so() -> None:
    """Of the model that ships, as the others are so small that all budgets hold them whole."""
    with serving(load(threads=1)) as server, following(server) as states:
        before = next(states)["plan"]
        assert before["least_bytes"] < before["full_bytes"] == before["budget_bytes"]
        wanted = before["full_bytes"] - 1
        answer = server.post("/page/budget", {"budget_bytes": wanted})
        assert answer.json["plan"]["budget_bytes"] == wanted
        assert server.model.plan.budget_bytes == wanted
        assert next(states)["plan"]["budget_bytes"] == wanted


def test_other_models_are_a_part_of_their_own_and_no_part_of_the_least(server: Serving) -> None:
    alone, others = server.model.plan, 300_000_000
    beside = replace(alone, others_bytes=others, budget_bytes=alone.budget_bytes + others)
    before, after = shown(alone, alone), shown(beside, beside)
    assert after["parts"] == [*before["parts"], {"name": "Other models", "bytes": others}]
    assert after["least_bytes"] == before["least_bytes"] == alone.minimum_budget_bytes


@pytest.mark.parametrize("value", [None, True, -1, 0, 1, 1.5, "1GB", [], {}, 10**40])
def test_a_budget_that_cannot_be_is_refused_and_changes_nothing(server: Serving, value: Any) -> None:
    before = server.model.plan
    answer = server.post("/page/budget", {"budget_bytes": value})
    assert answer.status == 400
    assert "budget" in answer.json["error"]["message"]
    assert server.model.plan == before


def test_a_budget_below_the_least_names_what_would_do(server: Serving) -> None:
    answer = server.post("/page/budget", {"budget_bytes": server.model.plan.least_budget_bytes - 2_000_000})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "budget_bytes"
    assert answer.json["error"]["code"] == "budget_exceeded"


def test_tokens_are_told_while_a_reply_is_made(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: server.metric("running_requests") == 0)
    endless = ASKED | {"stream": True, "max_tokens": 200, "temperature": 0, "logit_bias": {str(EOS): -100}}
    with monkeypatch.context() as patch, following(server) as states:
        # A first state may be one that was read before, while an earlier request ran.
        before = next(state for state in states if not state["running"])
        # 20 seconds of text, of which the test needs one.
        slow_down(server.model, patch, 0.1)
        connection = server.connection()
        connection.request("POST", CHAT, json.dumps(endless))
        for _ in range(2):
            state = next(states)
            while state["generated_tokens"] < before["generated_tokens"] + 2:
                state = next(states)
            assert state["running"] == 1
            before = state
        connection.close()
    until(lambda: server.metric("running_requests") == 0)


def test_a_page_that_follows_does_not_delay_the_end(chat_bundle: Path) -> None:
    with ExitStack() as running:
        server = running.enter_context(serving(load(chat_bundle, threads=1, speculation="off")))
        with following(server) as states:
            next(states)
            begun = time.monotonic()
            running.close()
            assert time.monotonic() - begun < STOP_SECONDS - 1


def test_followers_are_bounded(server: Serving) -> None:
    with ExitStack() as watching:
        for _ in range(routes.MAX_WATCHERS):
            next(watching.enter_context(following(server)))
        assert server.request("GET", "/page/live").status == 503
    until(lambda: server.request("HEAD", "/page/live").status == 200)


def trickle(connection: socket.socket, head: bytes, seconds: float) -> None:
    """Send headers byte by byte, which never end. Raises ConnectionError once the server has closed."""
    end, sent = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        connection.sendall(head[sent : sent + 1])
        sent = min(sent + 1, len(head) - 1)
        time.sleep(0.02)


def test_headers_that_do_not_come_are_given_up(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first request of a connection nor a later one may take for ever, byte by byte."""
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.4)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for before in (b"", head + b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(before)
            assert not before or connection.recv(65536).startswith(b"HTTP/1.1 200")
            begun = time.monotonic()
            with pytest.raises(ConnectionError):
                trickle(connection, head, 8)
            assert time.monotonic() - begun < 6
    assert server.request("GET", "/health").status == 200
