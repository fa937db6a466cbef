"""uvicorn's HTTP/1.1 connection, with a time limit for headers, and with an end for endless streams.

Otherwise connections that send their headers byte by byte could keep others out, and a page that follows the
server's state would keep the server from stopping.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ondevice.serve.config import HEADER_SECONDS

ENDLESS = frozenset({"/page/live"})
"""Paths whose answers end only with the server."""


class Connection(H11Protocol):
    """The connection to one client. The headers of each request must arrive within HEADER_SECONDS."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        running = self.cycle is not None and not self.cycle.response_complete
        if running and self.scope["path"] in ENDLESS:
            self.transport.close()
        else:
            super().shutdown()

    def _watch_headers(self) -> None:
        """Start the clock at the first byte of a request, and stop it at its last header."""
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun:
            self._clear_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        # A silent connection gets no answer: browsers keep such ones ready.
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            body = f"the headers didn't arrive within {HEADER_SECONDS:g} seconds\n".encode()
            kind = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
            length = ("content-length", str(len(body)))
            answer = h11.Response(status_code=408, reason=b"Request Timeout", headers=[*kind, length])
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
