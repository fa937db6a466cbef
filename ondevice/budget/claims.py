"""Claims of this process's loaded models on its memory: every budget bounds all models together.

A model's claim is the memory that its plan allows it, held already or not. Later plans leave it that memory.
Claims keep no model alive. All sizes are bytes.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from ondevice.budget.limits import group_limit, require_fit
from ondevice.budget.plan import Plan
from ondevice.records import dataclass

_lock = threading.Lock()
_claims: dict[int, weakref.ref[Claim]] = {}
_numbers = itertools.count()
_beside_bytes = 0
"""Memory of other processes that is counted to this one's."""


@dataclass(frozen=True)
class Others:
    """Memory that loaded models surely hold, and memory that they may come to hold, which includes it."""

    held_bytes: int
    claimed_bytes: int


class Claim:
    """One model's claim: nothing until its first `promise`, and nothing after `release`.

    Claims grow under one lock of the process. They shrink without it, as that also happens in garbage
    collection, which may run on the thread that holds the lock.
    """

    def __init__(self, held_bytes: Callable[[], int]) -> None:
        """held_bytes: a bound method that tells what the model surely holds; its object isn't kept alive."""
        self._held_bytes = weakref.WeakMethod(held_bytes)
        self._budget_bytes = 0
        """The user's own budget."""
        self._planned_bytes = 0
        """Memory that the plan allows the model with one full context."""
        self._beyond_bytes = 0
        """Memory that the model takes beyond one full context."""
        number, claims = next(_numbers), _claims
        claims[number] = weakref.ref(self, lambda _: claims.pop(number, None))

    def promise(self, plan: Plan, name: str) -> Plan:
        """Claim the memory of a plan for the user's own budget, replanned beside what others have claimed.

        name: of the model. Raises BudgetError, and changes nothing, if that doesn't fit any more.
        """
        with _lock:
            plan = replanned(plan, self)
            require_fit(plan, name)
            self._budget_bytes, self._planned_bytes = plan.budget_bytes, plan.claim_bytes
        return plan

    def follow(self, plan: Plan) -> bool:
        """Claim a plan's memory, for a budget up to the user's. Returns False if others have claimed it."""
        if plan.claim_bytes <= self._planned_bytes:
            self._planned_bytes = plan.claim_bytes
            return True
        # Waiting could deadlock: the lock's holder may be collecting this model and wait for its thread.
        if not _lock.acquire(blocking=False):
            return False
        try:
            if plan.claim_bytes - self._planned_bytes > self._unclaimed_bytes(plan):
                return False
            self._planned_bytes = plan.claim_bytes
            return True
        finally:
            _lock.release()

    def go_beyond(self, plan: Plan, nbytes: int) -> bool:
        """Claim `nbytes` in all beyond one full context. Returns False if others have claimed that memory."""
        if nbytes <= self._beyond_bytes:
            self._beyond_bytes = nbytes
            return True
        with _lock:
            if nbytes - self._beyond_bytes > self._unclaimed_bytes(plan):
                return False
            self._beyond_bytes = nbytes
            return True

    def release(self) -> None:
        """Give up the claim: the model holds nothing any more. Idempotent."""
        self._budget_bytes = self._planned_bytes = self._beyond_bytes = 0

    def _unclaimed_bytes(self, plan: Plan) -> int:
        """Memory of the largest budget that no model has claimed."""
        largest = max((claim._budget_bytes for claim in _live()), default=0)
        claimed = self._planned_bytes + self._beyond_bytes + others(self).claimed_bytes
        return largest - plan.process_bytes - claimed

    def _found(self) -> Others:
        ask, claimed = self._held_bytes(), self._planned_bytes + self._beyond_bytes
        held = ask() if ask is not None and claimed else 0
        return Others(held, max(held, claimed))


def others(own: Claim | None = None) -> Others:
    """Memory that all models of this process hold and claim, except the one whose claim is `own`."""
    found = [claim._found() for claim in _live() if claim is not own]
    return Others(sum(it.held_bytes for it in found), sum(it.claimed_bytes for it in found))


def count_beside(nbytes: int) -> None:
    """Count memory of other processes, such as a rank's supervisor, to this one's from now on."""
    global _beside_bytes
    _beside_bytes = nbytes


def beside_bytes() -> int:
    """Memory of other processes that is counted to this one's."""
    return _beside_bytes


def replanned(plan: Plan, own: Claim) -> Plan:
    """The plan beside what other models have claimed by now, under the control group's present limit."""
    return replace(plan, others_bytes=others(own).claimed_bytes, limit=group_limit())


def _live() -> list[Claim]:
    # Other threads may change the dictionary, but not while it is copied.
    return [claim for kept in list(_claims.values()) if (claim := kept()) is not None]


def _forget() -> None:
    """In a child of fork(), drop all claims: the models are the parent's, and the lock may be held there."""
    global _lock
    _lock = threading.Lock()
    _claims.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
