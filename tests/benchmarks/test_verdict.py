"""When benchmarks let a case pass: a rival's failure, and a drafter's speed over plain decoding's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ondevice.measure.drafters import Comparison
from tests.benchmarks.compare import drafting_at_scale, drafting_versus_llama_cpp
from tests.benchmarks.compare import versus_llama_cpp as versus
from tests.benchmarks.lib.greedy import verified
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


def of_speeds(speeds: Mapping[str, float]) -> drafting_at_scale.Round:
    """A round of one task with these tokens per second by drafter."""
    rows = [
        SimpleNamespace(
            task="all",
            drafter=name,
            tokens=speed * 10,
            seconds=10,
            seconds_per_pass=1.0,
            drafting_seconds_per_pass=0.25,
            tokens_per_pass=1.0,
        )
        for name, speed in speeds.items()
    ]
    return drafting_at_scale.Round.of(cast(Comparison, SimpleNamespace(rows=rows)))


@pytest.mark.parametrize(
    ("streams", "auto", "best", "passed"),
    [
        ([1.9, 2.0, 0.5], [1.9, 2.0, 2.1], "streams", True),
        ([1.9, 2.0, 2.1], [1.7, 1.7, 1.7], "streams", False),
        ([1.1, 1.2, 1.3], [1.6, 1.6, 1.6], "lookup", False),
        ([1.1, 3.0, 1.1], [2.0, 2.0, 2.0], "lookup", False),
    ],
)
def test_a_case_passes_by_the_medians_of_its_rounds(
    streams: list[float], auto: list[float], best: str, passed: bool
) -> None:
    """Lookup is 1.5 times as fast as plain decoding in every round, and 1.8 times is asked for."""

    def one_round(turn: int) -> drafting_at_scale.Round:
        return of_speeds({"off": 1.0, "lookup": 1.5, "streams": streams[turn], "auto": auto[turn]})

    case = next(case for case in drafting_at_scale.CASES if case.name == "relu-dense-half")
    row = drafting_at_scale.verdict(case, [one_round(turn) for turn in range(3)])
    assert (row["best"], row["passed"]) == (best, passed)
    assert f"| {best} |" in drafting_at_scale.table([{"case": case.name, **row}])


def test_auto_is_held_against_drafters_that_need_no_second_model() -> None:
    found = of_speeds({"off": 1.0, "lookup": 1.5, "model": 2.5, "auto": 1.45})
    case = next(case for case in drafting_at_scale.CASES if case.name == "relu-dense-half")
    row = drafting_at_scale.verdict(case, [found])
    assert (row["best"], row["passed"]) == ("model", True)
    assert row["auto_over_best"] == pytest.approx(1.45 / 1.5)


def test_rounds_are_kept_for_runs_with_the_same_options_alone(tmp_path: Path) -> None:
    file = tmp_path / "rounds"
    options = Namespace(draft_model=Path("small"), prompts=6, max_tokens=48, threads=2)
    case = drafting_at_scale.CASES[0]
    asked, of_another = (
        drafting_at_scale.what_is_asked(case, tmp_path / folder / "large", ("lookup", "auto"), options)
        for folder in ("relu", "silu")
    )
    kept = of_speeds({"off": 1.0, "auto": 2.0})
    assert drafting_at_scale.kept_rounds(None, asked) == drafting_at_scale.kept_rounds(file, asked) == []
    drafting_at_scale.keep_round(file, asked, kept)
    for others in (asked | {"prompts": 1}, of_another):
        drafting_at_scale.keep_round(file, others, of_speeds({"off": 1.0, "auto": 3.0}))
    assert drafting_at_scale.kept_rounds(file, asked) == [kept]
    assert set(kept.drafting_share.values()) == {0.25}


def test_medians_over_llama_cpp_decide() -> None:
    found, passed = drafting_versus_llama_cpp.verdict(
        {"plain": [7.5, 6.0, 8.0], "prompt lookup": [4.6, 9.0, 1.0]}
    )
    assert passed
    assert "| llama.cpp, plain | 7.50 (6.00 to 8.00) | 7.0 | 10.0 | held |" in found
    found, passed = drafting_versus_llama_cpp.verdict(
        {"plain": [7.5, 6.0, 8.0], "prompt lookup": [4.4, 9.0, 1.0]}
    )
    assert not passed
    assert "4.40 (1.00 to 9.00) | 4.5 | 4.5 | MISSED |" in found


def test_rates_are_of_the_tokens_that_passes_gave() -> None:
    # The second text ended with its first pass, by a token that no text has.
    result: dict[str, Any] = {"texts": [[1, 2], [4]], "decoded_tokens": 2, "decode_seconds": 4.0}
    assert drafting_versus_llama_cpp.rate(result) == 0.5
    assert drafting_versus_llama_cpp.rate({"decoded_tokens": 0, "decode_seconds": 0.0}) == 0.0


def test_texts_share_what_comes_before_the_first_difference() -> None:
    ours, theirs = [[1, 2, 3, 4], [5, 6], [7]], [[1, 2, 9, 4], [5, 6], [7, 8]]
    assert drafting_versus_llama_cpp.shared_tokens(ours, theirs) == (2 + 2 + 1) / (4 + 2 + 2)


@pytest.mark.parametrize(
    ("draft", "found", "text"),
    [
        ([], [4], [4]),
        ([4, 5], [4, 5, 6], [4, 5, 6]),
        ([4, 5], [4, 7, 6], [4, 7]),
        ([4, 5], [3, 5, 6], [3]),
        ([4, 2, 5], [4, 2, 5, 6], [4, 2]),
    ],
)
def test_a_draft_is_right_up_to_the_first_other_token_or_the_end(
    draft: list[int], found: list[int], text: list[int]
) -> None:
    assert verified(draft, found, {2}) == text


@pytest.mark.parametrize(
    ("activation", "ahead", "names"),
    [
        ("relu", False, ["relu-resident", "relu-dense-half", "relu-predicted-half", "nothing-to-guess"]),
        ("silu", False, ["silu-resident", "silu-dense-half", "nothing-to-guess"]),
        ("silu", True, ["mtp-resident", "mtp-dense-half"]),
        ("relu", True, []),
    ],
)
def test_a_model_has_its_own_cases(activation: str, ahead: bool, names: list[str]) -> None:
    assert [case.name for case in drafting_at_scale.cases_of(activation, ahead)] == names
