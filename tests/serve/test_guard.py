"""Hostile requests get a 4xx in bounded time, the others stay unharmed, and work ends with its client."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.serve import guard
from ondevice.serve.config import MAX_BODY_BYTES, MAX_DEPTH, MAX_HEADER_BYTES, MAX_VALUES, ServeConfig
from tests.support.chat import pause_engine
from tests.support.serving import Answer, Serving, serving, until

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 3,
    "temperature": 0,
}
POSTS = (CHAT, "/v1/completions")


def raw(server: Serving, data: bytes) -> bytes:
    """What comes back first to bytes on a connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        return connection.recv(65536)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a@localhost"]
)
def test_a_host_that_is_not_this_server_s_is_refused(server: Serving, host: str) -> None:
    assert server.request("GET", "/v1/models", Host=host).status in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:8080", "192.168.0.7"])
def test_localhost_and_addresses_are_this_server(server: Serving, host: str) -> None:
    assert server.request("GET", "/health", Host=host).status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "file://"])
def test_pages_of_other_origins_are_refused(server: Serving, origin: str) -> None:
    answer = server.post(CHAT, ASKED, Origin=origin)
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers
    assert server.request("OPTIONS", CHAT, Origin=origin).status == 403


def test_the_server_s_own_pages_may_call_it(server: Serving) -> None:
    assert server.post(CHAT, ASKED, Origin=server.url).status == 200


def test_allowed_names_and_origins_and_the_key(chat_bundle: Path) -> None:
    config = ServeConfig(
        port=0, api_key="secret", allow_host=("my.lan",), allow_origin=("https://chat.example.com",)
    )
    with serving(load(chat_bundle, threads=1, speculation="off"), config) as server:
        assert server.request("GET", "/health", Host="my.lan").status == 200
        origin = {"Origin": "https://chat.example.com"}
        preflight = server.request("OPTIONS", CHAT, **origin)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example.com"
        for given in (
            {},
            {"Authorization": "Bearer wrong"},
            {"x_api_key": "wrong"},
            {"Authorization": "secret"},
        ):
            refused = server.post(CHAT, ASKED, **given)
            assert refused.status == 401
            assert refused.json["error"]["code"] == "invalid_api_key"
        for given in ({"Authorization": "Bearer secret"}, {"x_api_key": "secret"}):
            answer = server.post(CHAT, ASKED, **given, **origin)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert server.request("GET", "/metrics").status == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b'{"messages": "\xff\xfe"}', 400),
        (b'{"a": NaN}', 400),
        (b'{"a": ' + b"9" * 10_000 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, 400),
        (b'{"a": [' + b"1," * (MAX_VALUES + 1) + b"1]}", 400),
        (b'{"a": "' + b"x" * MAX_BODY_BYTES + b'"}', 413),
        (b'{"escaped": "' + b'\\"' * 500_000, 400),
        (b'{"cut off": "' + b'\\"' * 500_000 + b"\\", 400),
        (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', 404),
    ],
    ids=lambda value: value[:12].decode("latin-1") if isinstance(value, bytes) else str(value),
)
def test_bodies_that_are_no_request_are_refused(server: Serving, body: bytes, status: int) -> None:
    for path in POSTS:
        begun = time.monotonic()
        answer = server.post(path, body)
        assert answer.status == status, answer.body
        assert "error" in answer.json
        assert time.monotonic() - begun < 5
    assert server.request("GET", "/health").status == 200


def test_depth_is_counted_outside_strings(server: Serving) -> None:
    deep = {"messages": [{"role": "user", "content": "[" * (MAX_DEPTH + 10) + '\\"{'}]}
    assert server.post(CHAT, ASKED | deep).status == 200


def test_lone_surrogates_are_text_of_a_kind(server: Serving) -> None:
    body = b'{"max_tokens": 2, "messages": [{"role": "user", "content": "a\\ud800b"}]}'
    assert server.post(CHAT, body).status == 200


WRONG: list[Any] = [True, -1, 1.5, 10**40, "\x00", "text", [], [1], [[]], {}, {"a": 1}, [None], 1e300]
FIELDS = {
    CHAT: """messages model temperature top_p top_k min_p repetition_penalty seed stop logit_bias max_tokens n
        max_completion_tokens logprobs top_logprobs stream stream_options tools tool_choice response_format
        frequency_penalty presence_penalty modalities reasoning_effort store audio""",
    "/v1/completions": "prompt model suffix echo best_of logprobs max_tokens n stop stream logit_bias",
}
"""Fields by path, separated by spaces."""


def check_wrong_types(server: Serving, path: str, asked: dict[str, Any], field: str) -> None:
    """Values of every kind in one field: an answer, or a refusal that names the field; never a 5xx."""
    for value in WRONG:
        answer = server.post(path, asked | {field: value})
        assert answer.status in (200, 400, 404), (field, value, answer.body)
        if answer.status != 200:
            assert field in answer.body.decode(), (field, value, answer.body)


@pytest.mark.parametrize("path", FIELDS)
def test_wrong_types_in_every_field_are_refused_by_name(server: Serving, path: str) -> None:
    asked = ASKED if path == CHAT else {"prompt": "x", "max_tokens": 2}
    for field in FIELDS[path].split():
        check_wrong_types(server, path, asked, field)


@pytest.mark.parametrize("value", [*WRONG, None, "assistant\nsystem"])
def test_wrong_types_in_messages_are_refused(server: Serving, value: Any) -> None:
    for message in ({"role": value, "content": "x"}, {"role": "user", "content": value}, value):
        answer = server.post(CHAT, ASKED | {"messages": [message]})
        is_text = isinstance(message, dict) and (isinstance(value, str) or value == [])
        assert answer.status == 400 or (is_text and answer.status == 200), answer.body


@pytest.mark.parametrize(
    "path", ["/v1/../v1/models", "/%2e%2e/etc/passwd", "/v1/models/../../etc/passwd", "//health", "/nope"]
)
def test_path_tricks_find_nothing(server: Serving, path: str) -> None:
    assert server.request("GET", path).status == 404


def test_wrong_methods_are_refused(server: Serving) -> None:
    assert server.request("GET", CHAT).status == 405
    assert server.request("DELETE", "/v1/models").status == 405


def test_requests_that_are_not_http_are_refused(server: Serving) -> None:
    assert b" 400 " in raw(server, b"\x16\x03\x01\x00\xff hello\r\n\r\n")
    huge = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"
    assert b" 400 " in raw(server, huge) or b" 431 " in raw(server, huge)
    upgrade = b"GET /v1 HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert b" 404 " in raw(server, upgrade)


def test_a_body_that_does_not_come_is_given_up(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(
            b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        assert b" 408 " in connection.recv(65536)


def post_head(length: int, *headers: str) -> bytes:
    """A request's beginning."""
    lines = (f"POST {CHAT} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *headers)
    return "\r\n".join((*lines, "", "")).encode()


def test_a_body_that_stalls_is_given_up_at_once(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "STALL_SECONDS", 0.3)
    begun = time.monotonic()
    assert b" 408 " in raw(server, post_head(9) + b"{")
    assert time.monotonic() - begun < 5


def test_large_bodies_that_do_not_end_keep_no_small_one_out(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them fill what large bodies may hold together; the rest of them is never sent."""
    monkeypatch.setattr(guard, "STALL_SECONDS", 30.0)
    read, taken = guard.Guard._body, list[int]()

    async def counted(own: Any, scope: Any, receive: Any, exchange: Any) -> bytes:
        async def counting() -> Any:
            message = await receive()
            taken.append(len(message.get("body", b"")))
            return message

        return await read(own, scope, counting, exchange)

    monkeypatch.setattr(guard.Guard, "_body", counted)
    missing, large = 60, b" " * (MAX_BODY_BYTES // 2)
    small = ASKED | {"user": "u" * 1000}
    slow = post_head(MAX_BODY_BYTES) + b" " * (MAX_BODY_BYTES - missing)
    with ExitStack() as stack:
        for _ in range(2):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            stack.enter_context(connection).sendall(slow)
        until(lambda: sum(taken) == 2 * (MAX_BODY_BYTES - missing))
        assert server.post(CHAT, large).status == 503
        for _ in range(3):
            assert server.post(CHAT, small).status == 200
        assert server.post(CHAT, large).status == 503
    # They have gone, and it is no JSON.
    until(lambda: server.post(CHAT, large).status == 400)


def test_headers_have_a_bound(server: Serving) -> None:
    for status, nbytes in ((200, MAX_HEADER_BYTES - 1000), (431, MAX_HEADER_BYTES)):
        assert server.request("GET", "/health", X="a" * nbytes).status == status
        assert server.request("GET", "/health?" + "a" * nbytes).status == status


def begin_stream(server: Serving, stream: bool = True, address: str = "127.0.0.1") -> socket.socket:
    """A connection on which an answer was asked for that takes long. address: where it comes from."""
    body = json.dumps(ASKED | {"stream": stream, "max_tokens": 200}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), 20, source_address=(address, 0))
    connection.sendall(post_head(len(body)) + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_the_model(
    server: Serving, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with monkeypatch.context() as patch:
        made = pause_engine(server.model, patch)
        cancelled = server.metric('generations_total{reason="cancelled"}')
        with begin_stream(server, stream):
            until(lambda: len(made) == 2)
        # The paused engine ends only once it is cancelled, or after 20 seconds.
        begun = time.monotonic()
        until(lambda: server.metric("running_requests") == 0)
        assert time.monotonic() - begun < 10
        assert server.metric('generations_total{reason="cancelled"}') == cancelled + 1
    assert server.post(CHAT, ASKED).status == 200


def test_waiting_requests_are_bounded_and_leave_the_queue_with_their_client(
    chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig(port=0, queue=1)
    with serving(load(chat_bundle, threads=1, speculation="off"), config) as server:
        expected = server.post(CHAT, ASKED).json["choices"]
        with monkeypatch.context() as patch:
            made = pause_engine(server.model, patch)
            with begin_stream(server):
                until(lambda: len(made) == 2)
                with begin_stream(server):
                    until(lambda: server.metric("waiting_requests") == 1)
                    refused = server.post(CHAT, ASKED)
                    assert refused.status == 429
                    assert refused.headers["retry-after"] == "1"
                until(lambda: server.metric("waiting_requests") == 0)
                answers: list[Answer] = []
                patient = threading.Thread(target=lambda: answers.append(server.post(CHAT, ASKED)))
                patient.start()
                until(lambda: server.metric("waiting_requests") == 1)
                patch.undo()
            patient.join(20)
        assert answers[0].json["choices"] == expected


def test_a_full_queue_has_a_place_for_another_client(
    chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(load(chat_bundle, threads=1, speculation="off"), ServeConfig(port=0, queue=1)) as server:
        made = pause_engine(server.model, monkeypatch)
        with begin_stream(server), ExitStack() as others:
            until(lambda: len(made) == 2)
            others.enter_context(begin_stream(server))
            until(lambda: server.metric("waiting_requests") == 1)
            assert server.post(CHAT, ASKED).status == 429
            try:
                others.enter_context(begin_stream(server, address="127.0.0.2"))
            except OSError:
                pytest.skip("this machine has one local address")
            until(lambda: server.metric("waiting_requests") == 2)
            # As many again is the bound.
            third = others.enter_context(begin_stream(server, address="127.0.0.3"))
            assert b" 429 " in third.recv(65536)


def test_a_client_that_does_not_read_delays_no_other(server: Serving) -> None:
    """Its text is made and kept, and the next request has its turn."""
    with begin_stream(server):
        until(lambda: server.metric("running_requests") == 0)
        assert server.post(CHAT, ASKED).status == 200


def test_stopping_ends_what_runs_and_closes_the_model(
    chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ondevice.errors import OndeviceError
    from ondevice.serve import server as server_module

    monkeypatch.setattr(server_module, "STOP_SECONDS", 1)
    model = load(chat_bundle, threads=1, speculation="off")
    with serving(model) as server:
        made = pause_engine(model, monkeypatch)
        connection = begin_stream(server)
        until(lambda: len(made) == 2)
    connection.close()
    with pytest.raises(OndeviceError, match="closed"):
        model.generate("x")
