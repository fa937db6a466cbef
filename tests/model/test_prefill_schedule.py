"""Passes divided among prompts, on a clock that rows move: short ones first, long ones nearly as fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import pytest

from ondevice.model.prefill_schedule import (
    LOST_SHARE,
    MAX_CREDIT_SECONDS,
    MIN_ROWS,
    UNTIMED_ROWS,
    PrefillSchedule,
)
from ondevice.model.sequence_state import SequenceState

CHUNK = 256
LONG_TOKENS = 20_000


def state() -> SequenceState:
    """A prompt's cache, of which only its identity counts."""
    return cast(SequenceState, object())


@dataclass
class Request:
    """A prompt, and the tokens that follow it; when it came and when it was answered."""

    unread: int
    tokens: int
    came: float
    ended: float = 0.0


def run(requests: Sequence[Request], schedule: PrefillSchedule, fixed: float, row: float) -> list[float]:
    """Answer all requests: a pass takes `fixed` and `row` seconds for each row. Returns the passes' times."""
    clock, times = 0.0, []
    keys = {id(request): state() for request in requests}
    while open_ones := [it for it in requests if not it.ended]:
        here = [it for it in open_ones if it.came <= clock]
        if not here:
            clock = min(it.came for it in open_ones)
            continue
        prompts = {keys[id(it)]: it for it in here if it.unread}
        texts = [it for it in here if not it.unread]
        schedule.keep(prompts)
        rows = schedule.rows({kv: it.unread for kv, it in prompts.items()}, bool(texts))
        assert rows or texts
        assert all(0 < count <= min(prompts[kv].unread, CHUNK) for kv, count in rows.items())
        seconds = fixed + row * (sum(rows.values()) + len(texts))
        schedule.passed(seconds, rows, len(texts))
        clock += seconds
        times.append(seconds)
        for kv, count in rows.items():
            prompts[kv].unread -= count
        for it in texts:
            it.tokens -= 1
            if not it.tokens:
                it.ended = clock
    return times


def long_seconds(row: float, fixed: float, every: float | None, limit: float = 0.5) -> tuple[float, float]:
    """Seconds in which the long prompt is answered, beside short ones every so many seconds; their median."""
    long = Request(LONG_TOKENS, 1, 0.0)
    short = [] if every is None else [Request(20, 24, every * at + 5.0) for at in range(1, 20)]
    run([long, *short], PrefillSchedule(CHUNK, lambda: limit), fixed, row)
    answered = [it.ended - it.came for it in short if it.ended < long.ended]
    return long.ended, median(answered) if answered else 0.0


def test_a_short_prompt_beside_a_long_one_is_answered_soon_and_takes_a_tenth_of_its_time() -> None:
    """As of a model of which a row takes 15 ms: a short request alone takes 24 * 35 + 320 ms."""
    alone, _ = long_seconds(0.015, 0.02, None)
    beside, short = long_seconds(0.015, 0.02, 15.0)
    assert short < 2.0
    assert beside < alone * 1.1
    unlimited, late = long_seconds(0.015, 0.02, 15.0, limit=0.0)
    assert late > short + 1.0
    assert alone < unlimited * 1.1, "parts of a prompt cost it little"


def test_others_take_a_tenth_of_a_prompt_s_time_however_many_they_are() -> None:
    long, writing = Request(4000, 1, 0.0), [Request(1, 4000, 0.0) for _ in range(3)]
    times = run([long, *writing], PrefillSchedule(CHUNK, lambda: 0.5), 0.03, 0.01)
    alone = run([Request(4000, 1, 0.0)], PrefillSchedule(CHUNK, lambda: 0.5), 0.03, 0.01)
    assert sum(times) > long.ended
    # Beside that only the texts' rows in passes that it has part in: three of fifty.
    assert long.ended < sum(alone) * (1 + LOST_SHARE + 0.08)
    assert long.ended > sum(alone) * 1.05, "the others have passes of their own"


def test_passes_keep_to_the_time_and_to_rows_that_are_worth_it() -> None:
    for row, rows in ((0.001, 256), (0.004, 125), (0.01, 50), (0.05, MIN_ROWS)):
        schedule, kv = PrefillSchedule(CHUNK, lambda: 0.5), state()
        assert schedule.rows({kv: 5000}, False) == {kv: UNTIMED_ROWS}
        schedule.passed(row * UNTIMED_ROWS, {kv: UNTIMED_ROWS}, 0)
        assert schedule.rows({kv: 5000}, False) == {kv: pytest.approx(rows, abs=1)}
        # The last part may be smaller, and the next prompt begins with what is known.
        assert schedule.rows({kv: 7}, False) == {kv: 7}
        other = state()
        schedule.keep({})
        assert schedule.rows({other: 5000}, True) == {other: pytest.approx(rows, abs=1)}


def test_without_a_limit_a_prompt_has_whole_chunks_but_beside_texts() -> None:
    schedule, kv = PrefillSchedule(CHUNK, lambda: 0.0), state()
    assert schedule.rows({kv: 5000}, False) == {kv: CHUNK}
    schedule.passed(9.0, {kv: CHUNK}, 0)
    assert schedule.rows({kv: 5000}, False) == {kv: CHUNK}
    schedule.keep({})
    assert schedule.rows({kv: 5000}, True) == {kv: UNTIMED_ROWS}


def test_short_prompts_go_first_and_long_ones_share_what_is_left() -> None:
    schedule = PrefillSchedule(CHUNK, lambda: 0.0)
    long, longer, short, shorter = (state() for _ in range(4))
    rows = schedule.rows({longer: 9000, long: 3000, short: 100, shorter: 20}, False)
    assert list(rows) == [shorter, short, long, longer]
    assert (rows[shorter], rows[short]) == (20, 100)
    assert rows[long] == rows[longer] == 68
    # A prompt that was alone for long may be left out for a while, and no longer.
    schedule.keep({long})
    for _ in range(100):
        schedule.passed(1.0, {long: CHUNK}, 0)
    waited = 0
    while long not in schedule.rows({long: 3000, short: 100}, True):
        schedule.passed(1.0, {}, 1)
        waited += 1
    assert waited == pytest.approx(MAX_CREDIT_SECONDS / (1 - LOST_SHARE), abs=1)


def test_prompts_that_were_slowed_by_others_owe_texts_nothing() -> None:
    """Two long prompts share the time; once one is read, a text beside the other isn't held back for that."""
    schedule, one, other = PrefillSchedule(CHUNK, lambda: 0.0), state(), state()
    for _ in range(50):
        rows: dict[Any, int] = schedule.rows({one: 9000, other: 9000}, False)
        assert set(rows) == {one, other}
        schedule.passed(1.0, rows, 0)
    schedule.keep({one})
    schedule.passed(1.0, {one: CHUNK}, 0)
    assert schedule.rows({one: 9000}, True) == {}
