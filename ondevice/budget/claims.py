"""Claims of this process's loaded models on its memory: every budget bounds all models together.

A model's claim is the memory that its plan allows it, whether it holds that much yet or not. Models planned
later don't use it. Claims keep no model alive. All sizes are bytes.
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
    """The memory that loaded models hold, and the memory that they may hold at most."""

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
        """Claim memory for a plan under the user's budget. Returns the plan, renewed with what other models
        claim now.

        name: the model's name. Raises BudgetError, and changes nothing, if the renewed plan doesn't fit.
        """
        with _lock:
            plan = replanned(plan, self)
            require_fit(plan, name)
            self._budget_bytes, self._planned_bytes = plan.budget_bytes, plan.claim_bytes
        return plan

    def follow(self, plan: Plan) -> bool:
        """Claim memory for a plan that is within the user's budget. Returns False if other models have
        claimed it.
        """
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
        """Claim `nbytes` of keys and values beyond one full context. Returns False if other models have
        claimed them.
        """
        if nbytes <= self._beyond_bytes:
            self._beyond_bytes = nbytes
            return True
        with _lock:
            if nbytes - self._beyond_bytes > self._unclaimed_bytes(plan):
                return False
            self._beyond_bytes = nbytes
            return True

    def release(self) -> None:
        """Give up the claim, once the model holds nothing. Idempotent."""
        self._budget_bytes = self._planned_bytes = self._beyond_bytes = 0

    def _unclaimed_bytes(self, plan: Plan) -> int:
        """Memory that no model has claimed, out of the largest budget of all models."""
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
    """Count `nbytes` of other processes, such as a rank's supervisor, as memory of this process from
    now on.
    """
    global _other_process_bytes
    _other_process_bytes = nbytes


def other_process_bytes() -> int:
    """Bytes of other processes that count as memory of this one."""
    return _other_process_bytes


def replanned(plan: Plan, claim: Claim) -> Plan:
    """The plan, renewed with what other models claim now and the present limit of the control group."""
    return replace(plan, others_bytes=others(claim).claimed_bytes, limit=group_limit())


def _live() -> list[Claim]:
    # Other threads may change the dictionary, but not while it is copied.
    return [claim for kept in list(_claims.values()) if (claim := kept()) is not None]


def _forget() -> None:
    """Drop all claims, in a child of fork(): the models belong to the parent, whose other threads may hold
    the lock.
    """
    global _lock
    _lock = threading.Lock()
    _claims.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
