"""Plans how loaded models share a budget: which ones yield memory to another. Pure; all sizes are bytes.

A model that needs memory gets it from idle models: they shrink to the least memory in which they run, and if
that isn't enough they are unloaded, the least recently used first. Models in use keep their memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.records import dataclass


@dataclass(frozen=True)
class Resident:
    """A loaded model, for the plan. Sizes don't include the process and other models."""

    name: str
    claim_bytes: int
    """Memory that the model may take at present."""
    least_bytes: int
    """Memory that the model needs to run."""
    at_work: bool


@dataclass(frozen=True)
class Room:
    """The models that make room: the names of those that shrink, and of those that are unloaded, in this
    order.
    """

    yielding: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()


def room_for(least_bytes: int, full_bytes: int, budget_bytes: int, residents: Sequence[Resident]) -> Room:
    """The models that make room for another one: enough for all of its weights if possible, at least enough
    to run it.

    Even then there may be too little room. Loading fails in that case.

    Args:
        least_bytes: memory that the model needs to run.
        full_bytes: most memory that it can use.
        budget_bytes: memory for all models, without the process.
        residents: the other models, least recently used first.
    """
    free = budget_bytes - sum(it.claim_bytes for it in residents)
    idle = [it for it in residents if not it.at_work]
    yielding = []
    for it in idle:
        if free >= full_bytes:
            break
        if it.claim_bytes > it.least_bytes:
            free += it.claim_bytes - it.least_bytes
            yielding.append(it.name)
    unloaded = []
    for it in idle:
        if free >= least_bytes:
            break
        free += min(it.claim_bytes, it.least_bytes)
        unloaded.append(it.name)
    return Room(tuple(name for name in yielding if name not in unloaded), tuple(unloaded))
