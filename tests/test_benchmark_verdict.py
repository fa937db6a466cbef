"""When the benchmark lets a rival's failure count as a pass."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent / "benchmarks"


@pytest.mark.parametrize(
    ("reasons", "limit_bytes", "held"),
    [
        (["killed"], 4_000_000_000, True),
        (["killed", "killed"], 4_000_000_000, True),
        (["killed"], None, False),
        (["no module named llama_cpp"], 4_000_000_000, False),
        (["killed", "no end after 1800 s"], 4_000_000_000, False),
    ],
)
def test_only_a_kill_under_a_memory_limit_counts(
    monkeypatch: pytest.MonkeyPatch, reasons: list[str], limit_bytes: int | None, held: bool
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    versus = importlib.import_module("versus_llama_cpp")
    assert versus.beaten_by_limit(reasons, limit_bytes) is held
