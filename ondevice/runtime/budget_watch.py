"""Watches memory pressure for a loaded model and changes its DRAM budget.

Budgets change on the model's owner thread, between two tokens or two passes of a prompt. A separate daemon
thread reads memory pressure. It has no reference to the model, and ends with `stop()`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ondevice.budget.plan import Plan
from ondevice.budget.pressure import Bounds, Level, PressureConfig, PressureState, advance
from ondevice.budget.pressure_sources import PressureSource, Wake
from ondevice.errors import OndeviceError
from ondevice.records import dataclass
from ondevice.runtime.owner import OwnerThread
from ondevice.runtime.resolving import budget_bytes as bytes_of_budget
from ondevice.units import format_bytes

log = logging.getLogger(__name__)


class Budgeted(Protocol):
    """An engine, in the form that the watch uses. All methods are called on its owner thread."""

    plan: Plan

    @property
    def replanned(self) -> Plan:
        """The plan, renewed with what other models claim now."""

    def set_budget(self, budget_bytes: int) -> None:
        """Keep to a new budget set by the user. Raises BudgetError."""

    def set_plan(self, plan: Plan) -> None:
        """Keep to another plan of the same model. Raises BudgetError."""

    def shift_budget(self, budget_bytes: int) -> bool:
        """Keep to a budget that is at most the user's. Returns False if other models have claimed
        the memory.
        """


@dataclass(frozen=True)
class MemoryPressure:
    """Memory pressure and its effect on a model's budget. Counts start when the model is loaded."""

    level: Level
    """The latest level; `normal` if pressure isn't watched."""
    budget_bytes: int
    """The present budget."""
    user_budget_bytes: int
    """The user's budget, the limit of the present one."""
    shrinks: int
    growths: int


class BudgetWatch:
    """Changes the budget of a loaded model. Nothing else does."""

    def __init__(
        self,
        owner: OwnerThread[Any],
        engine: Budgeted,
        config: PressureConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        owner: the model's owner thread.
        engine: keeps to the budget; a weak reference.
        config: when a budget shrinks and grows.
        clock: monotonic, in seconds.
        """
        self._owner = owner
        self._engine = weakref.ref(engine)
        self._config = config
        self._clock = clock
        self._user_bytes = self._loaded_bytes = engine.plan.budget_bytes
        self._memory: PressureState | None = None
        self._shrinks = self._growths = 0
        self._failed = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> MemoryPressure:
        """The present memory pressure. Safe from any thread, also after the watch has ended."""
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
            assert engine is not None, "a model keeps its engine alive"
            engine.set_budget(budget_bytes)
            self._user_bytes = budget_bytes

        self._owner.call(apply, urgent=True)

    def hold_constraints(self, nbytes: int, automatic: bool) -> None:
        """Reserve `nbytes` for the constraints of texts, within the model's claim.

        automatic: whether the model was loaded with the budget `auto`, which is chosen again unless the user
        has set another. Raises BudgetError, and changes nothing, if there is no room.
        """

        def apply() -> None:
            engine = self._engine()
            assert engine is not None, "a model keeps its engine alive"
            plan = replace(engine.replanned, constraint_bytes=nbytes)
            if automatic and self._user_bytes == self._loaded_bytes:
                plan = plan.with_budget(bytes_of_budget("auto", plan))
                self._loaded_bytes = self._user_bytes = plan.budget_bytes
            engine.set_plan(plan)

        self._owner.call(apply, urgent=True)

    def start(self, open_source: Callable[[Wake], PressureSource]) -> None:
        """Watch from now on. If the system refuses a thread, the budget stays as it is."""
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
        """Let the thread end. It changes nothing afterwards. Idempotent. Does nothing in a child
        of fork().
        """
        self._stopped = True
        if not self._owner.is_inherited:
            self._wake.set()

    def join(self) -> None:
        """Wait until the thread has ended. Call it after `stop`, when the owner has begun to refuse calls."""
        thread = self._thread
        # Not on the owner thread, as it refuses calls only later.
        if thread is not None and threading.current_thread() is not thread and not self._owner.is_current:
            thread.join()

    def look(self, source: PressureSource) -> None:
        """Read memory pressure once and change the budget if needed. A failed reading changes nothing."""
        engine = self._engine()
        if engine is None:
            return
        try:
            reading = source.read()
        except (OSError, ValueError, OndeviceError) as error:
            # Warns once: the next reading may fail in the same way.
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
        """Change the budget of `plan`, unless the user has changed the budget meanwhile."""
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
