"""A stand-in for the server behind the page: the files are the real ones, replies are what a test says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ondevice.serve.page import routes

PROMPT_TOKENS = 4000
PIECE_CHARS = 4
MB = 1_000_000
LIVE_SECONDS = 0.2


@dataclass(frozen=True)
class Said:
    """A reply: pieces of text, each after `pace` seconds, behind `reading` steps of reading a long prompt."""

    text: str
    pace: float = 0.0
    reading: int = 0
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments."""
    reason: str = "stop"
    piece_chars: int = PIECE_CHARS

    def events(self) -> Iterator[dict[str, Any]]:
        for step in range(1, self.reading + 1):
            time.sleep(self.pace)
            done = PROMPT_TOKENS * step // self.reading
            progress = {"total": PROMPT_TOKENS, "cache": 0, "processed": done, "time_ms": 1000 * step}
            yield _chunk({}) | {"prompt_progress": progress}
        for name, text in (("reasoning_content", self.thinking), ("content", self.text)):
            for at in range(0, len(text), self.piece_chars):
                time.sleep(self.pace)
                yield _chunk({name: text[at : at + self.piece_chars]})
        for index, (name, arguments) in enumerate(self.calls):
            function = {"name": name, "arguments": arguments}
            yield _chunk({"tool_calls": [{"index": index, "id": f"call{index}", "function": function}]})
        yield _chunk({}, self.reason)
        tokens = -(-len(self.text) // self.piece_chars)
        yield {"choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}}


def _chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


@dataclass
class PageStub:
    """The server. replies: what it says next; the last one is said again and again."""

    replies: list[Said] = field(default_factory=lambda: [Said("Hello there.")])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """What it was asked, oldest first."""
    budget_bytes: int = 300 * MB
    context: int = 8192
    temperature: float = 0.7
    generated: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.stub = self
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End as a killed process does: its connections break."""
        self._server.shutdown()
        self._server.server_close()
        for connection in tuple(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._thread.join()

    def next_reply(self) -> Said:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def state(self) -> dict[str, Any]:
        parts = {
            "Weights of every token": 60,
            "Other weights kept": 140,
            "8192 tokens of context": 60,
            "The process": 40,
        }
        sampling = {
            "temperature": self.temperature,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return {
            "models": {
                name: {"context": self.context, "sampling": sampling, "abilities": ["tools", "thinking"]}
                for name in ("stub", "other")
            },
            "loaded": "stub",
            "plan": {
                "budget_bytes": self.budget_bytes,
                "least_bytes": 200 * MB,
                "full_bytes": 500 * MB,
                "total_bytes": self.budget_bytes,
                "flash_bytes": 500 * MB - self.budget_bytes,
                "parts": [{"name": name, "bytes": size * MB} for name, size in parts.items()],
            },
            "pressure": "normal",
            "running": 0,
            "waiting": 0,
            "generated_tokens": self.generated,
            "draft_tokens": 100,
            "accepted_tokens": 60,
            "flash_bytes_read": self.generated * MB,
            "cache_hits": 90 + self.generated,
            "cache_lookups": 100 + self.generated,
            "memory_bytes": 290 * MB,
            "seconds": time.monotonic(),
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    stub: PageStub


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *arguments: Any) -> None:
        """Nothing is logged."""

    def setup(self) -> None:
        super().setup()
        self.server.stub._connections.add(self.connection)

    def finish(self) -> None:
        self.server.stub._connections.discard(self.connection)
        try:
            super().finish()
        except OSError:
            return

    def do_GET(self) -> None:
        if self.path == routes.LIVE:
            self._stream(self._states())
        elif self.path == "/health":
            self._answer(b"{}", "application/json")
        elif (path := routes._FILES.get(self.path)) is not None:
            self._answer(path.read_bytes(), routes._TYPES[path.suffix], routes._HEADERS)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._answer(
                json.dumps({"count": len(body["content"]) // PIECE_CHARS}).encode(), "application/json"
            )
        elif self.path == "/page/budget":
            stub.budget_bytes = body["budget_bytes"]
            self._answer(json.dumps(stub.state()).encode(), "application/json")
        else:
            stub.bodies.append(body)
            self._stream(stub.next_reply().events())

    def _states(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self.server.stub.state()
            time.sleep(LIVE_SECONDS)

    def _stream(self, events: Iterable[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for event in events:
                self.server.stub.generated += bool(event.get("choices"))
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
        except OSError:
            return

    def _answer(self, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in ({"content-type": kind} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
