"""When the benchmark lets a rival's failure count as a pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.compare import versus_llama_cpp as versus
from tests.benchmarks.lib.measure import KILLED


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
    reasons: list[str], limit_bytes: int | None, held: bool
) -> None:
    assert versus.beaten_by_limit(reasons, limit_bytes) is held


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "passed"),
    [
        ([2.0, 3.0, 2.0], [1.0, 1.0, 1.0], 2.0, True),
        ([2.0, 3.0, 2.0], [None, 4.0, 4.0], 0.5, False),
        ([2.0, 3.0, 2.0], [None, 1.0, 1.0], 2.0, True),
        ([2.0, 3.0, 2.0], [None, None, None], None, True),
        ([2.0, None, 2.0], [None, None, None], None, False),
    ],
)
def test_runs_that_survive_are_what_is_compared(
    ours: list[float | None],
    theirs: list[float | None],
    ratio: float | None,
    passed: bool,
) -> None:
    case = next(case for case in versus.CASES if case.name == "headline-128")

    def runs(rates: list[float | None]) -> list[dict[str, Any]]:
        return [
            {"survived": False, "reason": KILLED}
            if rate is None
            else {"survived": True, case.figure: rate, "peak_memory_bytes": 1}
            for rate in rates
        ]

    found = versus.verdict(case, runs(ours), runs(theirs), 4_000_000_000)
    assert (found["ratio"], found["passed"]) == (ratio, passed)
