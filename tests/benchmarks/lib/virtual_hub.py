"""A hub with one repository whose shards exist nowhere: a part of one is made when it is asked for.

So a conversion of a checkpoint of any size can be measured without its disk. Every tensor is a stretch of one
block of gaussian bfloat16 values, each from another place; the speed of a conversion doesn't depend on them.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from tests.support.hub_server import QuietHandler, QuietServer

REPOSITORY = "random/model"
SHARD_BYTES = 4_000_000_000
VALUES = 1 << 24
PIECE_BYTES = 1 << 20
STEP = 2 * 65_537
"""Bytes by which a shard's stretch begins later than the one's before it."""
COMMIT = hashlib.sha1(REPOSITORY.encode()).hexdigest()
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Shard:
    """A safetensors file of bfloat16 tensors. number: its own, from which its values follow."""

    def __init__(self, number: int, tensors: Mapping[str, tuple[int, ...]], block: bytes) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, size in tensors.items():
            end = offset + 2 * int(np.prod(size))
            header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (offset, end)}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._block, self._start = block, number * STEP
        self.nbytes = len(self._head) + offset

    def pieces(self, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Bytes start .. stop of the file."""
        if start < len(self._head):
            yield self._head[start:stop]
            start = min(stop, len(self._head))
        view = memoryview(self._block)
        while start < stop:
            at = (start - len(self._head) + self._start) % len(view)
            piece = view[at : at + min(PIECE_BYTES, stop - start)]
            yield piece
            start += len(piece)


class Repository:
    """config: of the model. tensors: shapes by name, in order."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> None:
        values = np.random.default_rng(20).standard_normal(VALUES, np.float32) * np.float32(0.02)
        block = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        groups: list[dict[str, tuple[int, ...]]] = [{}]
        used = 0
        for name, size in tensors.items():
            nbytes = 2 * int(np.prod(size))
            if used and used + nbytes > SHARD_BYTES:
                groups.append({})
                used = 0
            groups[-1][name] = size
            used += nbytes
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        self.shards = {
            file: Shard(i, own, block) for i, (file, own) in enumerate(zip(names, groups, strict=True))
        }
        weight_map = {name: file for file, own in zip(names, groups, strict=True) for name in own}
        self.texts = {
            "config.json": json.dumps(config).encode(),
            "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards.values())

    def size(self, name: str) -> int:
        """Bytes of a file. Raises KeyError for another name."""
        return self.shards[name].nbytes if name in self.shards else len(self.texts[name])

    def pieces(self, name: str, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Bytes of a file, in pieces."""
        if name in self.shards:
            yield from self.shards[name].pieces(start, stop)
        else:
            yield self.texts[name][start:stop]

    def description(self) -> dict[str, Any]:
        """What the hub says of the repository."""
        siblings = []
        for name in (*self.shards, *self.texts):
            entry: dict[str, Any] = {"rfilename": name, "size": self.size(name), "blobId": _hash(name)[:40]}
            if name in self.shards:
                entry["lfs"] = {"sha256": _hash(name), "size": self.size(name), "pointerSize": 134}
            siblings.append(entry)
        return {"_id": "0", "id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": siblings}


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class _Server(QuietServer):
    def __init__(self, repository: Repository) -> None:
        super().__init__(_Handler)
        self.repository = repository


class _Handler(QuietHandler):
    server: _Server

    def answer(self) -> None:
        path, repository = unquote(urlsplit(self.path).path), self.server.repository
        if path.startswith(f"/api/models/{REPOSITORY}"):
            answer = json.dumps(repository.description()).encode()
            self.begin(200, {"Content-Type": "application/json"}, len(answer))
            self.wfile.write(answer)
            return
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        if name not in repository.shards and name not in repository.texts:
            self.begin(404, {"X-Error-Code": "EntryNotFound"}, 0)
            return
        size = repository.size(name)
        tag = _hash(name) if name in repository.shards else _hash(name)[:40]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        start, stop, status = 0, size, 200
        if asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            start, stop, status = int(asked[1]), min(size, int(asked[2] or size) + 1), 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.begin(status, headers, stop - start)
        if self.command == "GET":
            for piece in repository.pieces(name, start, stop):
                self.wfile.write(piece)


@contextmanager
def serving(repository: Repository) -> Iterator[str]:
    """The address of a hub that has the repository, on threads of this process."""
    with _Server(repository) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()
