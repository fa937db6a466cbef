"""Finds the budget below which `auto` chooses other modes."""

from __future__ import annotations

from ondevice.config import Sparsity, Speculation
from ondevice.records import dataclass
from ondevice.runtime.resolving import ResolvedModel


@dataclass(frozen=True)
class ModeChange:
    """The modes that `auto` chooses below `budget_bytes`."""

    budget_bytes: int
    """The smallest budget that keeps the current modes."""
    sparsity: Sparsity
    speculation: Speculation


def mode_change(resolved: ResolvedModel) -> ModeChange | None:
    """The largest smaller budget at which `auto` chooses other modes, and these modes.

    None if the options name the modes, if no budget that works changes them, or if the model doesn't fit.
    Memory of the process counts as it is now.
    """
    if resolved.under is None or not resolved.plan.fits:
        return None
    min_bytes = resolved.smallest_plan.plan.minimum_budget_bytes
    # Only at these budgets a plan begins to fit, or to hold every weight, with the default context or the
    # shortest one.
    choices = [it.plan for it in (*resolved.alternatives, *resolved.under(min_bytes).alternatives)]
    limits = {it.least_budget_bytes for it in choices} | {it.resident_budget_bytes for it in choices}
    for limit in sorted(limits, reverse=True):
        if not min_bytes < limit <= resolved.plan.budget_bytes:
            continue
        below = resolved.under(limit - 1).runtime
        if (below.sparsity, below.speculation) != (resolved.runtime.sparsity, resolved.runtime.speculation):
            return ModeChange(limit, below.sparsity, below.speculation)
    return None
