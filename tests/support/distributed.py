"""Ranks as processes of this machine."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MARK = "ONDEVICE_TEST_RANKS"
"""Variable by whose value the processes of a run are found, whatever became of their parents."""

_PORTS = (10_000, 30_000)
"""Least and most of ports that are taken."""


def free_ports(count: int) -> list[int]:
    """Neighbouring ports of the loopback address at which nothing listens, nor behind them.

    They are below those that the system gives to connections: one of another process would take them before a
    rank listens.
    """
    while True:
        ports = range(first := random.randint(*_PORTS), first + count)
        if all(map(_is_free, (*ports, first + count))):
            return list(ports)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True


def ring_environments(folder: Path, ranks: int) -> list[dict[str, str]]:
    """Environments in which MLX's ring joins processes of this machine, one per rank."""
    hosts = folder / "ring.json"
    # The control channel takes the port behind the last.
    ports = free_ports(ranks)
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    mark = {MARK: str(hosts), "PYTHONUNBUFFERED": "1"}
    return [
        {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), **mark} for rank in range(ranks)
    ]


@dataclass
class RankProcess:
    """The process of a rank, which is a supervisor, and what it says."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def engine(self, seconds: float = 20.0) -> int:
        """Process id of its engine, once there is one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            if found:
                return int(found[0])
            time.sleep(0.02)
        raise AssertionError(f"no engine: {self.said}")

    @property
    def printed(self) -> str:
        """What it has written to stdout."""
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()

    @property
    def said(self) -> str:
        """What it has written to stderr."""
        return os.pread(self.errors.fileno(), 1 << 20, 0).decode()


def start_ranks(
    environments: Sequence[dict[str, str]], arguments: Sequence[Sequence[str]], typed: bytes = b""
) -> list[RankProcess]:
    """Start a Python process per rank with these arguments. typed: rank 0's stdin."""
    found = []
    for environment, one in zip(environments, arguments, strict=True):
        output, errors, stdin = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
        stdin.write(typed)
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, *one], env=environment, stdin=stdin, stdout=output, stderr=errors
        )
        stdin.close()
        found.append(RankProcess(process, output, errors))
    return found


def left_over(mark: str) -> list[int]:
    """Processes of a run that are still there."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}\0".encode() in environment:
                found.append(int(folder.name))
    return found


def wait_for_all(ranks: Sequence[RankProcess], seconds: float) -> float:
    """Wait for all supervisors to end, and return the seconds that it took. Fails after `seconds`."""
    began = time.monotonic()
    for rank in ranks:
        rank.process.wait(max(0.0, began + seconds - time.monotonic()))
    return time.monotonic() - began
