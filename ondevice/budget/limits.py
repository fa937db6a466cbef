"""Limits of a budget: what `auto` means, when a budget is refused as too small, and warnings if it is large.

All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.budget.plan import Plan
from ondevice.errors import BudgetError
from ondevice.records import dataclass
from ondevice.units import PAGE_BYTES, MemoryRoom, format_bytes, group_rooms

MAX_RESERVE_BYTES = 256 << 20
"""Most memory that `auto` leaves free on a large machine or control group."""
RESERVE_PART = 16
"""Divisor of a machine's or control group's memory that gives the memory that `auto` leaves free.

Page tables and the kernel take 0.5 % of a budget in addition to it. The rest is for other programs."""


@dataclass(frozen=True)
class Allowance:
    """The memory that `auto` may take."""

    room: MemoryRoom
    """The machine or control group where memory is scarcest for this process."""
    held_bytes: int
    """Memory of this process before the model is loaded."""
    reserve_bytes: int
    """Available memory that is left free."""
    usable_bytes: int
    """Memory that the whole process may have."""

    @property
    def words(self) -> str:
        """An explanation of the amount, for messages."""
        held, free, total, reserve = map(
            format_bytes,
            (self.held_bytes, self.room.available_bytes, self.room.limit_bytes, self.reserve_bytes),
        )
        return (
            f" (auto: this process holds {held}; {free} of the {total} of {self.room.name} are free, and "
            f"{reserve} of them are kept back for other programs, page tables and the kernel)"
        )


def group_limit() -> MemoryRoom | None:
    """The control group with the lowest limit; None if none has one."""
    return min(group_rooms(), key=lambda room: room.limit_bytes, default=None)


def allowance(held_bytes: int, rooms: Sequence[MemoryRoom]) -> Allowance:
    """The memory that the budget `auto` may take, from the room with the least memory left. held_bytes: this
    process's memory now.
    """
    allowances = []
    for room in rooms:
        part = max(room.available_bytes // 10, min(MAX_RESERVE_BYTES, room.limit_bytes // RESERVE_PART))
        reserve = min(room.available_bytes, part)
        # Memory of the process may be charged to another group, as program text is, to its first user.
        most = min(room.limit_bytes, held_bytes + room.available_bytes)
        allowances.append(Allowance(room, held_bytes, reserve, most - reserve))
    return min(allowances, key=lambda it: it.usable_bytes)


def auto_budget(plan: Plan, allowance: Allowance) -> int:
    """The budget that `auto` means: the usable memory, up to the most that the planned model can use."""
    return min(plan.full_bytes, allowance.usable_bytes)


def require_fit(
    plan: Plan,
    name: str,
    origin: str = "",
    fitting_context: int = 0,
    fitting_options: Sequence[str] = (),
    only_budget: bool = False,
) -> None:
    """Check that a plan fits.

    Args:
        plan: The plan of a model.
        name: The model's name.
        origin: Where the budget comes from, if the user didn't set it.
        fitting_context: The longest context that would fit; 0 for none.
        fitting_options: Options with which the model would fit, each by itself.
        only_budget: Whether the user can change only the budget, so that the message names no other remedy.

    Raises BudgetError if it doesn't, with the smallest budget that works, its parts and what would help.
    """
    if plan.fits:
        return
    smallest, limit = plan.minimum_budget_bytes, plan.limit
    allowed = "" if limit is None else f"{format_bytes(limit.limit_bytes)} ({limit.limit_bytes} bytes)"
    too_large = limit is not None and smallest > limit.limit_bytes
    ways = ["lower --max-context or --kv-bits"] if plan.may_lower or too_large else []
    ways += [f"take {option}" for option in fitting_options]
    context = f"; --max-context {fitting_context} would fit" if fitting_context else ""
    less = "" if only_budget else "".join(f", or {way}" for way in ways) + context
    if not plan.suffices:
        problem = f"is too small for {name}"
        raising = "Name a larger --dram-budget" if origin else "Raise --dram-budget"
        if limit is not None and too_large:
            raising = f"Raise the limit of {limit.name}, {allowed}, and name a larger --dram-budget"
        remedy = f"{raising}{less}"
    else:
        assert limit is not None, "nothing else is in the way of a budget that suffices"
        problem = (
            f"is more than {limit.name} allows, {allowed}, and {name} would take "
            f"{format_bytes(plan.total_bytes)} of it"
        )
        less = less if too_large else f", or take --dram-budget {limit.limit_bytes} or less"
        remedy = f"Raise that limit{less}"
    unread = ""
    if plan.unread_bytes:
        unread = " It may turn out less once the tokenizer is read, for which this budget has no room."
    listed = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in plan.minimum_parts.items())
    raise BudgetError(
        f"a DRAM budget of {format_bytes(plan.budget_bytes)} ({plan.budget_bytes} bytes){origin} {problem}: "
        f"the smallest that works is {smallest} bytes ({format_bytes(smallest)}: {listed}). "
        f"{remedy}.{unread}",
        required_bytes=smallest,
    )


def budget_warnings(plan: Plan, name: str, held_bytes: int, rooms: Sequence[MemoryRoom]) -> list[str]:
    """Warnings that the user's budget may exceed the memory that is available, although the plan fits into
    the budget.

    Args:
        plan: The plan of a model.
        name: The model's name.
        held_bytes: Memory that this process already holds.
        rooms: The memory of the machine and of its control groups.
    """
    smallest = min(rooms, key=lambda room: room.limit_bytes)
    scarcest = min(rooms, key=lambda room: room.available_bytes)
    warnings = []
    if plan.budget_bytes >= smallest.limit_bytes + PAGE_BYTES:
        warnings.append(
            f"a DRAM budget of {format_bytes(plan.budget_bytes)} is more than all "
            f"{format_bytes(smallest.limit_bytes)} of {smallest.name}; {name} takes up to "
            f"{format_bytes(plan.total_bytes)} of it"
        )
    wanted = plan.total_bytes - held_bytes
    if wanted > scarcest.available_bytes:
        warnings.append(
            f"{name} takes up to {format_bytes(wanted)} more than this process holds, and "
            f"{format_bytes(scarcest.available_bytes)} of the {format_bytes(scarcest.limit_bytes)} of "
            f"{scarcest.name} are free now: close other programs, or take a smaller budget"
        )
    return warnings


def context_words(plan: Plan) -> str:
    """A sentence on a plan's context: its length, why it isn't longer, and how much memory a longer one
    takes.
    """
    why = f", as {plan.wanted_context} would not fit" if plan.wanted_context else ""
    if plan.context_share:
        taken = 100 * plan.kv_cache_bytes // max(1, plan.budget_bytes)
        why = f", whose keys and values take up to {taken} % of the budget"
    return f"context {plan.max_context} tokens{why}"


def verdict(plan: Plan, fitting_context: int) -> str:
    """A sentence on whether a plan fits, and what would help if not.

    fitting_context: the longest context that would fit; 0 for none.
    """
    if plan.fits:
        within = plan.budget_bytes < plan.minimum_budget_bytes
        return "yes, as measured now; another run may measure more, and refuse it" if within else "yes"
    limit = plan.limit
    allowed = "" if limit is None else f"; {limit.name} allows {format_bytes(limit.limit_bytes)}"
    return f"no{allowed}{f'; --max-context {fitting_context} would fit' if fitting_context else ''}"
