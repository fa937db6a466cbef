"""The host file: the machines that run a model together, in MLX's own format with a budget per host.

MLX's format (https://ml-explore.github.io/mlx/build/html/usage/distributed.html) is a list of hosts, or an
object with `hosts`, `backend` and `envs`. A host has `ssh` and `ips`; here it may also have `dram_budget`.
`rdma`, which MLX uses for Thunderbolt, is allowed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ondevice.bundle.files import read_file
from ondevice.bundle.strict_json import Section, parse_json
from ondevice.distributed.place import MAX_RANKS
from ondevice.errors import BudgetError, BundleError, UsageError
from ondevice.records import dataclass
from ondevice.units import parse_budget

MAX_ENTRIES = 64
"""Most addresses of a host, and most variables of `envs`."""
MAX_FILE_BYTES = 1 << 16
MAX_TEXT = 256
"""Most characters of a text in a host file."""
_SSH = re.compile(r"(?!-)[\w.@:%\[\]-]{1,256}", re.ASCII)
"""Pattern of `ssh` destinations. One that begins with a hyphen would be an option."""
_VARIABLE = re.compile(r"[A-Za-z_]\w{0,63}=[ -~]{0,1024}", re.ASCII)
RING = "ring"
"""MLX's distributed backend over TCP."""


@dataclass(frozen=True)
class HostEntry:
    """One machine of a host file.

    `ssh` is the name by which ssh reaches it, `ips` are its addresses for activations, the first of them for
    control too. `dram_budget` is a size as `--dram-budget` takes it, or None for the default on that machine.
    """

    ssh: str
    ips: tuple[str, ...]
    dram_budget: str | None = None


@dataclass(frozen=True)
class HostFile:
    """A host file: its hosts, and `envs`, environment variables for every rank (`NAME=value`)."""

    hosts: tuple[HostEntry, ...]
    envs: tuple[str, ...] = ()


def read_hosts(path: str | Path) -> tuple[HostEntry, ...]:
    """The hosts in a host file, rank 0 first. Raises UsageError, which names the file and what is wrong in
    it.
    """
    return read_host_file(path).hosts


def read_host_file(path: str | Path) -> HostFile:
    """All of a host file's content. Raises UsageError, which names the file and what is wrong in it."""
    path = Path(path).expanduser()
    where = f"the host file {path}"
    if not path.is_file():
        raise UsageError(f"there is no host file {path}")
    try:
        hosts = _host_file(parse_json(read_file(path, MAX_FILE_BYTES), where), where)
    except BundleError as error:
        raise UsageError(f"{error.for_command_line}") from error
    except OSError as error:
        raise UsageError(f"{where} can't be read: {error.strerror or error}") from error
    return hosts


@contextmanager
def named_budget(budget: str) -> Iterator[None]:
    """A context whose BudgetErrors say that the budget comes from the host file, unless `budget` is ""."""
    try:
        yield
    except BudgetError as error:
        if not budget:
            raise
        origin = (
            f"This rank's budget is the dram_budget {budget!r} of its host in the host file, which "
            "goes before --dram-budget: change it there."
        )
        raise BudgetError(f"{error.for_command_line} {origin}", error.required_bytes) from error


def _host_file(value: Any, where: str) -> HostFile:
    if isinstance(value, list):
        value = {"hosts": value}
    top = Section(value, where)
    hosts = tuple(_host(each) for each in top.sections("hosts", MAX_RANKS))
    if not hosts:
        raise UsageError(f"{where} names no hosts; it needs at least two for a model to be split")
    backend = top.text("backend", MAX_TEXT) if "backend" in top.names else RING
    if backend != RING:
        raise UsageError(
            f"{where} asks for the backend {backend!r}; machines share a model over MLX's {RING} alone: "
            "leave the backend out"
        )
    envs = top.texts("envs", MAX_ENTRIES, MAX_TEXT) if "envs" in top.names else ()
    top.close()
    for each in envs:
        if not _VARIABLE.fullmatch(each):
            raise UsageError(f"{where} has {each!r} in envs; it must be NAME=value")
    return HostFile(hosts, envs)


def _host(section: Section) -> HostEntry:
    ssh = section.text("ssh", MAX_TEXT)
    if not _SSH.fullmatch(ssh):
        raise UsageError(f"{section.where}.ssh is {ssh!r}; it must be a host's name or address, as ssh takes")
    ips = section.texts("ips", MAX_ENTRIES, MAX_TEXT)
    if not ips:
        raise UsageError(f"{section.where}.ips is empty; the ring needs an address of each host")
    for each in ips:
        _require_address(each, section.where)
    budget = _budget(section) if "dram_budget" in section.names else None
    if "rdma" in section.names:
        section.get("rdma")
    section.close()
    return HostEntry(ssh, ips, budget)


def _require_address(text: str, where: str) -> None:
    try:
        ipaddress.IPv4Address(text)
    except ValueError as error:
        raise UsageError(f"{where}.ips has {text!r}; MLX's ring takes IPv4 addresses only") from error


def _budget(section: Section) -> str:
    """A host's `dram_budget`: a text or a number of bytes. Percentages refer to that host's memory."""
    value = section.get("dram_budget")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError(f"{section.where}.dram_budget must be a size such as 4GB, or a number of bytes")
    try:
        parse_budget(value, auto=0)
    except UsageError as error:
        raise UsageError(f"{section.where}.dram_budget: {error.for_command_line}") from error
    return str(value).strip()
