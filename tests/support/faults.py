"""Processes in which reads fail: what `tests/native/flash_faults.cc` does, once it is built and preloaded."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def build_shim(folder: Path) -> Path:
    """The library to preload, made in `folder`. Skips where there is no Linux or no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C++ compiler")
    library = folder / "flash_faults.so"
    sources = [str(ROOT / "tests/native" / name) for name in ("flash_faults.cc", "faulty_ring.cc")]
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", *sources, "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


def output_under(
    shim: Path, folder: Path, arguments: list[str], timeout_seconds: float = 120, **settings: object
) -> str:
    """Runs Python under the shim, which `FLASH_<SETTING>` variables set up, and returns what it printed.

    Fails where it fails, and where the shim had nothing to spoil.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {f"FLASH_{name.upper()}": str(value) for name, value in settings.items()}
    faults = folder / "faults"
    faults.touch()
    environment |= {"LD_PRELOAD": str(shim), "FLASH_FAULT_LOG": str(faults)}
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_seconds
    )
    assert result.returncode == 0, result.stderr
    assert faults.stat().st_size > 0, "no read met a fault"
    return result.stdout


def assert_holds_under(shim: Path, folder: Path, claim: Callable[[Path], None], **settings: object) -> None:
    """Runs `claim(folder)` in a new process under the shim; fails where an assertion of the claim fails."""
    output_of(shim, folder, claim, **settings)


def output_of(shim: Path, folder: Path, claim: Callable[[Path], None], **settings: object) -> str:
    """What the claim prints meanwhile."""
    source = textwrap.dedent(inspect.getsource(claim))
    program = f"from pathlib import Path\n{source}\n{claim.__name__}(Path({str(folder)!r}))\n"
    return output_under(shim, folder, ["-c", program], **settings)
