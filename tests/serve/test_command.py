"""`ondevice serve` as a process of its own: it says where it listens, answers, and stops on a signal."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.commands import serve as command
from ondevice.serve.metrics import log_event
from tests.support.bundles import EOS
from tests.support.command_line import Run
from tests.support.paths import ROOT


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and where it listens."""
    started = [sys.executable, "-m", "ondevice", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(started, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        plan, *_ = events = list(_until_listening(map(json.loads, lines)))
        assert (plan["event"], plan["model"]) == ("plan", Path(arguments[0]).name)  # type: ignore[arg-type]
        assert plan["plan"]["total_bytes"] <= plan["plan"]["budget_bytes"]
        yield process, events[-1]["url"]
    finally:
        process.kill()
        process.wait()


def _until_listening(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first events of the log, up to the one that says where the server listens."""
    for event in events:
        yield event
        if event["event"] == "listening":
            return


def asked(url: str, context: ssl.SSLContext | None = None) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}).encode()
    with urllib.request.urlopen(f"{url}/v1/chat/completions", body, 60, context=context) as answer:
        return json.load(answer)


@pytest.mark.fast("2-130")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_answers_and_stops_on_a_signal(chat_bundle: Path, number: int, code: int) -> None:
    with serving(chat_bundle, "--threads", 1) as (process, url):
        assert asked(url)["model"] == chat_bundle.name
        process.send_signal(number)
        assert process.wait(20) == code


def test_a_second_signal_ends_it_at_once(chat_bundle: Path) -> None:
    """The first one waits for a request whose body is still to come."""
    with serving(chat_bundle, "--threads", 1) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 100\r\n\r\n"
            connection.sendall(head.encode() + b"{")
            # A second request is answered once the first has been taken.
            asked(url)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == -signal.SIGTERM
            assert time.monotonic() - begun < 1
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_signal_ends_what_runs_after_five_seconds(chat_bundle: Path) -> None:
    """Its stream ends with an error in its dialect, and nothing is logged but JSON."""
    body = {"prompt": ["x"] * 64, "n": 8, "max_tokens": 200, "stream": True, "logit_bias": {str(EOS): -100}}
    with serving(chat_bundle, "--threads", 1) as (process, url):
        with urllib.request.urlopen(f"{url}/v1/completions", json.dumps(body).encode(), 60) as stream:
            lines = [stream.readline()]
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            lines += stream.readlines()
        assert 4 < time.monotonic() - begun < 8
        assert process.wait(20) == -signal.SIGTERM
        error = json.loads(next(line for line in reversed(lines) if line.startswith(b"data: "))[6:])["error"]
        assert (error["type"], error["code"]) == ("server_error", "server_stopping")
        assert process.stderr is not None
        events = [json.loads(line)["event"] for line in process.stderr.read().splitlines()]
    assert set(events) == {"request"}


def test_every_line_of_the_log_is_json(chat_bundle: Path) -> None:
    """Also of what uvicorn itself has to say."""
    with serving(chat_bundle, "--threads", 1) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert b" 400 " in connection.recv(65536)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        found = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert {"event": "uvicorn.error", "message": "Invalid HTTP request received."} in found


def test_what_the_runtime_logs_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    with command._logging():
        logging.getLogger("ondevice.chat_template").warning("no place for %s", "tools")
        log_event("ignored", fields=["x"])
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert told == [
        {"event": "ondevice.chat_template", "message": "no place for tools"},
        {"event": "ignored", "fields": ["x"]},
    ]


def test_tls_is_uvicorn_s(chat_bundle: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    made += " -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *made.split(), *files], check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=certificate)
    with serving(chat_bundle, "--ssl-certfile", certificate, "--ssl-keyfile", key) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        assert asked(url, trusting)["model"] == chat_bundle.name


def test_without_its_packages_it_says_what_to_install(ondevice: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = ondevice("serve")
    assert result.code == 1
    assert "pip install starlette uvicorn" in result.err


def test_an_address_that_is_taken_is_an_error(ondevice: Run, chat_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = ondevice("serve", chat_bundle, "--port", taken.getsockname()[1], "--threads", 1)
    assert result.code == 1
    assert "choose another --port" in result.err


def test_what_cannot_be_served_is_refused(ondevice: Run, chat_bundle: Path, token_bundle: Path) -> None:
    for arguments, code, words in (
        ((chat_bundle, chat_bundle), 2, "two models are called"),
        ((token_bundle,), 2, "no tokenizer"),
        ((chat_bundle, "--port", 99999), 2, "--port is 99999"),
        ((chat_bundle, "--ssl-keyfile", "x"), 2, "--ssl-certfile"),
        (("no-such-model",), 3, "no-such-model"),
    ):
        result = ondevice("serve", *arguments)
        assert result.code == code, result
        assert words in result.err
