"""Memory pressure: what a reading means, and when a budget shrinks and grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ondevice.budget.pressure import DEFAULT_PRESSURE, Bounds, Level, PressureState, Reading, advance

GB, MB = 10**9, 10**6
CEILING, FLOOR = 4 * GB, 2 * GB
FULL = Bounds(CEILING, FLOOR, CEILING)
ROOMY = Reading(limit_bytes=16 * GB, available_bytes=8 * GB, process_bytes=CEILING)


def reading(available: float = 8 * GB, **changes: Any) -> Reading:
    return replace(ROOMY, available_bytes=int(available), **changes)


class Clockwork:
    """Looks a second apart, from a budget that follows what they call for. It holds all that it may."""

    def __init__(self, bounds: Bounds = FULL, first: Reading = ROOMY) -> None:
        self.now, self.bounds = 100.0, bounds
        self.state: PressureState | None = None
        self.look(first)

    def look(self, found: Reading, seconds: float = 1.0) -> int:
        self.now += seconds
        found = replace(found, process_bytes=min(found.process_bytes, self.bounds.current_bytes))
        self.state, target = advance(self.state, found, self.bounds, self.now, DEFAULT_PRESSURE)
        self.bounds = replace(self.bounds, current_bytes=target)
        return target

    @property
    def level(self) -> Level:
        assert self.state is not None
        return self.state.level


@pytest.mark.parametrize(
    ("found", "level", "second"),
    [
        # Others take what the model isn't using, and no more.
        (reading(), "normal", CEILING),
        (reading(801 * MB), "normal", CEILING),
        # 0.8 GB are to stay free, and 0.04 to spare.
        (reading(700 * MB), "warning", CEILING - 140 * MB),
        (reading(401 * MB), "warning", CEILING - 439 * MB),
        (reading(399 * MB), "critical", FLOOR),
        (reading(0), "critical", FLOOR),
        (reading(700 * MB, limit_hits=1), "critical", FLOOR),
        # Of a budget that isn't used yet, the rest counts as taken.
        (reading(2 * GB, process_bytes=2 * GB), "warning", CEILING - 840 * MB),
        (reading(3 * GB, process_bytes=2 * GB), "normal", CEILING),
        # What the process holds beyond its budget is the host's.
        (reading(700 * MB, process_bytes=9 * GB), "warning", CEILING - 140 * MB),
        # Waiting counts where memory is short.
        (reading(1.5 * GB, stalled=0.3), "warning", CEILING - 250 * MB),
        (reading(1.5 * GB, stalled=0.3, blocked=0.2), "critical", FLOOR),
        (reading(1.5 * GB, stalled=0.1, blocked=0.1), "normal", CEILING),
        (reading(2 * GB, stalled=1.0, blocked=1.0), "normal", CEILING),
        # So does what the system says.
        (reading(7 * GB, reported="warning"), "warning", CEILING - 250 * MB),
        (reading(7 * GB, reported="critical"), "critical", FLOOR),
        (reading(9 * GB, reported="critical"), "normal", CEILING),
        (reading(300 * MB, reported="warning"), "critical", FLOOR),
        (reading(0, limit_bytes=0), "critical", FLOOR),
    ],
)
def test_what_a_reading_means(found: Reading, level: Level, second: int) -> None:
    """Of two in a row: a warning has to be confirmed, and what the system says has to last."""
    clock = Clockwork()
    first = clock.look(found, seconds=5.0)
    assert (clock.level, first) == (level, FLOOR if level == "critical" else CEILING)
    assert clock.look(found) == second


def test_one_warning_is_none() -> None:
    clock = Clockwork()
    for _ in range(5):
        assert clock.look(reading(500 * MB)) == CEILING
        assert clock.look(ROOMY) == CEILING


def test_steps_down_wait_for_what_they_bring() -> None:
    clock = Clockwork()
    budgets = [clock.look(reading(4 * GB, reported="warning")) for _ in range(60)]
    assert sorted(set(budgets), reverse=True) == [CEILING - 250 * MB * step for step in range(9)]
    assert budgets[3:13] == [CEILING] + [CEILING - 250 * MB] * 5 + [CEILING - 500 * MB] * 4
    assert budgets[-1] == FLOOR


def test_it_grows_after_a_calm_in_steps_and_never_above_the_ceiling() -> None:
    clock = Clockwork()
    assert clock.look(reading(0)) == FLOOR
    assert [clock.look(ROOMY) for _ in range(29)] == [FLOOR] * 29
    grown = [clock.look(ROOMY) for _ in range(60)]
    assert grown == sorted(grown)
    assert sorted(set(grown)) == [FLOOR + 250 * MB * step for step in range(1, 9)]
    assert grown.count(FLOOR + 250 * MB) == 5
    assert grown[-1] == CEILING


def test_a_disturbed_calm_begins_anew() -> None:
    clock = Clockwork()
    clock.look(reading(0))
    assert clock.look(ROOMY, seconds=29) == FLOOR
    assert clock.look(reading(0)) == FLOOR
    assert clock.look(ROOMY, seconds=29) == FLOOR
    assert clock.look(ROOMY, seconds=1) == FLOOR + 250 * MB


def test_it_grows_only_into_what_is_free_so_that_it_never_swings() -> None:
    """Others keep three gigabytes of four: the budget comes to rest, and stays."""
    free = 3 * GB
    clock = Clockwork()
    clock.look(reading(0))
    found = [clock.look(reading(free - clock.bounds.current_bytes), seconds=5.0) for _ in range(100)]
    assert found == sorted(found)
    assert found[-1] == FLOOR
    free = 4 * GB
    found = [clock.look(reading(free - clock.bounds.current_bytes), seconds=5.0) for _ in range(100)]
    assert found == sorted(found)
    assert found[-1] == FLOOR + 4 * 250 * MB
    assert clock.level == "normal"


@pytest.mark.parametrize("spare", [-3 * GB, -50 * MB, 0, 30 * MB])
def test_a_budget_that_fills_all_there_is_was_given_with_open_eyes(spare: int) -> None:
    first = reading(max(0, CEILING + spare), process_bytes=0)
    clock = Clockwork(first=first)
    for held in range(0, CEILING + 1, CEILING // 8):
        available = first.available_bytes - held
        assert clock.look(reading(max(0, available), process_bytes=held)) == CEILING, held
        if available <= 0:
            return
    # But waiting for memory isn't.
    assert clock.look(reading(0, process_bytes=CEILING, blocked=0.5)) == FLOOR


@pytest.mark.parametrize("found", [reading(0), reading(700 * MB), reading(0, reported="critical")])
def test_the_smallest_budget_stays(found: Reading) -> None:
    clock = Clockwork(Bounds(FLOOR, FLOOR, FLOOR))
    assert [clock.look(it) for it in (found, found, found, ROOMY)] == [FLOOR] * 4
