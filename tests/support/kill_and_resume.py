"""A process that converts in forked children, kills them in the middle, and resumes; prints one JSON line.

    python kill_and_resume.py SOURCE WORKDIR QUANT KILLS SEED

Children die at a chosen system call (an fsync, a rename, a write) or at a random time, so kills fall between
any two durable steps and not only where the time goes. Forking saves importing everything for each child.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ondevice.converters.convert import convert


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DURABLE = ("fsync", "replace", "rename", "unlink", "mkdir")


def count_down(calls: int, before: bool, steps: Sequence[str] = DURABLE) -> None:
    """Die at the `calls`-th step from now: after it, before it, or half way through it if it is a write."""
    left = [calls]

    def watched(name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and before:
                if name == "pwrite":
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                die()
            result = real(*args, **options)
            if left[0] == 0:
                die()
            return result

        setattr(os, name, call)

    for name in steps:
        watched(name)


def child(source: Path, output: Path, quant: str, prepare: Callable[[], None]) -> bool:
    """Convert in a fork, resuming what is there. Whether it was killed; other failures end this process."""

    def work() -> None:
        prepare()
        convert(source, output, quant, resume=True)

    return killed(work)


def killed(work: Callable[[], object]) -> bool:
    """Whether a fork that does the work was killed; other failures end this process."""
    process = os.fork()
    if process == 0:
        work()
        os._exit(0)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status:
        sys.exit(f"a child ended with status {status}")
    return False


def die_after(seconds: float) -> Callable[[], None]:
    def prepare() -> None:
        timer = threading.Timer(seconds, die)
        timer.daemon = True
        timer.start()

    return prepare


def digest(folder: Path) -> str:
    result = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        result.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return result.hexdigest()


def main() -> None:
    source, workdir, quant = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    kills, moments = int(sys.argv[4]), random.Random(int(sys.argv[5]))
    output = workdir / "bundle"
    started = time.monotonic()
    child(source, output, quant, lambda: None)
    whole_seconds = time.monotonic() - started
    expected = digest(output)
    report = {"killed": 0, "resumed": 0, "different": 0, "left": 0}
    while report["killed"] < kills:
        shutil.rmtree(output)
        # Up to three kills in a row before it may end.
        for _ in range(moments.randint(1, 3)):
            if moments.random() < 0.7:
                calls = moments.randint(1, 40)
                died = child(source, output, quant, lambda calls=calls: count_down(calls, calls % 2 == 1))  # type: ignore[misc]
            else:
                died = child(source, output, quant, die_after(moments.uniform(0.0, whole_seconds)))
            report["killed"] += died
            if died and output.exists():
                report["different"] += digest(output) != expected
        child(source, output, quant, lambda: None)
        report["resumed"] += 1
        report["different"] += digest(output) != expected
        report["left"] += [path.name for path in workdir.iterdir()] != ["bundle"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
