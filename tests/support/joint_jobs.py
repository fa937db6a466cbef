"""Jobs that an engine runs jointly, on the thread that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ondevice.generate import Event
from ondevice.runtime.engine import Engine

Work = Iterator[Any]


class Job:
    """A job of `JointJobs`, whose items are kept."""

    def __init__(self, work: Work, found: list[Any] | None = None) -> None:
        self.work: Callable[[Any], Work] = lambda cancelled: work
        self.items: list[Any] = [] if found is None else found
        self.error: BaseException | None = None

    def is_cancelled(self) -> bool:
        return False

    def deliver(self, item: Any) -> None:
        self.items.append(item)

    def end(self, error: BaseException | None = None) -> None:
        self.error = error

    @property
    def tokens(self) -> list[int]:
        return [item.token for item in self.items if isinstance(item, Event) and item.token is not None]


def run(
    engine: Engine, jobs: list[Job], between: Callable[[int], None] = lambda turn: None, late: int = 0
) -> None:
    """Run jobs together, in their order.

    between: called before each round, where brief jobs are. late: round in which the last job joins.
    """
    waiting, turns = jobs[1:], iter(range(1 << 30))

    def following() -> Job | None:
        between(turn := next(turns))
        if not waiting or (len(waiting) == 1 and turn < late):
            return None
        return waiting.pop(0)

    engine.joint.run(jobs[0], following, lambda: None)
