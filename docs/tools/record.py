"""Run the example that docs/memory.md shows, and write what it prints today below its command.

    python docs/tools/record.py

A test runs it too and compares: the text word for word, the rest but for its numbers.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "memory.md"
_EXAMPLE = re.compile(
    r'^    \$ printf "(?P<typed>.*)" \| make chat CHAT_ARGS="(?P<options>.*)"\n'
    r"(?P<output>(?:    .*\n|RECORDED\n)+)",
    re.MULTILINE,
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?: ?(?:[kMG]?B|%))?")
_OPTIONAL = re.compile(r"; prefetched [^;]*| feed-forward, resident [^,]*,")
"""What a run may lack: in so small a budget a larger process leaves no feed-forward its memory."""


def example(page: str) -> re.Match[str]:
    """The command and its output, as they stand in the page."""
    match = _EXAMPLE.search(page)
    assert match is not None, "docs/memory.md shows no recorded run"
    return match


def run(match: re.Match[str]) -> str:
    """What the command of `example` prints on both streams, by our own kernels."""
    typed = str(match["typed"]).replace("\\n", "\n")
    done = subprocess.run(
        [sys.executable, "-m", "real_models.chat", *shlex.split(match["options"])],
        input=typed,
        env=os.environ | {"PYTHONPATH": str(ROOT / "weights" / "real"), "ONDEVICE_BACKEND": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def words(output: str) -> str:
    """The output without what differs from run to run."""
    return _NUMBER.sub("N", _OPTIONAL.sub("", output))


def main() -> None:
    """Record it anew."""
    page = PAGE.read_text(encoding="utf-8")
    match = example(page)
    output = "".join(f"    {line}\n" for line in run(match).splitlines())
    start, stop = match.span("output")
    PAGE.write_text(page[:start] + output + page[stop:], encoding="utf-8")


if __name__ == "__main__":
    main()
