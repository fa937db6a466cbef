"""Mutants: small faults in the code that texts, budgets and bundles rest on. Tests must notice each of them.

    python -m tests.mutants.run           # every mutant
    python -m tests.mutants.run sampler   # those with this word in their subject, file or harm

`mutants.toml` is the table. A mutant exists in memory alone, as the code of its module in the process that
runs the tests; no file changes. It is killed if a fast test fails. A run fails if a mutant survives.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest
from hypothesis import Phase, settings

from tests.support.paths import ROOT

TABLE = Path(__file__).with_name("mutants.toml")
PASSED, FAILED, BROKEN, UNUSED = 0, 1, 2, 70
"""Exit statuses of tests. BROKEN: they can't be imported. UNUSED: they passed without the mutant's module."""


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, the text `old` is `new`. tests: files, of which a fast test must fail then."""

    subject: str
    file: str
    tests: tuple[str, ...]
    harm: str
    old: str
    new: str

    @property
    def source(self) -> str:
        """The file with the fault. Raises ValueError unless the file has the old text exactly once."""
        text = (ROOT / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has this text {count} times, not once: {self.old}")
        return text.replace(self.old, self.new)


def read_table() -> list[Mutant]:
    """All mutants, in the table's order."""
    return [
        Mutant(group["subject"], group["file"], tuple(group["tests"]), *mutant)
        for group in tomllib.loads(TABLE.read_text())["group"]
        for mutant in group["mutants"]
    ]


def run_tests(tests: Sequence[str], mutant: Mutant | None) -> int:
    """Exit status of the fast tests of these files, which run in this process with the mutant."""
    path = None if mutant is None else ROOT / mutant.file
    code = None if mutant is None else compile(mutant.source, str(path), "exec", dont_inherit=True)
    usual, used = SourceFileLoader.get_code, set[str]()

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        if Path(loader.path).resolve() != path:
            return usual(loader, name)
        used.add(name)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[assignment]
    # The tests' own profile has these phases too: an example that fails is enough, and isn't made smaller.
    settings.register_profile("unshrunk", phases=(Phase.explicit, Phase.generate))
    settings.load_profile("unshrunk")
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--hypothesis-seed", "0"]
    status = int(pytest.main([*options, *(str(ROOT / test) for test in tests)]))
    return UNUSED if status == PASSED and mutant is not None and not used else status


def in_process(tests: Sequence[str], number: int) -> tuple[int, str]:
    """Exit status and output of a process for `run_tests`. number: the mutant's in the table; -1: none."""
    command = [sys.executable, "-m", "tests.mutants.run", f"--number={number}", *tests]
    with tempfile.TemporaryDirectory() as examples:
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        variables |= {"HYPOTHESIS_STORAGE_DIRECTORY": examples}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main(words: Sequence[str]) -> int:
    """Run the mutants that have one of `words`, or all. Returns 0 if each is killed."""
    counts, survivors, sound = Counter[str](), list[Mutant](), set[tuple[str, ...]]()
    for number, mutant in enumerate(read_table()):
        about = f"{mutant.subject}: {mutant.harm} ({mutant.file})"
        if words and not any(word in about for word in words):
            continue
        if mutant.tests not in sound:
            status, output = in_process(mutant.tests, -1)
            if status != PASSED:
                sys.exit(f"{output}\nwithout a mutant, these tests fail: {' '.join(mutant.tests)}")
            sound.add(mutant.tests)
        started = time.monotonic()
        status, output = in_process(mutant.tests, number)
        if status not in (PASSED, FAILED, BROKEN):
            sys.exit(f"{output}\nthe tests ended with {status}, which says nothing of this mutant: {about}")
        counts[mutant.subject] += status != PASSED
        survivors += [mutant] if status == PASSED else []
        seconds = time.monotonic() - started
        print(f"{'SURVIVED' if status == PASSED else 'killed'} after {seconds:.1f} s: {about}", flush=True)
    for mutant in survivors:
        print(f"\nsurvived in {mutant.file}: {mutant.harm}\n- {mutant.old}\n+ {mutant.new}")
    print("\nkilled:", ", ".join(f"{subject} {count}" for subject, count in counts.items()))
    return bool(survivors)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--number="):
        wanted = int(sys.argv[1].partition("=")[2])
        sys.exit(run_tests(sys.argv[2:], None if wanted < 0 else read_table()[wanted]))
    sys.exit(main(sys.argv[1:]))
