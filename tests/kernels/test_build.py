"""What the native build asks of a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

KERNELS = ROOT / "ondevice/kernels"


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """CMake's first step over the kernels, without the Python extension."""
    beside = Path(sys.executable).parent / "cmake"
    cmake = str(beside) if beside.exists() else shutil.which("cmake")
    if cmake is None or not (shutil.which("c++") and shutil.which("make")):
        pytest.skip("CMake, make or a C++ compiler is absent")
    command = [cmake, "-S", str(KERNELS), "-B", str(folder), "-G", "Unix Makefiles", "-DONDEVICE_PYTHON=OFF"]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


def test_a_compiler_without_vector_shuffles_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    refused = configure(tmp_path / "old", "-DCMAKE_CXX_FLAGS=-D__builtin_shufflevector=absent")
    message = " ".join(refused.stderr.split())
    assert refused.returncode != 0
    assert "ondevice needs GCC 12 or later or Clang: " in message
    assert "Name another compiler in the environment variable CXX." in message


@pytest.mark.slow
def test_the_compiler_of_this_machine_is_accepted(tmp_path: Path) -> None:
    accepted = configure(tmp_path / "new")
    assert accepted.returncode == 0, accepted.stderr
