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
_other_process_bytes = 0
"""Memory of other processes that is counted to this one's."""


@dataclass(frozen=True)
class Others:
    """Memory that loaded models hold, and memory that they may come to hold, which includes it."""

    held_bytes: int
    claimed_bytes: int


class Claim:
    """One model's claim: nothing until its first `promise`, and nothing after `release`.

    Claims grow under one lock of the process. They shrink without it, as garbage collection, which may run on
    the thread that holds the lock, shrinks them too.
    """

    def __init__(self, held_bytes: Callable[[], int]) -> None:
        """held_bytes: a bound method, held weakly, that returns the bytes that the model holds."""
        self._held_bytes = weakref.WeakMethod(held_bytes)
        self._budget_bytes = 0
        """The user's budget."""
        self._planned_bytes = 0
        """Memory that the plan allows the model with one full context."""
        self._beyond_bytes = 0
        """Memory that the model takes beyond one full context."""
        number, claims = next(_numbers), _claims
        claims[number] = weakref.ref(self, lambda _: claims.pop(number, None))

    def promise(self, plan: Plan, name: str) -> Plan:
        """Claim the memory of a plan for the user's budget, replanned with other models' present claims.

        name: of the model. Raises BudgetError, and changes nothing, if the plan doesn't fit any more.
        """
        with _lock:
            plan = replanned(plan, self)
            require_fit(plan, name)
            self._budget_bytes, self._planned_bytes = plan.budget_bytes, plan.claim_bytes
        return plan

    def follow(self, plan: Plan) -> bool:
        """Claim the memory of a plan within the user's budget. Returns False if others have claimed it."""
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
        """Claim `nbytes` in total beyond one full context. Returns False if others have claimed them."""
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

    def _memory(self) -> Others:
        ask, claimed = self._held_bytes(), self._planned_bytes + self._beyond_bytes
        held = ask() if ask is not None and claimed else 0
        return Others(held, max(held, claimed))


def others(claim: Claim | None = None) -> Others:
    """Memory that all models of this process hold and claim, except that of `claim`."""
    claims = [each._memory() for each in _live() if each is not claim]
    return Others(sum(it.held_bytes for it in claims), sum(it.claimed_bytes for it in claims))


def count_other_processes(nbytes: int) -> None:
    """From now on, add `nbytes` of other processes, such as a rank's supervisor, to this one's memory."""
    global _other_process_bytes
    _other_process_bytes = nbytes


def other_process_bytes() -> int:
    """Memory of other processes that is counted to this one's."""
    return _other_process_bytes


def replanned(plan: Plan, claim: Claim) -> Plan:
    """The plan with other models' present claims and the control group's present limit."""
    return replace(plan, others_bytes=others(claim).claimed_bytes, limit=group_limit())


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
