"""Reads the prompts of recorded requests as the server starts, for later requests with the same beginning.

A file holds a request's body in any dialect, bare or as `{"path": ..., "body": ...}`. The application handles
it like a request, but generates nothing. If a body has no messages, a short one is added after the system
prompt and the tools, which later requests share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message

from ondevice.errors import UsageError
from ondevice.records import dataclass
from ondevice.serve.config import MAX_BODY_BYTES
from ondevice.serve.errors import RequestError
from ondevice.serve.exchange import prompts_read
from ondevice.serve.guard import json_bytes
from ondevice.serve.metrics import log_event
from ondevice.serve.models import Models

MAX_FILE_BYTES = 2 * MAX_BODY_BYTES
PLACEHOLDER = "."
"""The user's message in a request that has none."""
_MESSAGES_OF = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/api/chat": "messages",
}
_OLLAMA_FIELDS = {"options", "keep_alive", "raw", "template", "think"}
_LLAMA_CPP_FIELDS = {"n_predict", "cache_prompt", "id_slot"}


@dataclass(frozen=True)
class WarmRequest:
    """A request whose prompt is read at the start. file: the file that it comes from."""

    file: str
    path: str
    body: dict[str, Any]


def read_warm(file: str) -> WarmRequest:
    """The request in a file. Raises UsageError if the file can't be read or contains no request."""
    try:
        with Path(file).expanduser().open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"--warm {file} has more than {MAX_FILE_BYTES} bytes; give one request's body")
        value = json.loads(data.decode("utf-8"))
        recorded = isinstance(value, dict) and "body" in value
        body = value["body"] if recorded else value
        body = json.loads(body) if isinstance(body, str) else body
    except OSError as error:
        raise UsageError(f"--warm {file} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--warm {file} isn't JSON in UTF-8: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"--warm {file} holds no request; a request's body is a JSON object")
    url = value.get("path", value.get("url")) if recorded else None
    path = urlsplit(url).path if isinstance(url, str) else _dialect(body)
    if not path:
        raise UsageError(
            f"--warm {file} is of no dialect that is known by its fields; give "
            '{"path": "/v1/messages", "body": ...}'
        )
    return WarmRequest(file, path, _with_message(path, body))


async def warm(app: ASGIApp, models: Models, requests: Sequence[WarmRequest]) -> None:
    """Read the requests' prompts, one after the other, and log the tokens and seconds of each."""
    for request in requests:
        read = prompts_read.set([])
        begun = time.monotonic()
        try:
            status, answer = await _posted(app, request.path, _with_model(request.body, models))
            stats = prompts_read.get() or []
        finally:
            prompts_read.reset(read)
        seconds = round(time.monotonic() - begun, 3)
        if status == 200 and stats:
            tokens = sum(it.prompt_tokens for it in stats)
            reused = sum(it.reused_tokens for it in stats)
            log_event("warmed", file=request.file, tokens=tokens, reused_tokens=reused, seconds=seconds)
        else:
            said = answer[:500].decode("utf-8", "replace")
            log_event("failed", level=logging.WARNING, file=request.file, status=status, answer=said)


def _dialect(body: dict[str, Any]) -> str:
    """The path of the dialect that a body belongs to, judged by its fields; empty if that is unclear."""
    fields, tools = set(body), body.get("tools")
    first = tools[0] if isinstance(tools, list) and tools else None
    is_anthropic = "system" in fields or (isinstance(first, dict) and "input_schema" in first)
    if "input" in fields or "instructions" in fields:
        return "/v1/responses"
    if "prompt" in fields:
        if fields & (_OLLAMA_FIELDS | {"system"}):
            return "/api/generate"
        return "/completion" if fields & _LLAMA_CPP_FIELDS else "/v1/completions"
    if is_anthropic:
        return "/v1/messages"
    if "messages" not in fields and not tools:
        return ""
    return "/api/chat" if fields & _OLLAMA_FIELDS else "/v1/chat/completions"


def _with_message(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body without streaming, and with a user message added if it has none."""
    changed = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False}
    name = _MESSAGES_OF.get(path)
    if name is not None and isinstance(body.get(name), list | None):
        said = list(body.get(name) or ())
        if not any(isinstance(it, dict) and it.get("role") == "user" for it in said):
            changed[name] = [*said, {"role": "user", "content": PLACEHOLDER}]
    if path == "/v1/messages":
        changed.setdefault("max_tokens", 1)
    return changed


def _with_model(body: dict[str, Any], models: Models) -> dict[str, Any]:
    """The body, with the name of a model that the server has."""
    name = body.get("model")
    try:
        models.find(name if isinstance(name, str) else None)
    except RequestError:
        name = None
    return body | {"model": name if isinstance(name, str) and name else models.find(None).name}


async def _posted(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """The status and the body of the application's answer to a request."""
    parts, data = [json_bytes(body)], bytearray()
    status = 0
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        data.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, bytes(data)
