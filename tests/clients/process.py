"""`ondevice serve` as a process of its own, whose log goes to a file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

START_SECONDS = 300.0


@dataclass(frozen=True)
class Served:
    """A server process. url: where it listens. log: the file of its log."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def events(self) -> list[dict[str, Any]]:
        """Its log until now."""
        return _events(self.log)

    def computed_tokens(self) -> int:
        """Tokens of prompts that it computed for generations that ended."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        named = (line.split() for line in lines if line.startswith("llamacpp:prompt_tokens_total "))
        return int(float(next(named)[1]))

    def peak_bytes(self) -> int:
        """The most memory that the process has had resident, as Linux counts it."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@contextmanager
def served(bundle: Path, log: Path, *options: object) -> Iterator[Served]:
    """A server of the bundle on a free port. Raises RuntimeError where it doesn't start."""
    command = [sys.executable, "-m", "ondevice", "serve", "--port", "0", *map(str, options), str(bundle)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT)
    try:
        yield Served(_listening(log, process), log, process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listening(log: Path, process: subprocess.Popen[bytes]) -> str:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        for event in _events(log):
            if event.get("event") == "listening":
                return str(event["url"])
        time.sleep(0.1)
    raise RuntimeError(f"the server didn't start: {log.read_text()[-2000:]}")


def _events(log: Path) -> list[dict[str, Any]]:
    found = []
    for line in log.read_text().splitlines():
        if line.startswith("{") and line.endswith("}"):
            found.append(json.loads(line))
    return found
