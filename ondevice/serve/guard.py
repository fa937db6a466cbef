"""Checks every request first: host names and origins, the key, and limits on size and time.

Browsers let a page of any site send requests to this machine, and a name under that site's control may lead
here (DNS rebinding). So a request must address this server by one of its names, and a page's request must
come from an allowed origin. Work on an answer is cancelled as soon as the client disconnects.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ondevice.serve.config import (
    BODY_SECONDS,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    MAX_HELD_BYTES,
    SEND_SECONDS,
    SMALL_BODY_BYTES,
    STALL_SECONDS,
    ServeConfig,
)
from ondevice.serve.errors import RequestError, error_body
from ondevice.serve.metrics import Metrics, log_event
from ondevice.serve.models import client_address

SERVER_PAGE = "/page/"
"""Prefix of paths that only the server's own page may call, whatever other origins are allowed."""
_CORS = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "*, authorization",
    "access-control-max-age": "600",
}


def json_bytes(value: Any) -> bytes:
    """A value as JSON in UTF-8. Lone surrogates, which only a quotation in an error can contain,
    are escaped.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        metrics: Metrics,
        paths: frozenset[str],
        open_paths: frozenset[str],
    ) -> None:
        """Args:
        app: answers the admitted requests.
        config: the server's options.
        metrics: counts requests.
        paths: paths with separate counters.
        open_paths: paths that need no key.
        """
        self._app = app
        self._config = config
        self._metrics = metrics
        self._paths = paths
        self._open_paths = open_paths
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        exchange = _Exchange(scope, send)
        client_address.set(_address(scope))
        try:
            _check_head(scope)
            exchange.origin = self._checked_origin(scope)
            if scope["method"] == "OPTIONS" and exchange.origin:
                await exchange.answer(204, b"", _CORS)
                return
            self._check_key(scope)
            parts = [await self._body(scope, receive, exchange)]
            await self._answered(scope, receive, exchange, parts)
        except RequestError as error:
            if not exchange.status:
                content = json_bytes(error_body(scope["path"], error))
                await exchange.answer(error.status, content, error.headers)
        except (_ClientGone, asyncio.CancelledError):
            # At its end uvicorn cancels answers that clients haven't taken.
            exchange.gone = True
        finally:
            self._held -= exchange.held_bytes
            self._note(scope, exchange)

    def _checked_origin(self, scope: Scope) -> str:
        """The origin of a request that comes from a page of another site, if it is allowed; empty for other
        requests.

        Raises RequestError for a host or an origin that isn't allowed.
        """
        host = _header(scope, b"host")
        name = _host_name(host)
        if name is None or not self._is_server_name(name):
            raise RequestError(
                403,
                f"the server isn't known as {host[:100]!r}; `ondevice serve --allow-host NAME` allows a name",
            )
        origin = _header(scope, b"origin")
        if not origin or origin == f"{scope['scheme']}://{host}":
            return ""
        if origin not in self._config.allow_origin or scope["path"].startswith(SERVER_PAGE):
            raise RequestError(
                403,
                f"pages of {origin[:100]!r} may not call this server; `ondevice serve --allow-origin ORIGIN` "
                "allows an origin",
            )
        return origin

    def _is_server_name(self, name: str) -> bool:
        """Whether a host name is one of this server's, or an address, which can't be rebound."""
        if name in ("localhost", self._config.host.lower(), *map(str.lower, self._config.allow_host)):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _check_key(self, scope: Scope) -> None:
        """Check the key, if one is needed. Raises RequestError without the right one."""
        if not self._config.api_key or scope["path"] in self._open_paths:
            return
        kind, _, bearer = _header(scope, b"authorization").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else _header(scope, b"x-api-key")
        if not hmac.compare_digest(given.encode("latin-1"), self._config.api_key.encode("latin-1")):
            raise RequestError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _body(self, scope: Scope, receive: Receive, exchange: _Exchange) -> bytes:
        """The body of a request. Raises RequestError if it is too large or arrives too slowly."""
        too_large = RequestError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="too_large")
        declared = _header(scope, b"content-length")
        if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
            raise too_large
        try:
            chunks: list[bytes] = []
            nbytes, more = 0, True
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    async with asyncio.timeout(STALL_SECONDS):
                        message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    chunk = message.get("body", b"")
                    chunks.append(chunk)
                    nbytes += len(chunk)
                    if nbytes > MAX_BODY_BYTES:
                        raise too_large
                    held = max(0, nbytes - SMALL_BODY_BYTES)
                    self._held += held - exchange.held_bytes
                    exchange.held_bytes = held
                    if held and self._held > MAX_HELD_BYTES:
                        raise RequestError(503, "too many large requests at once; try again")
                    more = message.get("more_body", False)
            return b"".join(chunks)
        except TimeoutError as error:
            raise RequestError(
                408,
                f"the body didn't arrive within {BODY_SECONDS:g} seconds, or stalled for {STALL_SECONDS:g}",
            ) from error

    async def _answered(
        self, scope: Scope, receive: Receive, exchange: _Exchange, parts: list[bytes]
    ) -> None:
        """Run the application, and cancel it when the client disconnects. parts: the body, removed once it is
        read.
        """

        async def replayed() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            return await asyncio.get_running_loop().create_future()

        answer = asyncio.create_task(self._app(scope, replayed, exchange.send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exchange.gone = not exchange.complete
            gone.cancel()
            answer.cancel()
            with suppress(asyncio.CancelledError):
                await answer

    def _note(self, scope: Scope, exchange: _Exchange) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        status = exchange.status or 499  # nginx's status of requests that the client closed.
        self._metrics.add("requests_total", path=path, status=str(status))
        log_event(
            "request",
            level=logging.WARNING if status >= 500 else logging.INFO,
            id=exchange.id,
            method=scope["method"],
            path=scope["path"][:200],
            status=status,
            seconds=round(time.monotonic() - exchange.begun, 3),
            client=_address(scope),
            gone=exchange.gone,
        )


class _ClientGone(Exception):  # noqa: N818
    """Raised when the client has closed the connection."""


class _Exchange:
    """The answer to one request, while it is being sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = uuid.uuid4().hex[:16]
        self.begun = time.monotonic()
        self.status = 0
        self.held_bytes = 0
        """Bytes of the body after the first SMALL_BODY_BYTES."""
        self.origin = ""
        self.complete = False
        """Whether all of the answer has been sent."""
        self.gone = False
        self._send = send

    async def send(self, message: Message) -> None:
        """Send a part of the answer. If the client doesn't read, the connection is closed."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = {"x-request-id": self.id, "x-content-type-options": "nosniff"}
            if self.origin:
                extra |= {"access-control-allow-origin": self.origin, "vary": "origin"}
            pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in extra.items()]
            message = {**message, "headers": [*message.get("headers", ()), *pairs]}
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError as error:
            raise _ClientGone from error
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True

    async def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        """Send a complete answer: JSON, or empty."""
        kind = {"content-type": "application/json"} if content else {}
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in (kind | headers | {"content-length": str(len(content))}).items()
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": content})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_head(scope: Scope) -> None:
    """Check the sizes of the path, the query and the headers. Raises RequestError if they are too large."""
    nbytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    nbytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if nbytes > MAX_HEADER_BYTES:
        raise RequestError(431, f"the path and the headers have more than {MAX_HEADER_BYTES} bytes")


def _address(scope: Scope) -> str:
    """The client's address."""
    return str((scope.get("client") or ("",))[0])


def _header(scope: Scope, name: bytes) -> str:
    """A header's value, the first of several; empty if there is none."""
    header = next((value for key, value in scope["headers"] if key == name), b"")
    return str(header.decode("latin-1"))


def _host_name(host: str) -> str | None:
    """The name or address of a Host header without its port; None for a malformed header."""
    try:
        parts = urlsplit(f"//{host}")
        valid = parts.port is None or parts.port >= 0
        return parts.hostname if valid and parts.netloc == host and "@" not in host else None
    except ValueError:
        return None
