"""A process that converts with a text in forked children, kills them, and resumes; prints one JSON line.

    python kill_while_training.py SOURCE TEXT WORKDIR STEP

Children die before every STEP-th durable step, until one lives to the end.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from tests.support.kill_and_resume import count_down, digest, killed
from tests.support.trained_conversion import convert_and_train


def train(source: Path, text: str, output: Path, prepare: Callable[[], None]) -> None:
    prepare()
    convert_and_train(source, output, text, resume=True)


def main() -> None:
    source, text, workdir = Path(sys.argv[1]), Path(sys.argv[2]).read_text(), Path(sys.argv[3])
    step, output = int(sys.argv[4]), workdir / "bundle"
    killed(lambda: train(source, text, output, lambda: None))
    expected = digest(output)
    report = {"killed": 0, "absent": 0, "different": 0, "left": 0}
    for calls in count(1, step):
        shutil.rmtree(output)
        if not killed(partial(train, source, text, output, partial(count_down, calls, before=True))):
            break
        report["killed"] += 1
        if output.exists():
            report["different"] += digest(output) != expected
        else:
            report["absent"] += 1
        killed(lambda: train(source, text, output, lambda: None))
        report["different"] += digest(output) != expected
        report["left"] += [path.name for path in workdir.iterdir()] != ["bundle"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
