"""Passes bytes between programs and a server, unchanged, and tells afterwards what was asked and answered.

An answer reaches the program as it comes, and where one side closes its connection, the other's is closed.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Exchange:
    """A request and the answer to it; status 0 where none came. complete: whether it came to its end."""

    path: str
    asked: Any
    status: int
    body: bytes
    complete: bool

    @property
    def streamed(self) -> bool:
        """Whether the request asks for a stream."""
        return bool(self.asked.get("stream", self.path.startswith("/api/")))


@dataclass
class _Connection:
    started: float
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)


class Relay:
    """A relay to a server. url: where programs reach it."""

    def __init__(self, server: str) -> None:
        self._server = urlsplit(server)
        self._connections: list[_Connection] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.url = ""

    def exchanges(self) -> list[Exchange]:
        """All that was asked until now, connection by connection, by the time of their beginnings."""
        return [each for connection in list(self._connections) for each in _exchanges(connection)]

    async def run(self, ready: threading.Event, stop: asyncio.Event) -> None:
        """Relay until `stop`. ready: is set as soon as there is a url."""
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with listener:
            self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            ready.set()
            await stop.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        connection = _Connection(time.monotonic())
        self._connections.append(connection)
        host, port = self._server.hostname, self._server.port
        try:
            server_reader, server_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        tasks = {
            asyncio.create_task(_pump(reader, server_writer, connection.sent)),
            asyncio.create_task(_pump(server_reader, writer, connection.received)),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in tasks:
                pump.cancel()
            for end in (server_writer, writer):
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            kept += data
            writer.write(data)
            await writer.drain()


@contextmanager
def relaying(server: str) -> Iterator[Relay]:
    """A relay to the server, in a thread of its own."""
    relay, ready, loop = Relay(server), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(relay.run(ready, stop),), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield relay
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


class _Bytes(io.BytesIO):
    """Received bytes as a socket and its file, which an answer's end doesn't close."""

    def makefile(self, *arguments: Any) -> _Bytes:
        return self

    def close(self) -> None:
        pass


def _exchanges(connection: _Connection) -> Iterator[Exchange]:
    sent, received = io.BytesIO(bytes(connection.sent)), _Bytes(bytes(connection.received))
    while line := sent.readline():
        method, path, _ = line.decode("latin-1").split(" ", 2)
        headers = http.client.parse_headers(sent)
        body = sent.read(int(headers.get("content-length", 0)))
        if "chunked" in headers.get("transfer-encoding", ""):
            body = _unchunked(sent)
        status, answer, complete = _answer(received, method)
        if body.startswith(b"{"):
            with suppress(ValueError):
                yield Exchange(path, json.loads(body), status, answer, complete)


def _unchunked(stream: io.BytesIO) -> bytes:
    parts = []
    while size := int(stream.readline() or b"0", 16):
        parts.append(stream.read(size))
        stream.readline()
    stream.readline()
    return b"".join(parts)


def _answer(received: _Bytes, method: str) -> tuple[int, bytes, bool]:
    """The next answer on a connection: its status, its body, and whether that is complete."""
    response = http.client.HTTPResponse(received, method=method)  # type: ignore[arg-type]
    try:
        response.begin()
    except (http.client.HTTPException, OSError):
        return 0, b"", False
    try:
        return response.status, response.read(), True
    except http.client.IncompleteRead as error:
        return response.status, error.partial, False
