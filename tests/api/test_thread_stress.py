"""Twelve threads on one model, for some seconds; `make stress` takes ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.thread_stress import WORK

THREADS = 12


@pytest.mark.parametrize("seconds", [1, pytest.param(120, marks=pytest.mark.slow)])
def test_every_text_that_ends_is_right(seconds: int) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.thread_stress",
        "--threads",
        str(THREADS),
        "--seconds",
        str(seconds),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    done = json.loads(result.stdout.splitlines()[-1])["done"]
    assert set(done) >= WORK
    assert done["generate"] > seconds
