"""Starts the other ranks of `--hosts` through MLX's launcher, and supervises rank 0."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which

from ondevice.bundle.strict_json import Section, parse_json
from ondevice.distributed.hosts import HostFile, read_host_file
from ondevice.distributed.place import CONTROL, FRONT, MAX_RANKS, RankPlace, control_text
from ondevice.distributed.supervisor import supervise
from ondevice.errors import BackendUnavailableError, BundleError, UsageError

END_SECONDS = 3.0
"""Seconds that the launcher has to end by itself."""
_SHOWN_CHARS = 400
_STYLE = re.compile(r"\x1b\[[\d;]*m")
"""Terminal colour codes, which mlx.launch prints."""
_MAX_ARGUMENTS, _MAX_CHARS = 64, 1 << 16


def start_ranks(path: str, arguments: Sequence[str]) -> None:
    """Check a host file, and prepare this command to start again as rank 0's supervisor.

    arguments: the command-line arguments of `ondevice` on the other ranks. The caller raises StartAgainError.
    Raises UsageError and BackendUnavailableError.
    """
    _hosts(path)
    _launcher_command()
    os.environ[FRONT] = json.dumps([path, *arguments])


def launch(text: str) -> int:
    """Start the ranks of a host file, supervise rank 0 until all end, and return the exit code.

    text: what `start_ranks` stored in the environment.
    """
    del os.environ[FRONT]
    try:
        section = Section({FRONT: parse_json(text.encode(), FRONT)}, "the environment")
        path, *arguments = section.texts(FRONT, _MAX_ARGUMENTS, _MAX_CHARS)
    except (BundleError, ValueError) as error:
        raise UsageError(f"{error}; only ondevice itself sets {FRONT}") from error
    hosts = _hosts(path)
    # Before the engine starts, which has this environment.
    os.environ.update(dict(each.split("=", 1) for each in hosts.envs))
    ip = hosts.hosts[0].ips[0]
    try:
        listener = socket.create_server((ip, 0))
    except OSError as error:
        raise UsageError(
            f"{ip}, the first address of the host file {path}, isn't one of this machine: {error.strerror}; "
            "start the command on the first host"
        ) from error
    place = RankPlace(0, len(hosts.hosts), (ip, listener.getsockname()[1]), secrets.token_hex(8))
    return supervise(place, listener, MlxLauncher(hosts, place, arguments))


def _hosts(path: str) -> HostFile:
    hosts = read_host_file(path)
    if not 2 <= len(hosts.hosts) <= MAX_RANKS:
        raise UsageError(
            f"the host file {path} names {len(hosts.hosts)} host; --hosts takes 2 to {MAX_RANKS} of them"
        )
    return hosts


def _launcher_command() -> list[str]:
    sibling = Path(sys.executable).with_name("mlx.launch")
    launcher = str(sibling) if sibling.is_file() else which("mlx.launch")
    if launcher is None:
        raise BackendUnavailableError("--hosts needs MLX and its mlx.launch: pip install ondevice[mlx]")
    return [sys.executable, launcher]


class MlxLauncher:
    """Runs `mlx.launch` for all ranks except 0, which has the terminal.

    mlx.launch keeps a core busy while it waits. Once the ranks run, it has nothing to do, so it is stopped
    until the end. It gets a separate process group, so that Ctrl-C reaches only rank 0, and so that the
    system ends the stopped group if its parent dies.
    """

    def __init__(self, hosts: HostFile, place: RankPlace, arguments: Sequence[str]) -> None:
        self._hosts = hosts.hosts
        handle, self._file = tempfile.mkstemp(prefix="ondevice-hosts-", suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump([{"ssh": host.ssh, "ips": host.ips} for host in self._hosts[1:]], file)
        told = f"{CONTROL}={control_text(place.control, place.size, place.token)}"
        variables = [f"--env={each}" for each in (*hosts.envs, told)]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MLX_")}
        command = [sys.executable, "-P", "-m", "ondevice", *arguments]
        self._process = subprocess.Popen(
            [*_launcher_command(), "--hostfile", self._file, "--backend", "ring", *variables, "--", *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            process_group=0,
        )
        self.pid = self._process.pid

    def failure(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        names = ", ".join(dict.fromkeys(host.ssh for host in self._hosts[1:]))
        return (
            f"mlx.launch, which counts hosts from the second on, ended with the exit code {code} and said: "
            f"{self._last_output()}. Check that ssh reaches {names} without asking for a password, and that "
            f"`{sys.executable} -m ondevice --version` runs there"
        )

    def _last_output(self) -> str:
        """The last lines that the launcher and the ranks printed."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _SHOWN_CHARS))
        said = _STYLE.sub("", self._output.read().decode(errors="replace")).strip()
        return said or "it said nothing"

    def joined(self) -> None:
        os.unlink(self._file)
        self._signal(signal.SIGSTOP, self._process.pid)

    def budget(self, rank: int) -> str:
        return self._hosts[rank].dram_budget or ""

    def ring_ip(self, rank: int) -> str:
        return self._hosts[rank].ips[0]

    def end(self) -> str:
        self._signal(signal.SIGCONT, self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        # Ranks of this machine that are stopped are in its group too.
        self._signal(signal.SIGKILL, -self._process.pid)
        self._process.wait()
        with suppress(FileNotFoundError):
            os.unlink(self._file)
        return self._last_output()

    def _signal(self, number: signal.Signals, target: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(target, number)
