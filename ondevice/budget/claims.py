"""What the loaded models of this process may take by their plans: every budget bounds all of them together.

A model's claim is what its plan lets it take, whether or not it holds that yet; whatever is planned later
leaves it that. Claims keep no model alive. All sizes are bytes.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from ondevice.budget.limits import group_limit, require_fit
from ondevice.budget.plan import Plan

_lock = threading.Lock()
_claims: dict[int, weakref.ref[Claim]] = {}
_numbers = itertools.count()


@dataclass(frozen=True)
class Others:
    """What loaded models hold for sure, and what they may come to hold, that included."""

    held_bytes: int
    claimed_bytes: int


class Claim:
    """One model's: nothing until its first `promise`, and nothing after `release`.

    What adds to a claim is counted under one lock of the process. What takes from it needs none: it happens
    where garbage is collected too, be it by the thread that has the lock.
    """

    def __init__(self, held_bytes: Callable[[], int]) -> None:
        """held_bytes: a method, of an object that isn't kept alive, that says what it holds for sure."""
        self._held_bytes = weakref.WeakMethod(held_bytes)
        self._budget_bytes = 0
        """The user's own."""
        self._planned_bytes = 0
        """What the plan lets the model take, with one full context."""
        self._beyond_bytes = 0
        """What it takes beyond one full context."""
        number, claims = next(_numbers), _claims
        claims[number] = weakref.ref(self, lambda _: claims.pop(number, None))

    def promise(self, plan: Plan, name: str) -> Plan:
        """Claim what a plan of the user's own budget takes, divided anew beside what others have claimed.

        name: of the model. Raises BudgetError, and changes nothing, if that doesn't fit any more.
        """
        with _lock:
            plan = replanned(plan, self)
            require_fit(plan, name)
            self._budget_bytes, self._planned_bytes = plan.budget_bytes, plan.claim_bytes
        return plan

    def follow(self, plan: Plan) -> bool:
        """Claim what another budget up to the user's takes; False if others have claimed that, or do now."""
        if plan.claim_bytes <= self._planned_bytes:
            self._planned_bytes = plan.claim_bytes
            return True
        # Waiting could be for ever: who has the lock may be collecting this model, and wait for its thread.
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
        """Claim so much in all beyond one full context; False if others have claimed that."""
        if nbytes <= self._beyond_bytes:
            self._beyond_bytes = nbytes
            return True
        with _lock:
            if nbytes - self._beyond_bytes > self._unclaimed_bytes(plan):
                return False
            self._beyond_bytes = nbytes
            return True

    def release(self) -> None:
        """The model holds nothing any more. Idempotent."""
        self._budget_bytes = self._planned_bytes = self._beyond_bytes = 0

    def _unclaimed_bytes(self, plan: Plan) -> int:
        """What this model's and all other claims leave of the largest budget."""
        largest = max((claim._budget_bytes for claim in _live()), default=0)
        claimed = self._planned_bytes + self._beyond_bytes + others(self).claimed_bytes
        return largest - plan.process_bytes - claimed

    def _found(self) -> Others:
        ask, claimed = self._held_bytes(), self._planned_bytes + self._beyond_bytes
        held = ask() if ask is not None and claimed else 0
        return Others(held, max(held, claimed))


def others(own: Claim | None = None) -> Others:
    """Of all models of this process but the one that has the claim `own`."""
    found = [claim._found() for claim in _live() if claim is not own]
    return Others(sum(it.held_bytes for it in found), sum(it.claimed_bytes for it in found))


def replanned(plan: Plan, own: Claim) -> Plan:
    """The plan beside what others have claimed by now, under the limit that its control group has now."""
    return replace(plan, others_bytes=others(own).claimed_bytes, limit=group_limit())


def _live() -> list[Claim]:
    # Other threads may change the dictionary, but not while it is copied.
    return [claim for kept in list(_claims.values()) if (claim := kept()) is not None]


def _forget() -> None:
    """In the child of a fork: models stay with the parent, and so may a thread that has the lock."""
    global _lock
    _lock = threading.Lock()
    _claims.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
