"""A process's place among the ranks, read from environment variables.

Imports little, because supervisors must stay small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ondevice.bundle.strict_json import Section, parse_json
from ondevice.errors import BundleError, RankError, UsageError
from ondevice.records import dataclass

CHILD, CONTROL, FRONT = "ONDEVICE_CHILD", "ONDEVICE_CONTROL", "ONDEVICE_FRONT"
"""Variables that processes of `ondevice` set for each other: for a supervised engine, for the supervisor of a
launched rank, and for the supervisor that launches the others."""
MAX_RANKS = 64
MAX_PORT = 65535
COMMANDS = ("chat", "generate", "serve", "bench")
"""Commands that several ranks run together."""
_MAX_TEXT = 64
_SIZES = {"MLX_RANK": "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
"""Variables with the rank and the number of ranks under mlx.launch's other backends."""
VARIABLES = {CHILD, CONTROL, FRONT, *_SIZES}
"""Variables of which every process among several ranks has one."""


@dataclass(frozen=True)
class RankPlace:
    """A process's rank among `size`, and the address of rank 0's supervisor. `addresses`: those of the ring,
    if known.
    """

    rank: int
    size: int
    control: tuple[str, int]
    token: str = ""
    addresses: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class EnginePlace:
    """The place of an engine among the ranks.

    fd: descriptor of the connection to its supervisor. dram_budget: the budget in the host file, or "" if it
        has none.
    other_process_bytes: memory of its supervisor, and of what started the other ranks.
    """

    rank: int
    size: int
    fd: int
    dram_budget: str = ""
    other_process_bytes: int = 0

    def to_text(self) -> str:
        """The place as a text for an environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> EnginePlace:
        """The place described by the text that `to_text` returned. Raises UsageError for any other text."""
        try:
            section = Section(parse_json(text.encode(), CHILD), CHILD)
            budget = section.get("dram_budget") and section.text("dram_budget", _MAX_TEXT)
            size = section.integer("size", 2, MAX_RANKS)
            rank, fd = section.integer("rank", 0, size - 1), section.integer("fd", 3, 1 << 20)
            return cls(rank, size, fd, budget, section.integer("other_process_bytes", 0, 1 << 40))
        except BundleError as error:
            raise UsageError(f"{error.for_command_line}; only ondevice itself sets {CHILD}") from error


def control_text(control: tuple[str, int], size: int, token: str) -> str:
    """The value of the environment variable CONTROL for ranks that are launched."""
    return f"{control[0]}:{control[1]}/{size}/{token}"


def find_place(environment: Mapping[str, str]) -> RankPlace | None:
    """The place of a process that was started by `--hosts`, or by mlx.launch with its ring; None for a single
    process.

    Raises UsageError for variables that contradict each other, and for ranks without a ring, since each of
    them would run the complete model alone.
    """
    rank = environment.get("MLX_RANK")
    if CONTROL in environment:
        return _launched(environment[CONTROL], rank)
    if not rank or not environment.get("MLX_HOSTFILE"):
        _require_alone(environment)
        return None
    ring = _ring(environment["MLX_HOSTFILE"])
    if len(ring) < 2:
        return None
    place = _rank(rank, len(ring), "MLX_RANK")
    ip = ring[0][0].rpartition(":")[0]
    # The first port that the ring leaves free.
    port = 1 + max(int(address.rpartition(":")[2]) for addresses in ring for address in addresses)
    return RankPlace(place, len(ring), (ip, port), "", ring)


def _require_alone(environment: Mapping[str, str]) -> None:
    for name, size in _SIZES.items():
        if environment.get(name) and environment.get(size) != "1":
            raise UsageError(
                f"{name} is set, and MLX_RANK with MLX_HOSTFILE isn't: several machines share a model over "
                "MLX's ring alone. Start the command with --hosts FILE, or under mlx.launch --backend ring; "
                f"to run it by itself, unset {name}"
            )


def _launched(text: str, rank: str | None) -> RankPlace:
    address, _, rest = text.partition("/")
    size, _, token = rest.partition("/")
    ip, _, port = address.rpartition(":")
    if not (ip and _is_number(port) and _is_number(size) and 2 <= int(size) <= MAX_RANKS):
        raise UsageError(f"{CONTROL} is {text[:80]!r}; it must be address:port/ranks/token")
    # mlx.launch counts the ranks that it starts, and rank 0 isn't among them.
    place = _rank(rank or "", int(size) - 1, "MLX_RANK") + 1
    return RankPlace(place, int(size), (ip, int(port)), token)


def _rank(text: str, size: int, name: str) -> int:
    if not _is_number(text) or int(text) >= size:
        raise UsageError(f"{name} is {text[:40]!r}; it must be a number below {size}, the number of ranks")
    return int(text)


def _ring(path: str) -> tuple[tuple[str, ...], ...]:
    try:
        data = Path(path).read_bytes()[: 1 << 20]
    except OSError as error:
        raise UsageError(f"MLX_HOSTFILE names {path}, which can't be read: {error.strerror}") from error
    # mlx.launch writes an empty file for one host.
    if not data.strip():
        return ()
    try:
        return checked_ring(parse_json(data, path))
    except (BundleError, RankError) as error:
        raise UsageError(f"MLX_HOSTFILE: {error.for_command_line}") from error


def checked_ring(value: object) -> tuple[tuple[str, ...], ...]:
    """The ring's addresses, `ip:port` for each rank, checked. Raises RankError for an invalid value."""
    if not isinstance(value, list) or len(value) > MAX_RANKS:
        raise RankError(f"the ring must be a list of at most {MAX_RANKS} lists of addresses")
    ring = []
    for addresses in value:
        if not isinstance(addresses, list) or not 1 <= len(addresses) <= MAX_RANKS:
            raise RankError("each rank of the ring must have a list of addresses")
        ring.append(tuple(_address(each) for each in addresses))
    return tuple(ring)


def _address(value: object) -> str:
    if isinstance(value, str) and len(value) <= 300 and value.isprintable():
        ip, _, port = value.rpartition(":")
        if _is_ipv4(ip) and _is_number(port) and 0 < int(port) <= MAX_PORT:
            return value
    raise RankError(f"{str(value)[:80]!r} is not an address of the ring; it must be ip:port, of IPv4")


def _is_ipv4(text: str) -> bool:
    """True for four decimal numbers without leading zeros, which is all that MLX reads."""
    parts = text.split(".")
    return len(parts) == 4 and all(_is_number(it) and int(it) < 256 and str(int(it)) == it for it in parts)


def _is_number(text: str) -> bool:
    """True for one to five ASCII digits. `isdecimal` would also accept digits of other scripts, which MLX
    can't read.
    """
    return text.isascii() and text.isdecimal() and len(text) <= 5
