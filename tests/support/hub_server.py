"""A server that speaks the hub's protocol over folders of checkpoints, and that can be told to misbehave.

    python -m tests.support.hub_server ROOT        serves ROOT/OWNER/NAME; prints its address, ends with stdin

`huggingface_hub` is the client: descriptions with sizes and hashes, files by HEAD and GET with ranges, and a
redirect to where large files lie, as the real one does.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE_BYTES = 1 << 14
LARGE = (".safetensors", ".gguf")
"""Suffixes of files that lie on another host."""
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class HubRules:
    """What the server does beside serving, for tests to set. Counts are shared by all requests."""

    redirects: bool = True
    """Send large files from another host, as the real hub does."""
    gated: bool = False
    token: str = "hf_right"
    break_after: list[int] = field(default_factory=list)
    """Bytes after which the next answers with weights break off, one entry an answer."""
    refuse: list[int] = field(default_factory=list)
    """Statuses that the next requests get instead of an answer."""
    refusal_headers: dict[str, str] = field(default_factory=dict)
    ignore_ranges: bool = False
    describe: Callable[[dict[str, Any]], Any] = lambda answer: answer
    """Changes the description of a repository before it is sent."""
    change: Callable[[int, dict[str, str], int], tuple[int, dict[str, str], int]] = lambda *answer: answer
    """Changes the status, the headers and the length that an answer begins with."""
    lie_of_total: int = 0
    """Bytes added to the size in Content-Range."""
    redirect_to: str = ""
    """Where files are redirected to instead."""
    piece_seconds: float = 0.0
    """Pause after each piece of a file, which makes a slow network."""
    asked: list[str] = field(default_factory=list)
    """Method, path and range of every request, in order."""
    leaked_tokens: int = 0
    """Requests to the other host that had a token with them."""
    sent_bytes: int = 0
    """Bytes of safetensors and GGUF files that were sent."""
    tag: str = ""
    """The hash that the hub tells with every large file, instead of its own."""


class QuietServer(ThreadingHTTPServer):
    """A server on a free port of this machine, which bears with clients that end."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that were killed leave broken pipes."""


class HubServer(QuietServer):
    def __init__(self, root: Path) -> None:
        super().__init__(_Handler)
        self.root = root
        self.rules = HubRules()
        self.lock = threading.Lock()


class QuietHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD alike, and writes no log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Answer the request."""
        raise NotImplementedError

    def begin(self, status: int, headers: Mapping[str, str], nbytes: int) -> None:
        """Send status and headers of an answer of this many bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()


class _Handler(QuietHandler):
    server: HubServer

    def answer(self) -> None:
        rules, path = self.server.rules, unquote(urlsplit(self.path).path)
        with self.server.lock:
            rules.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".rstrip())
            refusal = rules.refuse.pop(0) if rules.refuse else 0
        if refusal:
            self._begin(refusal, rules.refusal_headers, 0)
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/").split("/revision/")[0])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-z]+)/(.+)", path):
            self._resolve(*found.groups())
        elif found := re.fullmatch(r"/lfs/([^/]+/[^/]+)/(.+)", path):
            rules.leaked_tokens += "Authorization" in self.headers
            self._send(self.server.root / found[1] / found[2], {})
        else:
            self._error(404, "")

    def _describe(self, repository: str) -> None:
        folder = self.server.root / repository
        if not folder.is_dir():
            self._error(401, "RepoNotFound")
            return
        answer = self.server.rules.describe(description(repository, folder))
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self._begin(200, {"Content-Type": "application/json"}, len(data))
        self.wfile.write(data)

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        rules, folder = self.server.rules, self.server.root / repository
        if rules.gated and self.headers.get("Authorization") != f"Bearer {rules.token}":
            self._error(403, "GatedRepo")
            return
        path = folder / name
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        large = path.suffix in LARGE
        headers = {"X-Repo-Commit": commit(folder), "ETag": f'"{identity(path)}"'}
        if rules.redirect_to or (large and rules.redirects):
            tag = f'"{rules.tag}"' if rules.tag else headers["ETag"]
            headers |= {"X-Linked-ETag": tag, "X-Linked-Size": str(path.stat().st_size)}
            target = (
                rules.redirect_to
                or f"http://localhost:{self.server.server_address[1]}/lfs/{repository}/{name}"
            )
            self._begin(302, headers | {"Location": target}, 0)
        else:
            self._send(path, headers)

    def _send(self, path: Path, headers: dict[str, str]) -> None:
        rules, size = self.server.rules, path.stat().st_size
        start, stop, status = 0, size, 200
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked and not rules.ignore_ranges:
            start, stop = int(asked[1]), min(size, int(asked[2] or size) + 1)
            if start >= size:
                self._error(416, "")
                return
            total = size + rules.lie_of_total
            status, headers = 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{total}"}
        self._begin(status, headers | {"Accept-Ranges": "bytes"}, stop - start)
        if self.command == "HEAD":
            return
        large = path.suffix in LARGE
        with self.server.lock:
            left = rules.break_after.pop(0) if large and rules.break_after else stop - start
        with path.open("rb") as stream:
            stream.seek(start)
            while start < stop and left > 0:
                piece = stream.read(min(PIECE_BYTES, stop - start, left))
                start, left = start + len(piece), left - len(piece)
                # Counted first: a client that has the last piece may go on before this thread does.
                if large:
                    with self.server.lock:
                        rules.sent_bytes += len(piece)
                self.wfile.write(piece)
                if rules.piece_seconds:
                    threading.Event().wait(rules.piece_seconds)
        if start < stop:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _begin(self, status: int, headers: dict[str, str], nbytes: int) -> None:
        self.begin(*self.server.rules.change(status, headers, nbytes))

    def _error(self, status: int, code: str) -> None:
        self._begin(status, {"X-Error-Code": code} if code else {}, 0)


def content_hash(path: Path) -> str:
    """sha256 of a file, kept for as long as the file stays as it is."""
    status = path.stat()
    return _hash(path, status.st_size, status.st_mtime_ns)


def identity(path: Path) -> str:
    """What the hub knows a file's content by: sha256 of large ones, another hash of others."""
    return content_hash(path)[: None if path.suffix in LARGE else 40]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@cache
def _hash(path: Path, nbytes: int, modified_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commit(folder: Path) -> str:
    """A commit that changes with the content of any file."""
    digest = hashlib.sha1()
    for path in _files(folder):
        digest.update(f"{path.relative_to(folder)} {content_hash(path)}".encode())
    return digest.hexdigest()


def description(repository: str, folder: Path) -> dict[str, Any]:
    """What the hub says of a repository, with sizes and hashes."""
    siblings = []
    for path in _files(folder):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        entry: dict[str, Any] = {"rfilename": name, "size": size}
        if path.suffix in LARGE:
            entry["lfs"] = {"sha256": content_hash(path), "size": size, "pointerSize": 134}
        siblings.append(entry | {"blobId": content_hash(path)[:40]})
    return {"_id": "0", "id": repository, "modelId": repository, "sha": commit(folder), "siblings": siblings}


@contextmanager
def serving(root: Path) -> Iterator[HubServer]:
    """A server over ROOT/OWNER/NAME folders, on threads of this process."""
    with HubServer(root) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    with serving(Path(sys.argv[1])) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
