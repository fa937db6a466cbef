"""Installs the programs of the table into build/clients, each into a folder of its own.

    python -m tests.clients.install [NAME...]

What can't be installed is said and left out: its tests are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.programs import PROGRAMS, Program


def install(program: Program) -> bool:
    """Whether the program is there, at the table's versions."""
    stamp = program.folder / "installed.txt"
    wanted = "\n".join(program.packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return True
    shutil.rmtree(program.folder, ignore_errors=True)
    program.folder.mkdir(parents=True)
    for command in _npm(program) if program.is_npm else _pip(program):
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            return False
    stamp.write_text(wanted)
    return program.path is not None


def _npm(program: Program) -> list[list[str]]:
    npm = shutil.which("npm")
    if npm is None:
        return [["false"]]
    flags = ("--no-audit", "--no-fund", "--no-save", "--no-package-lock", "--loglevel", "error")
    return [[npm, "install", "--prefix", str(program.folder), *flags, *program.packages]]


def _pip(program: Program) -> list[list[str]]:
    python = str(Path(program.folder, "bin", "python"))
    flags = ("--quiet", "--disable-pip-version-check", "--no-compile")
    return [
        [sys.executable, "-m", "venv", str(program.folder)],
        [python, "-m", "pip", "install", *flags, *program.packages],
    ]


def main(names: list[str]) -> None:
    for name in names or PROGRAMS:
        print(f"installing {name} ...", file=sys.stderr)
        if not install(PROGRAMS[name]):
            print(f"{name} can't be installed; its tests are skipped", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
