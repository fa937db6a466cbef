"""`/` and `/page/`: the page's files, read once, the server's state as a stream, and the budget.

The files need no key: they contain nothing secret, and a browser requests them before the page can send a
key. The browser keeps them, but asks each time whether they have changed, because no build step gives them
names that depend on their content.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator
from functools import partial
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.records import dataclass
from ondevice.serve.errors import RequestError
from ondevice.serve.exchange import Service, json_answer, read_object
from ondevice.serve.page.live import INTERVAL_SECONDS, Live
from ondevice.serve.streaming import begin_stream, sse

LIVE = "/page/live"
HEARTBEAT_SECONDS = 15.0
"""Longest time between two parts of the stream, so that a client that went is noticed."""
MAX_WATCHERS = 16
"""Pages that may follow at once, as each takes a connection."""
MAX_BUDGET = 1 << 50
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in _TYPES
}
OPEN_PATHS = frozenset(_FILES)
"""Paths that need no key."""
_HEADERS = {
    "cache-control": "no-cache",
    "vary": "accept-encoding",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}


def routes(service: Service) -> list[Route]:
    live, watchers = Live(service), asyncio.Semaphore(MAX_WATCHERS)
    return [
        *(Route(address, partial(_file, _read(path)), methods=["GET"]) for address, path in _FILES.items()),
        Route(LIVE, partial(_live, live, watchers), methods=["GET"]),
        Route("/page/budget", partial(_budget, service, live), methods=["POST"]),
    ]


@dataclass(frozen=True)
class _PageFile:
    """A file of the page, plain and compressed. tag: differs whenever the content differs."""

    content: bytes
    compressed: bytes
    kind: str
    tag: str


def _read(path: Path) -> _PageFile:
    content = path.read_bytes()
    tag = f'W/"{sha256(content).hexdigest()[:32]}"'
    return _PageFile(content, gzip.compress(content, mtime=0), _TYPES[path.suffix], tag)


async def _file(file: _PageFile, request: Request) -> Response:
    headers = _HEADERS | {"etag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.content, headers=headers, media_type=file.kind)
    headers["content-encoding"] = "gzip"
    return Response(file.compressed, headers=headers, media_type=file.kind)


async def _live(live: Live, watchers: asyncio.Semaphore, request: Request) -> Response:
    if watchers.locked():
        raise RequestError(503, f"{MAX_WATCHERS} pages follow this server already")
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return await begin_stream(_states(live, watchers))


async def _states(live: Live, watchers: asyncio.Semaphore) -> AsyncGenerator[bytes, None]:
    """Yields the server's state each time it has changed."""
    async with watchers:
        before, quiet = None, 0.0
        while True:
            state = await live.state()
            quiet += INTERVAL_SECONDS
            # Memory in use flickers by itself.
            compared = state | {"seconds": 0, "memory_bytes": 0}
            if compared != before or quiet >= HEARTBEAT_SECONDS:
                yield sse(state)
                before, quiet = compared, 0.0
            await asyncio.sleep(INTERVAL_SECONDS)


async def _budget(service: Service, live: Live, request: Request) -> Response:
    fields = await read_object(service, request)
    nbytes = fields.integer("budget_bytes", 1, MAX_BUDGET)
    if nbytes is None:
        fields.refuse("budget_bytes", "is missing; it must be a number of bytes")
    fields.close()
    await service.models.set_budget(nbytes)
    return json_answer(await live.state(newest=True))
