"""Answers in parts: their headers, pings while there is no part, and errors between parts.

Headers are sent with the first part, or after PING_SECONDS, so that an error before then has the right
status. After that the client gets something at least every PING_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ondevice.callbacks import PromptProgress
from ondevice.records import dataclass
from ondevice.serve.config import PING_SECONDS
from ondevice.serve.errors import RequestError, error_body
from ondevice.serve.guard import json_bytes


class Stream(Response):
    """An answer that is sent in parts. It begins with the first part, so that an error before it gets the
    right status.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], first: bytes, media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._parts = parts
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class PromptReading:
    """How much of a request's prompts has been read. Used in the event loop, except for `tell`."""

    def __init__(self, count: Callable[[], Awaitable[int]]) -> None:
        """count: returns the number of tokens of a waiting prompt. Raises RequestError for a prompt that
        can't be read.
        """
        self.progress: PromptProgress | None = None
        """Progress of the newest prompt; None before the first."""
        self.index = 0
        """Index of that prompt's answer among those of the request."""
        self.counted_tokens = 0
        """Tokens of a waiting prompt, if they were counted."""
        self._count = count
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt; 0 until it is known."""
        return self.counted_tokens if self.progress is None else self.progress.tokens

    def tell(self, progress: PromptProgress) -> None:
        """Set the progress. May be called from any thread."""
        with suppress(RuntimeError):  # The loop may be closed.
            self._loop.call_soon_threadsafe(self._take, progress)

    def complete(self) -> None:
        """Set the progress to that of a prompt that has been read completely."""
        if self.progress is not None and self.progress.read_tokens < self.progress.tokens:
            self._take(replace(self.progress, read_tokens=self.progress.tokens))

    def wake(self, _: Any = None) -> None:
        """Let a waiting `news` return."""
        self._news.set()

    async def news(self, seconds: float) -> None:
        """Wait until there is new progress or `wake` is called, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._news.wait()
        self._news.clear()

    async def check(self) -> None:
        """Check a waiting prompt. Raises RequestError if it can't be read."""
        if self.progress is None:
            self.counted_tokens = await self._count()

    def _take(self, progress: PromptProgress) -> None:
        self.progress = progress
        self._news.set()


@dataclass(frozen=True)
class Dialect:
    """The bytes that a dialect sends between the parts of a stream.

    ping: sent after PING_SECONDS of silence. error: the last part of a stream that fails. progress: sent at
    every step of reading, if the client asks for it.
    """

    ping: Callable[[PromptReading], bytes]
    error: Callable[[RequestError], bytes]
    progress: Callable[[PromptReading, PromptProgress], bytes] | None = None


def sse(value: Any, event: str = "") -> bytes:
    """One server-sent event of JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + json_bytes(value) + b"\n\n"


def comment(reading: PromptReading) -> bytes:
    """A comment between server-sent events, with the progress of reading."""
    progress = reading.progress
    if progress is None or progress.read_tokens == progress.tokens:
        return b": working\n\n"
    return f": reading {progress.read_tokens}/{progress.tokens}\n\n".encode()


def sse_dialect(
    path: str, progress: Callable[[PromptReading, PromptProgress], bytes] | None = None
) -> Dialect:
    """A dialect of server-sent events without names, with errors in the form of `path`."""
    return Dialect(comment, lambda error: sse(error_body(path, error)), progress)


def progress_field(progress: PromptProgress) -> dict[str, Any]:
    """A prompt's progress in the form of llama.cpp's server."""
    return {
        "prompt_progress": {
            "total": progress.tokens,
            "cache": progress.reused_tokens,
            "processed": progress.read_tokens,
            "time_ms": round(1e3 * progress.seconds),
        }
    }


async def begin_stream(parts: AsyncGenerator[bytes, None], media_type: str = "text/event-stream") -> Stream:
    """The answer that consists of these parts. Raises an error that occurs before the first part."""
    return Stream(parts, await anext(parts), media_type)


async def streamed(
    parts: AsyncGenerator[bytes, None],
    reading: PromptReading,
    dialect: Dialect,
    media_type: str = "text/event-stream",
) -> Stream:
    """The answer that consists of these parts, with the dialect's pings and progress between them.

    Raises an error that occurs before the first byte is sent.
    """
    return await begin_stream(_with_pings(parts, reading, dialect), media_type)


async def _with_pings(
    parts: AsyncGenerator[bytes, None], reading: PromptReading, dialect: Dialect
) -> AsyncGenerator[bytes, None]:
    """Yields the parts, with pings and progress between them, and an error as the last part."""
    clock = asyncio.get_running_loop().time
    said, is_begun = clock(), False
    told: PromptProgress | None = None
    part: asyncio.Task[bytes | None] | None = None
    async with aclosing(parts):
        try:
            while True:
                part = asyncio.create_task(_next(parts))
                part.add_done_callback(reading.wake)
                while not part.done() or (dialect.progress and told is not reading.progress):
                    if dialect.progress and reading.progress is not None and told is not reading.progress:
                        told = reading.progress
                        yield dialect.progress(reading, told)
                        said, is_begun = clock(), True
                    elif clock() - said >= PING_SECONDS:
                        if not is_begun:
                            await reading.check()
                            if part.done():
                                break
                        yield dialect.ping(reading)
                        said, is_begun = clock(), True
                    else:
                        await reading.news(said + PING_SECONDS - clock())
                content = part.result()
                if content is None:
                    return
                yield content
                said, is_begun = clock(), True
        except RequestError as error:
            if not is_begun:
                raise
            yield dialect.error(error)
        finally:
            if part is not None:
                part.cancel()
                await asyncio.gather(part, return_exceptions=True)


async def _next(parts: AsyncGenerator[bytes, None]) -> bytes | None:
    """The next part; None after the last."""
    try:
        return await anext(parts)
    except StopAsyncIteration:
        return None
