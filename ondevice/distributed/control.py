"""The control channel: small JSON objects, one a line, between supervisors, and between a supervisor and its
engine.

Both ends send `beat` once a second. Incoming data may be hostile: the sizes of lines, fields and the send
queue are limited, and a broken rule closes the connection.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from ondevice.bundle.strict_json import Section, parse_json
from ondevice.distributed.place import MAX_RANKS, checked_ring
from ondevice.errors import BundleError, RankError
from ondevice.records import dataclass

PROTOCOL = 1
BEAT_SECONDS = 1.0
STALL_SECONDS = 10.0
"""Silence after which a rank counts as stalled. An engine beats while it computes."""
MAX_LINE_BYTES = 1 << 14
MAX_MESSAGE_CHARS = 4000
"""Most characters of an error's message."""
MAX_TEXT = 200
MAX_WAITING_BYTES = 1 << 16
"""Most bytes queued for sending. Beats alone take an hour to fill it."""


@dataclass(frozen=True)
class Hello:
    """A rank's first message. port: a port at which it can listen for the ring; 0 if the ring's addresses are
    already known.
    """

    rank: int
    size: int
    version: str
    token: str
    port: int

    def to_dict(self) -> dict[str, Any]:
        return {"type": "hello", "protocol": PROTOCOL, **vars(self)}


@dataclass(frozen=True)
class Go:
    """Rank 0's answer once every rank has connected. dram_budget: the receiving rank's budget, or "" for its
    default.
    """

    ring: tuple[tuple[str, ...], ...]
    dram_budget: str

    def to_dict(self) -> dict[str, Any]:
        return {"type": "go", **vars(self)}


@dataclass(frozen=True)
class Failure:
    """Reports an error that ends the run. code: the exit code. broken: whether the end of a neighbour may be
    the cause.
    """

    rank: int
    code: int
    message: str
    broken: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"type": "fail", **vars(self), "message": self.message[:MAX_MESSAGE_CHARS]}


@dataclass(frozen=True)
class End:
    """Tells that the run is over because rank 0 has finished."""

    def to_dict(self) -> dict[str, Any]:
        return {"type": "end"}


@dataclass(frozen=True)
class Beat:
    """Tells that the sender is alive."""

    def to_dict(self) -> dict[str, Any]:
        return {"type": "beat"}


@dataclass(frozen=True)
class Ready:
    """Tells that this rank's engine is about to join MLX's ring."""

    def to_dict(self) -> dict[str, Any]:
        return {"type": "ready"}


@dataclass(frozen=True)
class Join:
    """Tells that every rank's engine is ready, so that all join the ring now."""

    def to_dict(self) -> dict[str, Any]:
        return {"type": "join"}


Message = Hello | Go | Failure | End | Beat | Ready | Join
_SIMPLE: dict[str, Message] = {"end": End(), "beat": Beat(), "ready": Ready(), "join": Join()}
"""Messages that consist of their type."""


def parse(line: bytes) -> Message:
    """The message in a line. Raises RankError for anything else."""
    try:
        section = Section(parse_json(line, "a control message"), "a control message")
        message = _read(section, section.one_of("type", ("hello", "go", "fail", *_SIMPLE)))
        section.close()
    except BundleError as error:
        raise RankError(error.for_command_line) from error
    return message


def _read(section: Section, kind: str) -> Message:
    if kind == "hello":
        protocol = section.integer("protocol", 0, 1 << 30)
        if protocol != PROTOCOL:
            raise RankError(f"it speaks version {protocol} of the control channel; this is {PROTOCOL}")
        size = section.integer("size", 2, MAX_RANKS)
        version, token = section.text("version", MAX_TEXT), section.get("token")
        if not isinstance(token, str) or len(token) > MAX_TEXT:
            raise RankError("its token isn't a text")
        return Hello(
            section.integer("rank", 1, size - 1), size, version, token, section.integer("port", 0, 65535)
        )
    if kind == "go":
        budget = section.get("dram_budget") and section.text("dram_budget", MAX_TEXT)
        return Go(checked_ring(section.get("ring")), budget)
    if kind == "fail":
        message = section.get("message")
        if not isinstance(message, str) or len(message) > MAX_MESSAGE_CHARS:
            raise RankError(f"an error's message must have at most {MAX_MESSAGE_CHARS} characters")
        rank, code = section.integer("rank", 0, MAX_RANKS), section.integer("code", 1, 255)
        return Failure(rank, code, message, section.boolean("broken"))
    return _SIMPLE[kind]


class Link:
    """A connection that carries control messages. Never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.heard = time.monotonic()
        """When bytes last arrived, on the clock of `time.monotonic`."""
        self.closed = False
        """True once the other end has closed, or broken a rule."""
        self._received = b""
        self._waiting = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send as much as the connection accepts now; `flush` sends the rest."""
        self._waiting += json.dumps(message.to_dict()).encode("ascii") + b"\n"
        if len(self._waiting) > MAX_WAITING_BYTES:
            self.closed = True
        self.flush()

    def flush(self) -> bool:
        """Send the queued bytes, as far as the connection accepts them. Returns True if none are left."""
        try:
            while self._waiting and not self.closed:
                self._waiting = self._waiting[self.socket.send(self._waiting) :]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return not self._waiting

    def receive(self) -> list[Message]:
        """The messages that have arrived. Raises RankError for a line that isn't a message."""
        try:
            data = self.socket.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        self.heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > MAX_LINE_BYTES:
            self.closed = True
            raise RankError(f"a control message has more than {MAX_LINE_BYTES} bytes")
        return [parse(line) for line in lines]

    @property
    def silent_seconds(self) -> float:
        """Seconds since bytes last arrived."""
        return time.monotonic() - self.heard

    def close(self) -> None:
        self.socket.close()
