"""The server's options with their defaults, and the limits that no option changes."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from ondevice.config import MAX_PARALLEL
from ondevice.errors import UsageError
from ondevice.records import dataclass

MAX_BODY_BYTES = 2 << 20
"""Most bytes of a request's body."""
SMALL_BODY_BYTES = 64 << 10
"""Bytes of a body that are always taken, so that large or slow ones keep no small one out."""
MAX_HELD_BYTES = 4 << 20
"""Most bytes of all bodies that are read or answered at once, without the first SMALL_BODY_BYTES of each."""
MAX_HEADER_BYTES = 16 << 10
"""Most bytes of a request's path, query and headers."""
MAX_DEPTH = 32
"""Most JSON arrays and objects inside each other."""
MAX_VALUES = 100_000
"""Most values of a body's JSON, about 10 MB of memory once parsed."""
MAX_CONNECTIONS = 128
HEADER_SECONDS = 10.0
"""Longest time for a request's headers to arrive."""
BODY_SECONDS = 30.0
"""Longest time for a body to arrive."""
STALL_SECONDS = 5.0
"""Longest time without a byte of an incomplete body."""
SEND_SECONDS = 60.0
"""Longest time for which a client may read nothing of its answer."""
STOP_SECONDS = 5
"""Time in which running answers may end by themselves once the server stops."""
PING_SECONDS = 10.0
"""Longest silence of a streamed answer, from the request on."""


@dataclass(frozen=True)
class ServeConfig:
    """Where the server listens, and which requests it takes."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: a free port, which the log names."""
    api_key: str = ""
    """The bearer token or x-api-key that a request must have; empty: none."""
    queue: int = 16
    """Requests that may wait. More are refused with 429, except one of each client that has none waiting, up
    to as many again."""
    parallel: int = 4
    """Requests that generate at once and share forward passes."""
    allow_host: tuple[str, ...] = ()
    """Names by which the server may be called, in addition to localhost, `host` and addresses."""
    allow_origin: tuple[str, ...] = ()
    """Origins of pages elsewhere that may call the server, such as https://chat.example.com."""
    alias: tuple[str, ...] = ()
    """Other names of models as PATTERN=NAME, such as claude-*=qwen2.5-coder-1.5b. The first that matches
    counts."""
    strict: bool = False
    """Whether a field that no part of the server knows is an error, instead of ignored."""
    warm: tuple[str, ...] = ()
    """Files of requests whose prompts are read as the server starts."""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_keyfile_password: str = ""

    def __post_init__(self) -> None:
        """Check all values. Raises UsageError for one out of range."""
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}; it must be from 0 to 65535")
        if not 0 <= self.queue <= 10_000:
            raise UsageError(f"--queue is {self.queue}; it must be from 0 to 10000")
        if not 1 <= self.parallel <= MAX_PARALLEL:
            raise UsageError(f"--parallel is {self.parallel}; it must be from 1 to {MAX_PARALLEL}")
        if not self.host:
            raise UsageError("--host is empty; give a name or an address")
        if not self.api_key.isascii():
            raise UsageError("--api-key has characters beyond ASCII, which no header can carry")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UsageError("--ssl-keyfile has no meaning without --ssl-certfile")

    def aliases(self, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """The aliases as pairs of a pattern and a model's name. Raises UsageError for an alias that names no
        model.
        """
        pairs = []
        for each in self.alias:
            # Models' names may have the sign too; patterns hardly.
            pattern, sign, name = each.partition("=")
            if not (pattern and sign and name):
                raise UsageError(f"--alias is {each!r}; it must be PATTERN=NAME, such as claude-*={names[0]}")
            if name not in names:
                raise UsageError(f"--alias {each} names no model that is served: {', '.join(names)}")
            pairs.append((pattern, name))
        return tuple(pairs)

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
