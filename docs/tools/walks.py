"""Count the Python files that three walks through the code touch, by following calls as they happen.

    python docs/tools/walks.py [--files] [--write]

Each walk is a real run of the model that ships, on one thread of computing. A file counts for a walk if one
of its functions runs there:

- `budget`: `ondevice chat --dram-budget`, from the command line to the first attention of the first layer.
  Of the functions that run on the way, those count that name a budget, a plan, an allowance or a
  segment, with their callers, and the callers of that attention.
- `neuron`: the feed-forward blocks of a few tokens in predicted mode under the smallest budget, with neurons
  that are missing and read from flash.
- `token`: turns of the decode loop in which draft tokens are accepted, from the drafter to the text's events,
  on the thread that decodes. What runs inside the forward pass doesn't count.

C++ sources aren't traced; docs/architecture.md names those of each walk. The script knows the engine by a few
functions' names (MARKS), so that it counts an older tree too: run it with that tree's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ABOUT_BUDGETS = re.compile(r"budget|plan(?!e|t)|allowance|segment", re.IGNORECASE)
MARKS = {
    "attention": ("model/attention.py", "attention"),
    "feed_forward": ("model/ffn.py", "feed_forward"),
    "forward": ("model/transformer.py", "run"),
    "turn": ("generate.py", "_decode"),
}
PAGE = Path(__file__).resolve().parents[1] / "architecture.md"
ROWS = {"budget": "a budget, from", "neuron": "a neuron, from", "token": "a draft token, from"}
"""How each walk's row of the table there begins."""
QUESTION = "I'm looking for a cheap Italian restaurant in Oakland.\n"
REPEATED = "The cat sat on the mat. The dog sat on the mat. " * 2 + "The"


class Walk:
    """The files of one walk, as the profiler of every thread sees calls."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.done = False
        self._root = ""

    def seen(self, frame: FrameType) -> None:
        """A function of ondevice is about to run."""
        raise NotImplementedError

    def returned(self, frame: FrameType) -> None:
        """One has ended, or yields."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        import ondevice

        self._root = str(Path(ondevice.__file__).resolve().parents[1]) + os.sep
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def name(self, code: CodeType) -> str | None:
        """The file's path in the project, if it is one of the product's."""
        path = os.path.realpath(code.co_filename)
        # A module or a class that is being defined has no such flag.
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if not path.startswith(self._root) or not is_function:
            return None
        path = path.removeprefix(self._root)
        return path if path.startswith(("ondevice/", "converters/", "cli.py")) else None

    def is_at(self, frame: FrameType, mark: str) -> bool:
        path, function = MARKS[mark]
        return frame.f_code.co_name == function and frame.f_code.co_filename.endswith(path)

    def add(self, code: CodeType) -> None:
        if (name := self.name(code)) is not None:
            self.files.add(name)

    def add_stack(self, frame: FrameType | None) -> None:
        while frame is not None:
            self.add(frame.f_code)
            frame = frame.f_back

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.done and event in ("call", "return"):
            (self.seen if event == "call" else self.returned)(frame)


class BudgetWalk(Walk):
    """From the command line to the first attention."""

    def seen(self, frame: FrameType) -> None:
        if self.is_at(frame, "attention"):
            self.add_stack(frame)
            self.done = True
        elif self.name(frame.f_code) and ABOUT_BUDGETS.search(" ".join(_words(frame.f_code))):
            self.add_stack(frame)


class NeuronWalk(Walk):
    """The feed-forward of every layer, while `armed`."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self._top: FrameType | None = None
        self._thread = 0

    def seen(self, frame: FrameType) -> None:
        if self.armed and self._top is None and self.is_at(frame, "feed_forward"):
            self._top, self._thread = frame, threading.get_ident()
        if self._top is not None and threading.get_ident() == self._thread:
            self.add(frame.f_code)

    def returned(self, frame: FrameType) -> None:
        if frame is self._top:
            self._top = None


class TokenWalk(Walk):
    """Whole turns of the decode loop on their thread, each to where the next begins; not the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = 0
        self._turn: set[str] = set()
        self._forward: FrameType | None = None

    def seen(self, frame: FrameType) -> None:
        if self.is_at(frame, "turn"):
            self.files |= self._turn
            self._turn, self._thread = set(), threading.get_ident()
        if self._forward is None and threading.get_ident() == self._thread:
            if (name := self.name(frame.f_code)) is not None:
                self._turn.add(name)
            if self.is_at(frame, "forward"):
                self._forward = frame

    def returned(self, frame: FrameType) -> None:
        if frame is self._forward:
            self._forward = None


def _words(code: CodeType) -> Iterator[str]:
    yield from (code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars)


def budget_walk() -> set[str]:
    """Files between `chat --dram-budget` and the first layer."""
    from ondevice.cli import run

    walk = BudgetWalk()
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(QUESTION.encode()))
    try:
        with watching_quietly(walk):
            code = run(["chat", "--dram-budget", "150MB", "--max-tokens", "4", "--threads", "1"])
    finally:
        sys.stdin = stdin
    assert code == 0
    assert walk.done, "no attention ran: MARKS is out of date"
    return walk.files


@contextlib.contextmanager
def watching_quietly(walk: Walk) -> Iterator[None]:
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with out, err, walk.watching():
        yield


def neuron_walk() -> set[str]:
    """Files between a layer's feed-forward and its result."""
    import ondevice

    walk = NeuronWalk()
    options: dict[str, Any] = {"sparsity": "predicted", "speculation": "off", "threads": 1}
    least = ondevice.inspect(**options).minimum_budget_bytes
    with watching_quietly(walk), ondevice.load(dram_budget=least, **options) as model:
        for event in model.stream(REPEATED, max_tokens=96, temperature=0.8, seed=1):
            walk.armed = event.finish_reason is None
        assert model.stats.flash_bytes_read > 0
    assert walk.files, "no feed-forward ran: MARKS is out of date"
    return walk.files


def token_walk() -> set[str]:
    """Files between a drafter's proposal and the text's events, without the forward pass."""
    import ondevice

    walk = TokenWalk()
    with watching_quietly(walk), ondevice.load(speculation="lookup", threads=1) as model:
        # Enough turns for every choice of the policy, whatever the clock says.
        model.generate(REPEATED, max_tokens=96)
        assert model.stats.accepted_tokens_per_pass > 1.0, "no draft token was accepted"
    assert walk.files, "no turn ran: MARKS is out of date"
    return walk.files


WALKS = {"budget": budget_walk, "neuron": neuron_walk, "token": token_walk}


def main() -> None:
    """Print one line per walk, its files if asked for, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list the files of each walk")
    parser.add_argument("--write", action="store_true", help="bring docs/architecture.md up to date")
    arguments = parser.parse_args()
    counts = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["ONDEVICE_HOME"] = home
        for name, walk in WALKS.items():
            files = sorted(walk())
            counts[name] = len(files)
            if arguments.files:
                print(f"{name}:", *(f"  {file}" for file in files), sep="\n")
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_counts(page, counts), encoding="utf-8")
    print(json.dumps(counts))


def with_counts(page: str, counts: dict[str, int]) -> str:
    """The page with these counts in the last column of its table."""
    for name, count in counts.items():
        page, found = re.subn(rf"(?m)^(\| {ROWS[name]} .*\| )\d+ \|$", rf"\g<1>{count} |", page)
        assert found == 1, f"docs/architecture.md has no row of {ROWS[name]}"
    return page


if __name__ == "__main__":
    main()
