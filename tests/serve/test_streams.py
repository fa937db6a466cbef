"""Streams with nothing to tell yet: headers and pings while a prompt is read or waits, errors, a stop."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.callbacks import PromptProgress
from ondevice.errors import FlashReadError
from ondevice.model.transformer import Transformer
from ondevice.serve import server as server_module
from ondevice.serve import streaming
from ondevice.serve.streaming import PromptReading, begin_stream, comment, sse_dialect, streamed
from tests.support.serving import Serving, serving, until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA_CHAT, OLLAMA, LLAMA_CPP = "/v1/messages", "/api/chat", "/api/generate", "/completion"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA, LLAMA_CPP)
USAGE = {"include_usage": True}
READ = re.compile(r": reading (\d+)/(\d+)")
PASS_SECONDS = 0.03


def asked(path: str, text: str, **more: Any) -> dict[str, Any]:
    """A request for four tokens, greedy."""
    said = [{"role": "user", "content": text}]
    options = {"options": {"num_predict": 4, "temperature": 0}}
    body: dict[str, Any] = {
        CHAT: {"messages": said, "max_tokens": 4, "temperature": 0, "stream_options": USAGE},
        COMPLETIONS: {"prompt": text, "max_tokens": 4, "temperature": 0, "stream_options": USAGE},
        RESPONSES: {"input": text, "max_output_tokens": 4, "temperature": 0},
        MESSAGES: {"messages": said, "max_tokens": 4, "temperature": 0},
        OLLAMA_CHAT: {"messages": said, **options},
        OLLAMA: {"prompt": text, **options},
        LLAMA_CPP: {"prompt": text, "n_predict": 4, "temperature": 0},
    }[path]
    return {"stream": True} | body | more


@dataclass
class Heard:
    """A stream, line by line."""

    status: int = 0
    lines: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None

    @property
    def values(self) -> list[Any]:
        """The JSON of its events or lines."""
        data = [line.removeprefix("data: ") for line in self.lines]
        return [json.loads(line) for line in data if line.startswith("{")]

    @property
    def comments(self) -> list[str]:
        return [line for line in self.lines if line.startswith(":")]


def listen(server: Serving, path: str, body: Any) -> Heard:
    """Ask, and listen in a thread."""
    heard = Heard()

    def follow() -> None:
        connection = server.connection()
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        heard.status = response.status
        heard.lines += [line.decode().rstrip("\n") for line in iter(response.readline, b"")]
        connection.close()

    heard.thread = threading.Thread(target=follow)
    heard.thread.start()
    return heard


def whole(heard: Heard) -> Heard:
    assert heard.thread is not None
    heard.thread.join(60)
    assert not heard.thread.is_alive()
    return heard


def written(path: str, values: list[Any]) -> str:
    """The text of a stream."""
    deltas = {
        CHAT: lambda it: "".join(choice["delta"].get("content", "") for choice in it["choices"]),
        COMPLETIONS: lambda it: "".join(choice["text"] for choice in it["choices"]),
        RESPONSES: lambda it: it.get("delta", ""),
        MESSAGES: lambda it: it.get("delta", {}).get("text", ""),
        OLLAMA_CHAT: lambda it: it["message"]["content"],
        OLLAMA: lambda it: it["response"],
        LLAMA_CPP: lambda it: it["content"],
    }[path]
    return "".join(map(deltas, values))


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Serving]:
    """One request at a time, whose prompt is read in passes of four tokens."""
    with serving(load(chat_bundle, threads=1, speculation="off", prefill_chunk=4)) as running:
        yield running


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Passes that take long, and pings that come soon. What undoes both."""
    passed = Transformer._passed

    def slowly(*arguments: Any) -> Any:
        time.sleep(PASS_SECONDS)
        return passed(*arguments)

    monkeypatch.setattr(Transformer, "_passed", slowly)
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.05)
    return monkeypatch


def test_nobody_waits_for_a_word_longer_than_agents_do() -> None:
    assert streaming.PING_SECONDS <= 10


def text_for(path: str, purpose: str) -> str:
    """A text of its own, as one that was read before is kept."""
    return f"{path} {purpose} {'and so on ' * 5}"


@pytest.mark.parametrize("path", PATHS)
def test_headers_and_pings_come_while_the_prompt_is_read(
    server: Serving, slow: pytest.MonkeyPatch, path: str
) -> None:
    body = asked(path, text_for(path, "read"))
    heard = whole(listen(server, path, body))
    slow.undo()
    assert heard.status == 200
    text = written(path, heard.values)
    assert text
    assert text == written(path, whole(listen(server, path, body)).values)
    first = next(at for at, line in enumerate(heard.lines) if written_line(path, line))
    before = heard.lines[:first]
    if path in (OLLAMA_CHAT, OLLAMA):
        early = [json.loads(line) for line in before]
        assert len(early) >= 3
        assert all(it["done"] is False and written(path, [it]) == "" for it in early)
        return
    told = [tuple(map(int, match.groups())) for line in before if (match := READ.fullmatch(line))]
    assert len(told) >= 3
    assert told == sorted(told)
    assert {tokens for _, tokens in told} == {prompt_tokens(path, heard.values)}
    names = [line.removeprefix("event: ") for line in before if line.startswith("event: ")]
    if path == MESSAGES:
        assert names[0] == "message_start"
        assert names.count("ping") == len([line for line in before if line.startswith(":")])
        assert [it["type"] for it in heard.values].count("message_start") == 1
        assert heard.values[0]["message"]["usage"]["input_tokens"] == told[0][1]
    elif path == RESPONSES:
        assert names[:2] == ["response.created", "response.in_progress"]
        assert [it["type"] for it in heard.values].count("response.created") == 1
        assert [it["sequence_number"] for it in heard.values] == list(range(len(heard.values)))
    else:
        assert before[0].startswith(": ")


def written_line(path: str, line: str) -> bool:
    data = line.removeprefix("data: ")
    return data.startswith("{") and written(path, [json.loads(data)]) != ""


def prompt_tokens(path: str, values: list[Any]) -> int:
    """The prompt's tokens, as the stream's end tells them."""
    last = values[-1]
    if path == RESPONSES:
        return int(last["response"]["usage"]["input_tokens"])
    if path == LLAMA_CPP:
        return int(last["tokens_evaluated"])
    if path == MESSAGES:
        usage = values[-2]["usage"]
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(last["usage"]["prompt_tokens"])


@pytest.mark.parametrize("path", [CHAT, LLAMA_CPP])
def test_progress_is_told_at_every_step_to_those_who_ask(
    server: Serving, slow: pytest.MonkeyPatch, path: str
) -> None:
    slow.setattr(streaming, "PING_SECONDS", 30.0)
    body = asked(path, text_for(path, "progress"), return_progress=True)
    heard = whole(listen(server, path, body))
    progress = [it["prompt_progress"] for it in heard.values if "prompt_progress" in it]
    total = progress[0]["total"]
    assert [it["processed"] for it in progress] == [*range(progress[0]["cache"], total, 4), total]
    assert {it["total"] for it in progress} == {total}
    times = [it["time_ms"] for it in progress]
    assert times == sorted(times)
    rest = [it for it in heard.values if "prompt_progress" not in it]
    again = asked(path, text_for(path, "progress"))
    assert written(path, rest) == written(path, whole(listen(server, path, again)).values) != ""
    assert not heard.comments
    kept = whole(listen(server, path, body)).values[0]["prompt_progress"]
    assert (kept["processed"], kept["total"]) == (kept["cache"], total)
    if path == CHAT:
        # What a conversation keeps counts as read; the last token always runs.
        assert kept["cache"] == total - 1


@pytest.mark.parametrize("path", PATHS)
def test_an_error_after_the_headers_ends_the_stream(
    server: Serving, slow: pytest.MonkeyPatch, path: str
) -> None:
    passed, passes = Transformer._passed, []

    def failing(*arguments: Any) -> Any:
        passes.append(0)
        if len(passes) > 8:
            raise FlashReadError("made up")
        return passed(*arguments)

    slow.setattr(Transformer, "_passed", failing)
    heard = whole(listen(server, path, asked(path, text_for(path, "fails"))))
    assert heard.status == 200
    last = heard.values[-1]
    if path == MESSAGES:
        assert heard.lines[-3] == "event: error"
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    elif path == RESPONSES:
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    elif path in (OLLAMA_CHAT, OLLAMA):
        assert "made up" in last["error"]
    else:
        assert "made up" in last["error"]["message"]


def test_an_error_before_anything_had_to_be_said_has_its_status(
    server: Serving, slow: pytest.MonkeyPatch
) -> None:
    slow.setattr(streaming, "PING_SECONDS", 30.0)

    def failing(*arguments: Any) -> Any:
        raise FlashReadError("made up")

    slow.setattr(Transformer, "_passed", failing)
    for path in PATHS:
        assert server.post(path, asked(path, text_for(path, "fails early"))).status == 500


def test_one_that_waits_hears_so_and_is_checked_first(server: Serving, slow: pytest.MonkeyPatch) -> None:
    """What is wrong with a prompt is told by a status, although its turn comes after the first ping."""
    running = listen(server, CHAT, asked(CHAT, text_for(CHAT, "runs"), max_tokens=60))
    until(lambda: server.metric("running_requests") == 1)
    waiting = [listen(server, path, asked(path, "x")) for path in (CHAT, MESSAGES, RESPONSES)]
    until(lambda: server.metric("waiting_requests") == 3)
    # Of so many words, only as many are read as are needed to know that they are too many.
    text = "some words " * 3000
    too_long = server.post(MESSAGES, asked(MESSAGES, text))
    assert (too_long.status, too_long.json["error"]["type"]) == (400, "invalid_request_error")
    counted = server.post(f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": text}]})
    assert f"prompt is too long: {counted.json['input_tokens']} tokens >" in too_long.json["error"]["message"]
    assert server.post(CHAT, asked(CHAT, "x" * 3000)).json["error"]["code"] == "context_length_exceeded"
    assert server.metric("running_requests") == 1
    expected = len(server.model.chat_ids([{"role": "user", "content": "x"}]))
    slow.undo()
    assert written(CHAT, whole(running).values)
    for heard in map(whole, waiting):
        assert heard.status == 200
        assert heard.comments[0] == ": working"
    assert waiting[1].values[0]["message"]["usage"]["input_tokens"] == expected


def test_pings_come_between_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.02)
    ended = []

    async def parts() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.sleep(0.07)
            yield b"second"
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main() -> list[bytes]:
        reading = PromptReading(_none)
        reading.tell(PromptProgress(8, 8, 0, 0.0))
        answer = await streamed(parts(), reading, sse_dialect(CHAT))
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            if body := message.get("body"):
                sent.append(body)

        task = asyncio.create_task(answer({}, _none, send))  # type: ignore[arg-type]
        while sent.count(b": working\n\n") < 5:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sent

    sent = asyncio.run(main())
    assert sent[0] == b"first"
    assert 2 <= sent.index(b"second") <= 4
    assert set(sent) == {b"first", b"second", b": working\n\n"}
    assert ended == [True]


async def _none() -> Any:
    return 0


def test_comments_say_how_far_the_prompt_is() -> None:
    async def main() -> None:
        reading = PromptReading(_none)
        assert comment(reading) == b": working\n\n"
        reading.progress = PromptProgress(21244, 4096, 0, 1.0)
        assert comment(reading) == b": reading 4096/21244\n\n"
        reading.complete()
        assert comment(reading) == b": working\n\n"

    asyncio.run(main())


def test_the_first_part_s_error_is_raised() -> None:
    async def parts() -> AsyncGenerator[bytes, None]:
        raise FlashReadError("made up")
        yield b""

    with pytest.raises(FlashReadError):
        asyncio.run(begin_stream(parts()))  # type: ignore[arg-type]


def test_a_stop_ends_requests_in_their_dialects(
    chat_bundle: Path, slow: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow.setattr(server_module, "STOP_SECONDS", 0.3)
    caplog.set_level(logging.INFO, "uvicorn.error")
    with serving(load(chat_bundle, threads=1, speculation="off", parallel=8, prefill_chunk=1)) as server:
        # They are read for far longer than a test takes.
        long = "y" * 180
        streams = {path: listen(server, path, asked(path, long)) for path in PATHS}
        until(lambda: server.metric("running_requests") == len(PATHS))
        answers: list[Any] = []
        body = asked(MESSAGES, long, stream=False)
        last = threading.Thread(target=lambda: answers.append(server.post(MESSAGES, body)))
        last.start()
        until(lambda: server.metric("running_requests") == len(PATHS) + 1)
        late = {"messages": [{"role": "user", "content": "x"}]}
        waiting = threading.Thread(target=lambda: answers.append(server.post(CHAT, late)))
        waiting.start()
        until(lambda: server.metric("waiting_requests") == 1)
        server.stop()
        # One that waits is refused at once, those that run have a moment.
        waiting.join(20)
        assert (answers[0].status, answers[0].json["error"]["code"]) == (503, "server_stopping")
        assert last.is_alive()
        last.join(20)
        assert (answers[1].status, answers[1].json["error"]["type"]) == (503, "overloaded_error")
        for path, heard in streams.items():
            whole(heard)
            assert heard.status == 200
            assert "stopping" in json.dumps(heard.values[-1]), path
            assert "error" in json.dumps(heard.values[-1]), path
    assert not [record for record in caplog.records if record.exc_info]
