"""Messages between neighbours of a ring: a header and arrays, over MLX's distributed backends.

MLX sends arrays whose shapes both ends must know beforehand. So a message is sent as bytes, and its first
`FIRST_BYTES` say how many follow. MLX's ring keeps a core busy while it waits on a socket. So this module
waits before MLX does, by `poll` on the ring's sockets, and sends long messages piece by piece.
"""

from __future__ import annotations

import json
import math
import os
import queue
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.strict_json import Section, parse_json
from ondevice.errors import BackendUnavailableError, BundleError, RankError
from ondevice.stats import HopStats

FIRST_BYTES = 4096
"""Bytes of a message's first part. One token's message fits if the model's rows have under 900 values."""
PIECE_BYTES = 1 << 18
"""Most bytes that MLX gets at a time. A socket that takes anything takes about as many at once."""
MAX_HEADER_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 28
HANDSHAKE_BYTES = 1 << 20
"""Most bytes of a message before there is a plan, and of a message that no plan covers."""
MAX_ARRAYS = 256
MAX_DIMENSIONS = 8
QUEUED_MESSAGES = 2
"""Most messages queued for sending. Pipelining needs one; the second evens out."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
"""A silent connection is probed after 5 s, three times, every 3 s. macOS has the second name for the
first."""
_ALIGNMENT = 64
_PREFIX = struct.Struct("<4sIQ")
"""Magic, bytes of the description, bytes of the message after this prefix."""
_MAGIC = b"odr1"
_DTYPES = {name: np.dtype(name) for name in ("float32", "float16", "int32", "uint8")}


class Transport(Protocol):
    """A rank's two ends in the ring: it sends to the next rank, and receives from the one before."""

    rank: int
    size: int

    @property
    def stats(self) -> HopStats:
        """Counts of this rank's messages so far: how many, their bytes and seconds."""

    def send(self, header: bytes, arrays: Sequence[NDArray[Any]]) -> None:
        """Send a header and float32, float16, int32 or uint8 arrays to the next rank.

        Returns once the message is queued. Waits while QUEUED_MESSAGES messages are queued.
        """

    def receive(self) -> tuple[bytes, list[NDArray[Any]]]:
        """The next message of the previous rank, for which it waits. Its arrays are copies.

        Raises RankError for a message that breaks a rule.
        """


def pack(header: bytes, arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """A message as bytes, (n,) with n at least FIRST_BYTES. Raises ValueError if it can't be expressed."""
    described = []
    for array in arrays:
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"a message can't hold {array.dtype.name}")
        described.append([array.dtype.name, list(array.shape)])
    table = json.dumps(described, separators=(",", ":")).encode("ascii")
    text = struct.pack("<I", len(header)) + header + table
    starts, end = _starts(_PREFIX.size + len(text), [array.nbytes for array in arrays])
    if len(text) > MAX_HEADER_BYTES or end > MAX_MESSAGE_BYTES or len(arrays) > MAX_ARRAYS:
        raise ValueError(f"a message of {len(arrays)} arrays and {end} bytes is too large")
    message = np.zeros(max(end, FIRST_BYTES), dtype=np.uint8)
    head = _PREFIX.pack(_MAGIC, len(text), len(message)) + text
    message[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        message[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return message


def _starts(offset: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """The aligned offsets of parts with these sizes, the first one after `offset`, and the end of the last
    part.
    """
    starts = []
    for size in sizes:
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        starts.append(offset)
        offset += size
    return starts, offset


def message_bytes(first: NDArray[np.uint8], limit: int) -> int:
    """The length in bytes of the message that begins with `first` (FIRST_BYTES,), which must be at most
    `limit`.

    Raises RankError if it isn't a valid beginning, or if the message is longer.
    """
    magic, text, total = _PREFIX.unpack(first[: _PREFIX.size].tobytes())
    if magic != _MAGIC:
        raise RankError("the rank before sent something else than a message; is another program on its port?")
    if text > MAX_HEADER_BYTES or not FIRST_BYTES <= total <= limit:
        raise RankError(f"the rank before sent a message of {total} bytes; the limit is {limit}")
    return int(total)


def unpack(message: NDArray[np.uint8]) -> tuple[bytes, list[NDArray[Any]]]:
    """The header and the arrays of a complete message. Arrays are views of the message. Raises RankError."""
    _, size, _ = _PREFIX.unpack(message[: _PREFIX.size].tobytes())
    end = _PREFIX.size + size
    text = message[_PREFIX.size : end].tobytes()
    if len(text) != size or size < 4:
        raise RankError("a message ends inside its header")
    (header_bytes,) = struct.unpack_from("<I", text)
    header, table = text[4 : 4 + header_bytes], text[4 + header_bytes :]
    described = _described(table)
    starts, stop = _starts(end, [dtype.itemsize * math.prod(shape) for dtype, shape in described])
    if max(stop, FIRST_BYTES) != len(message):
        raise RankError(f"a message's arrays have {stop} bytes, and it has {len(message)}")
    arrays = []
    for start, (dtype, shape) in zip(starts, described, strict=True):
        nbytes = dtype.itemsize * math.prod(shape)
        arrays.append(message[start : start + nbytes].view(dtype).reshape(shape))
    return header, arrays


def _described(table: bytes) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    """The type and shape of each array, read from a message's table."""
    try:
        parsed = parse_json(table, "a message's table of arrays")
        entries = Section({"arrays": parsed}, "a message").get("arrays")
        if not isinstance(entries, list) or len(entries) > MAX_ARRAYS:
            raise BundleError("a message's table of arrays isn't one")
        described = []
        for entry in entries:
            if not isinstance(entry, list) or len(entry) != 2:
                raise BundleError("an entry of a message's table of arrays isn't a pair")
            one = Section({"dtype": entry[0], "shape": entry[1]}, "an array of a message")
            dtype = _DTYPES[one.one_of("dtype", tuple(_DTYPES))]
            described.append((dtype, one.integers("shape", MAX_DIMENSIONS, 0, MAX_MESSAGE_BYTES)))
    except BundleError as error:
        raise RankError(error.for_command_line) from error
    return described


class MlxTransport:
    """A `Transport` over `mx.distributed`.

    A separate thread sends messages, so that a rank can go on computing while its neighbour hasn't read yet.
    Create it when every rank is about to do so, because MLX waits for the neighbours.
    """

    def __init__(self, backend: str) -> None:
        """Join the ring. backend: an argument of `mx.distributed.init`. MLX reads the rank and addresses from
        the environment.

        Raises BackendUnavailableError without MLX, and RankError if a neighbour can't be reached.
        """
        try:
            import mlx.core as core
        except ImportError as error:
            raise BackendUnavailableError(
                "several machines need MLX for their messages: pip install ondevice[mlx]"
            ) from error
        before = _descriptors()
        try:
            self._group = core.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"the ring can't be joined: {error}") from error
        self._core = core
        self._limit = HANDSHAKE_BYTES
        self.rank, self.size = self._group.rank(), self._group.size()
        self._sent = self._received = HopStats()
        """Counts of the sending and of the receiving thread."""
        self._left, self._right = _ring_ends(_descriptors() - before)
        self._queue: queue.Queue[NDArray[np.uint8] | None] = queue.Queue(QUEUED_MESSAGES)
        self._failure: Exception | None = None
        self._sender = threading.Thread(target=self._send_all, name="ondevice-ring-sender", daemon=True)
        self._sender.start()

    @property
    def stats(self) -> HopStats:
        """Counts of messages so far. Messages that are still queued don't count."""
        sent, received = self._sent, self._received
        return replace(sent, received_bytes=received.received_bytes, waited_seconds=received.waited_seconds)

    def plan(self, nbytes: int) -> None:
        """Accept messages of passes from now on, up to the `nbytes` that the plan has for them. Before, only
        those of the handshake are accepted.

        This limits how much memory a hostile message can make this rank allocate.
        """
        self._limit = min(HANDSHAKE_BYTES + nbytes, MAX_MESSAGE_BYTES)

    def send(self, header: bytes, arrays: Sequence[NDArray[Any]]) -> None:
        self._require_sender()
        self._queue.put(pack(header, arrays))

    def receive(self) -> tuple[bytes, list[NDArray[Any]]]:
        self._require_sender()
        began = time.perf_counter()
        first = np.empty(FIRST_BYTES, dtype=np.uint8)
        self._receive_into(first)
        message = np.empty(message_bytes(first, self._limit), dtype=np.uint8)
        message[:FIRST_BYTES] = first
        self._receive_into(message[FIRST_BYTES:])
        old, waited = self._received, time.perf_counter() - began
        self._received = replace(
            old,
            received_bytes=old.received_bytes + len(message),
            waited_seconds=old.waited_seconds + waited,
        )
        return unpack(message)

    def close(self) -> None:
        """Send what is queued, then end the thread. MLX keeps its connections until the process ends."""
        self._queue.put(None)
        self._sender.join()
        for end in (self._left, self._right):
            if end is not None:
                end.close()

    def _require_sender(self) -> None:
        if self._failure is not None:
            raise RankError(f"a message couldn't be sent: {self._failure}") from self._failure

    def _receive_into(self, target: NDArray[np.uint8]) -> None:
        core, source = self._core, (self.rank - 1) % self.size
        for start in range(0, len(target), PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            _wait_for_bytes(self._left)
            got = core.distributed.recv((len(piece),), core.uint8, source, group=self._group, stream=core.cpu)
            try:
                core.eval(got)
            except RuntimeError as error:
                raise RankError(f"the connection to the rank before is broken: {error}") from error
            piece[:] = np.asarray(got)

    def _send_all(self) -> None:
        """The loop of the sending thread: send what is queued. After a failure it drops messages, so that no
        caller waits.
        """
        while (message := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._send_one(message)
                except (RuntimeError, OSError, MemoryError) as error:
                    self._failure = error

    def _send_one(self, message: NDArray[np.uint8]) -> None:
        core, target = self._core, (self.rank + 1) % self.size
        began = time.perf_counter()
        for start, stop in _pieces(len(message)):
            _wait(self._right, select.POLLOUT)
            piece = core.array(message[start:stop])
            core.eval(core.distributed.send(piece, target, group=self._group, stream=core.cpu))
        old, seconds = self._sent, time.perf_counter() - began
        self._sent = replace(
            old,
            messages=old.messages + 1,
            sent_bytes=old.sent_bytes + len(message),
            sent_seconds=old.sent_seconds + seconds,
        )


def _pieces(total: int) -> list[tuple[int, int]]:
    """The start and end of each piece of a message of `total` bytes: the first FIRST_BYTES, then PIECE_BYTES
    each.
    """
    cuts = [0, *range(FIRST_BYTES, total, PIECE_BYTES), total]
    return list(pairwise(cuts)) if total > FIRST_BYTES else [(0, total)]


def _descriptors() -> set[int]:
    """Descriptors of the open sockets; empty if the system doesn't list them."""
    descriptors = set()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            # The descriptor of the listing itself is closed by now, and another may get its number.
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    descriptors.add(int(name))
    return descriptors


def _ring_ends(opened: set[int]) -> tuple[socket.socket | None, socket.socket | None]:
    """The connections from the previous rank and to the next one, among descriptors that MLX has opened.

    Either is None if MLX uses no connection or several: then MLX does the waiting. MLX leaves sockets of
    failed attempts open, which have no peer.
    """
    left: list[socket.socket] = []
    right: list[socket.socket] = []
    ports = _local_ports()
    for descriptor in opened:
        with suppress(OSError):
            one = socket.socket(fileno=os.dup(descriptor))
            try:
                one.getpeername()
                local_port = one.getsockname()[1]
            except OSError:
                one.close()
                continue
            _watch(one)
            (left if local_port in ports else right).append(one)
    return (left[0] if len(left) == 1 else None), (right[0] if len(right) == 1 else None)


def _watch(end: socket.socket) -> None:
    """Let the system break the connection if the other machine is gone. Otherwise it would stay silent for
    ever.

    The next rank notices within 14 s. TCP_USER_TIMEOUT isn't set: Linux would also break the connection to a
    healthy rank, if that computes for so long that no bytes fit into its socket. Options that this system
    doesn't have are left out.
    """
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for option in options:
        with suppress(OSError):
            end.setsockopt(*option)


def _local_ports() -> set[int]:
    """The ports at which the previous rank reaches this one, read from the file that MLX's ring uses."""
    try:
        ring = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_bytes())
        return {int(address.rpartition(":")[2]) for address in ring[int(os.environ["MLX_RANK"])]}
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, OSError):
        return set()


def _wait(end: socket.socket | None, event: int) -> None:
    """Wait until `select.poll` reports an event at a connection."""
    if end is not None:
        poll = select.poll()
        poll.register(end, event)
        poll.poll()


def _wait_for_bytes(end: socket.socket | None) -> None:
    """Wait for bytes to arrive. Raises RankError if the previous rank is gone, which MLX wouldn't report."""
    _wait(end, select.POLLIN)
    try:
        gone = end is not None and not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        gone = False
    except OSError as error:
        raise RankError(f"the connection to the rank before is broken: {error.strerror}") from error
    if gone:
        raise RankError("the rank before has closed its connection")
