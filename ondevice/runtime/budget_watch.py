"""A loaded model's DRAM budget: the user's own, and what memory pressure leaves of it while it lasts.

Budgets change on the model's owner thread, between two tokens or two passes of a prompt. Looking is done by
a thread of its own, which holds no model: it ends with `stop()`, and never keeps the interpreter alive.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ondevice.budget.plan import Plan
from ondevice.budget.pressure import Bounds, Level, PressureConfig, PressureState, advance
from ondevice.budget.pressure_sources import PressureSource, Wake
from ondevice.errors import OndeviceError
from ondevice.runtime.owner import OwnerThread
from ondevice.units import format_bytes

log = logging.getLogger(__name__)


class Budgeted(Protocol):
    """What keeps to a budget: an engine, on its owner thread."""

    plan: Plan

    def set_budget(self, budget_bytes: int) -> None:
        """The user's own. Raises BudgetError."""

    def shift_budget(self, budget_bytes: int) -> bool:
        """One up to the user's; False if that can't be had just now."""


@dataclass(frozen=True)
class MemoryPressure:
    """What a model's budget has come to. Counts are since it was loaded."""

    level: Level
    """At the last look; `normal` where nobody looks."""
    budget_bytes: int
    """The budget now."""
    user_budget_bytes: int
    """The user's own, which it never exceeds."""
    shrinks: int
    growths: int


class BudgetWatch:
    """The one place that changes the budget of a loaded model."""

    def __init__(
        self,
        owner: OwnerThread[Any],
        engine: Budgeted,
        config: PressureConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engine: held weakly. clock: seconds."""
        self._owner = owner
        self._engine = weakref.ref(engine)
        self._config = config
        self._clock = clock
        self._user_bytes = engine.plan.budget_bytes
        self._memory: PressureState | None = None
        self._shrinks = self._growths = 0
        self._failed = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> MemoryPressure:
        """Safe from any thread, and after the end."""
        engine = self._engine()
        return MemoryPressure(
            level="normal" if self._memory is None else self._memory.level,
            budget_bytes=self._user_bytes if engine is None else engine.plan.budget_bytes,
            user_budget_bytes=self._user_bytes,
            shrinks=self._shrinks,
            growths=self._growths,
        )

    def set_user_budget(self, budget_bytes: int) -> None:
        """Keep to the user's new budget. Raises BudgetError, and changes nothing, if it is too small."""

        def apply() -> None:
            engine = self._engine()
            assert engine is not None, "who has the model has its engine"
            engine.set_budget(budget_bytes)
            self._user_bytes = budget_bytes

        self._owner.call(apply, urgent=True)

    def start(self, open_source: Callable[[Wake], PressureSource]) -> None:
        """Look from now on. Where the system has no thread for it, the budget just stays what it is."""
        thread = threading.Thread(
            target=self._run, args=(open_source,), name="ondevice-memory-pressure", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("memory pressure isn't watched: the system refuses a thread: %s", error)
            return
        self._thread = thread

    def stop(self) -> None:
        """Have the thread end; it changes nothing more. Idempotent. A child of fork() hasn't got it."""
        self._stopped = True
        if not self._owner.is_inherited:
            self._wake.set()

    def join(self) -> None:
        """Wait for the thread's end, once it was told to and the owner refuses its calls."""
        thread = self._thread
        # On the owner thread the last call is refused only after this; the watch ends by itself.
        if thread is not None and threading.current_thread() is not thread and not self._owner.is_current:
            thread.join()

    def look(self, source: PressureSource) -> None:
        """Read once, and have the budget changed if that calls for it. What can't be read changes nothing."""
        engine = self._engine()
        if engine is None:
            return
        try:
            reading = source.read()
        except (OSError, ValueError, OndeviceError) as error:
            # Once is enough for people: the next look may fail alike.
            log.log(logging.DEBUG if self._failed else logging.WARNING, "no memory pressure read: %s", error)
            self._failed = True
            return
        self._failed = False
        plan, user_bytes = engine.plan, self._user_bytes
        usable = min(user_bytes, plan.full_bytes)
        bounds = Bounds(
            current_bytes=min(plan.budget_bytes, usable),
            floor_bytes=min(plan.minimum_budget_bytes, usable),
            ceiling_bytes=usable,
        )
        self._memory, target = advance(self._memory, reading, bounds, self._clock(), self._config)
        if target != bounds.current_bytes:
            self._change(engine, plan, user_bytes, user_bytes if target == usable else target)

    def _run(self, open_source: Callable[[Wake], PressureSource]) -> None:
        try:
            source = open_source(self._wake.set)
        except (OSError, AttributeError, OndeviceError) as error:
            log.warning("memory pressure isn't watched: %s", error)
            return
        try:
            while not self._stopped:
                self._wake.clear()
                self.look(source)
                if not self._stopped:
                    self._wake.wait(self._config.interval_seconds)
        finally:
            source.close()

    def _change(self, engine: Budgeted, plan: Plan, user_bytes: int, budget_bytes: int) -> None:
        """Have the budget of `plan` changed, unless the user has changed it meanwhile."""
        level = self.state.level

        def apply() -> None:
            if engine.plan is not plan or self._user_bytes != user_bytes:
                return
            if not engine.shift_budget(budget_bytes):
                return
            if budget_bytes < plan.budget_bytes:
                self._shrinks += 1
            else:
                self._growths += 1
            log.log(
                logging.WARNING if plan.budget_bytes == user_bytes else logging.INFO,
                "memory pressure is %s: the DRAM budget goes from %s to %s, of %s",
                level,
                *map(format_bytes, (plan.budget_bytes, budget_bytes, user_bytes)),
            )

        try:
            self._owner.call(apply, urgent=True)
        except OndeviceError as error:
            if not self._stopped:
                log.warning("the DRAM budget stays %s: %s", format_bytes(engine.plan.budget_bytes), error)
