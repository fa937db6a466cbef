"""A process that converts a repository in forked children, kills them, and resumes; prints one JSON line.

    HF_ENDPOINT=... python -m tests.support.kill_while_downloading REPOSITORY WORKDIR KILLS SEED

Children die at a durable step, at a piece of an answer, or at a random time.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# All that a conversion imports, once for all children.
import ondevice.converters.convert
import ondevice.converters.hub.opening  # noqa: F401
from ondevice import api
from ondevice.converters.hub.client import PartStream
from tests.support.kill_and_resume import count_down, die, die_after, digest, killed


def die_at_piece(pieces: int) -> None:
    """Die when this many pieces of answers have been read from now on."""
    left, real = [pieces], PartStream.read_some

    def read_some(stream: PartStream, view: memoryview) -> int:
        left[0] -= 1
        if left[0] == 0:
            die()
        return real(stream, view)

    PartStream.read_some = read_some  # type: ignore[method-assign]


def main() -> None:
    repository, workdir, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    moments = random.Random(int(sys.argv[4]))
    output = workdir / "bundle"

    def died(prepare: Callable[[], Any]) -> bool:
        def work() -> None:
            prepare()
            api.convert(repository, output, resume=True)

        return killed(work)

    started = time.monotonic()
    died(lambda: None)
    whole_seconds = time.monotonic() - started
    expected = digest(output)
    report = {"killed": 0, "resumed": 0, "different": 0, "left": 0}
    while report["killed"] < kills:
        shutil.rmtree(output)
        for _ in range(moments.randint(1, 3)):
            number = moments.randint(1, 40)
            ways: list[Callable[[], Any]] = [
                lambda n=number: count_down(n, n % 2 == 1),  # type: ignore[misc]
                lambda n=number: die_at_piece(2 * n),  # type: ignore[misc]
                die_after(moments.uniform(0.0, whole_seconds)),
            ]
            report["killed"] += died(moments.choice(ways))
        died(lambda: None)
        report["resumed"] += 1
        report["different"] += digest(output) != expected
        report["left"] += [path.name for path in workdir.iterdir()] != ["bundle"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
