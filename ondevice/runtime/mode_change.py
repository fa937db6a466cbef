"""The budget below which `auto` takes other modes."""

from __future__ import annotations

from ondevice.config import Sparsity, Speculation
from ondevice.records import dataclass
from ondevice.runtime.resolving import ResolvedModel


@dataclass(frozen=True)
class ModeChange:
    """The modes that `auto` takes below `budget_bytes`, other than the current ones."""

    budget_bytes: int
    """The smallest budget that keeps the current modes."""
    sparsity: Sparsity
    speculation: Speculation


def mode_change(resolved: ResolvedModel) -> ModeChange | None:
    """The nearest budget below a model's own at which `auto` takes other modes, such as dense for exact.

    The process's memory is taken as it is now. None where the options name the modes, where no budget that
    surely works changes them, and where the model doesn't fit now.
    """
    if resolved.under is None or not resolved.plan.fits:
        return None
    least_bytes = resolved.frugal.plan.minimum_budget_bytes
    # Only at these budgets does a plan begin to fit, or to hold every weight: with the default context, and
    # with the least one.
    choices = [it.plan for it in (*resolved.alternatives, *resolved.under(least_bytes).alternatives)]
    limits = {it.least_budget_bytes for it in choices} | {it.resident_budget_bytes for it in choices}
    for limit in sorted(limits, reverse=True):
        if not least_bytes < limit <= resolved.plan.budget_bytes:
            continue
        below = resolved.under(limit - 1).runtime
        if (below.sparsity, below.speculation) != (resolved.runtime.sparsity, resolved.runtime.speculation):
            return ModeChange(limit, below.sparsity, below.speculation)
    return None
