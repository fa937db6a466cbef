"""Memory pressure: its level for a reading of memory, and the DRAM budget that follows from it.

Pure functions of readings, budgets and a clock's time: `pressure_sources.py` makes the readings,
`budget_watch.py` applies the budgets. Sizes are bytes, times are seconds of a monotonic clock.

Pressure is the memory that other processes take out of what this process could have when the model was
loaded. If the model alone fills a control group, that is no pressure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ondevice.records import dataclass

Level = Literal["normal", "warning", "critical"]
"""Levels of memory pressure, lowest first."""
LEVELS: tuple[Level, ...] = ("normal", "warning", "critical")


@dataclass(frozen=True)
class Reading:
    """How much memory there is where it is scarcest for this process: on the machine, or in a
    control group.
    """

    limit_bytes: int
    """Total memory."""
    available_bytes: int
    """Memory that can still be allocated, droppable page cache included."""
    process_bytes: int
    """Memory of this process."""
    stalled: float = 0.0
    """Share of the last seconds, from 0 to 1, in which some task waited for memory."""
    blocked: float = 0.0
    """Share of the last seconds in which all tasks waited for memory."""
    limit_hits: int = 0
    """Number of times that usage has hit the limit since the group was made."""
    reported: Level = "normal"
    """The level that the system reports, if it does."""


@dataclass(frozen=True)
class PressureConfig:
    """When a budget shrinks and grows. Shares are of a reading's `limit_bytes`."""

    interval_seconds: float = 1.0
    """Seconds between two looks."""
    reserve_share: float = 0.05
    least_reserve_bytes: int = 16 << 20
    """Least memory that is left to others, unless they had less when the model was loaded. Less than half of
    it is critical."""
    drift_share: float = 0.0025
    least_drift_bytes: int = 8 << 20
    """Differences between readings that are ignored: page tables, the kernel's own caches."""
    short_share: float = 0.1
    """Share available below which waiting counts; above it, tasks wait at other limits."""
    reported_share: float = 0.5
    """Share available below which the reported level counts: macOS may warn with memory free."""
    waiting: float = 0.2
    """Share of time: it is a warning if some task waited that long, critical if all did."""
    confirmations: int = 2
    """Looks in a row that make a warning count."""
    settle_seconds: float = 5.0
    """Seconds between two steps down that only the system's reports ask for."""
    calm_seconds: float = 30.0
    """Seconds without pressure before the budget grows."""
    grow_seconds: float = 5.0
    """Seconds between two steps up."""
    steps: int = 8
    """Steps from the smallest budget to the largest."""


DEFAULT_PRESSURE = PressureConfig()


@dataclass(frozen=True)
class Bounds:
    """The present budget, and the limits between which it may move."""

    current_bytes: int
    floor_bytes: int
    """The smallest budget that works."""
    ceiling_bytes: int
    """The user's own budget, or the most that the model can use if that is less."""


@dataclass(frozen=True)
class PressureState:
    """The state of the pressure watch between two looks at memory."""

    usual_room_bytes: int
    """Memory that this process held, or could get, at the first look."""
    level: Level = "normal"
    looks: int = 0
    """Looks in a row that weren't normal."""
    limit_hits: int = 0
    troubled_at: float = 0.0
    """Time of the last look that wasn't normal."""
    changed_at: float = 0.0
    """Time of the last change of the budget."""


def advance(
    state: PressureState | None, reading: Reading, bounds: Bounds, now: float, config: PressureConfig
) -> tuple[PressureState, int]:
    """The state after one look at memory, and the budget in bytes that it calls for.

    Args:
        state: The state before; None at the first look.
        reading: What was read.
        bounds: The present budget and its limits.
        now: The time in seconds.
        config: When a budget shrinks and grows.
    """
    room = reading.available_bytes + min(reading.process_bytes, bounds.current_bytes)
    if state is None:
        state = PressureState(room, limit_hits=reading.limit_hits, troubled_at=now, changed_at=now)
    drift = _share(config.drift_share, reading, config.least_drift_bytes)
    allowed = room - _reserve(state.usual_room_bytes - bounds.ceiling_bytes, reading, drift, config)
    over = bounds.current_bytes > allowed
    level = _level(reading, over, reading.limit_hits > state.limit_hits, config)
    state = replace(
        state,
        level=level,
        looks=0 if level == "normal" else state.looks + 1,
        limit_hits=reading.limit_hits,
        troubled_at=state.troubled_at if level == "normal" else now,
    )
    target = _target(state, bounds, allowed - drift, over, now, config)
    return replace(state, changed_at=now if target != bounds.current_bytes else state.changed_at), target


def _share(share: float, reading: Reading, least_bytes: int) -> int:
    return max(least_bytes, int(share * reading.limit_bytes))


def _reserve(usual_spare: int, reading: Reading, drift: int, config: PressureConfig) -> int:
    """Memory that must stay free in addition to the budget. It is negative if the user's budget left none
    free at load.

    usual_spare: memory that the largest budget left free when the model was loaded.
    """
    reserve = _share(config.reserve_share, reading, config.least_reserve_bytes)
    return min(reserve, usual_spare // 2, usual_spare - 2 * drift)


def _level(reading: Reading, over: bool, hit: bool, config: PressureConfig) -> Level:
    """The pressure level.

    over: whether the budget exceeds what other processes leave. hit: whether usage has reached the limit
    since the last look.
    """
    available = reading.available_bytes / max(1, reading.limit_bytes)
    levels: list[Level] = ["normal"]
    if available < config.reported_share:
        levels.append(reading.reported)
    if over:
        nothing_left = _share(config.reserve_share, reading, config.least_reserve_bytes) // 2
        levels.append("critical" if hit or reading.available_bytes < nothing_left else "warning")
    if available < config.short_share and max(reading.stalled, reading.blocked) >= config.waiting:
        levels.append("critical" if reading.blocked >= config.waiting else "warning")
    return max(levels, key=LEVELS.index)


def _target(
    state: PressureState, bounds: Bounds, fitting: int, over: bool, now: float, config: PressureConfig
) -> int:
    """The budget in bytes to have now. fitting: the budget that other processes leave room for, with a
    margin.
    """
    current, floor, ceiling = bounds.current_bytes, bounds.floor_bytes, bounds.ceiling_bytes
    step = max(1, (ceiling - floor) // config.steps)
    since = now - state.changed_at
    if state.level == "critical":
        return min(current, floor)
    if state.level == "warning":
        if state.looks < config.confirmations or current <= floor:
            return current
        if over:
            return max(floor, fitting)
        return max(floor, current - step) if since >= config.settle_seconds else current
    calm = now - state.troubled_at
    if current >= ceiling or calm < config.calm_seconds or since < config.grow_seconds:
        return current
    wanted = min(ceiling, current + step)
    return wanted if wanted <= fitting else current
