"""One loaded model under several drafters alternately, for measurements that compare them."""

from __future__ import annotations

import time
from contextlib import ExitStack

from ondevice.callbacks import never_cancelled
from ondevice.runtime.engine import Engine
from ondevice.runtime.resolving import ResolvedModel
from ondevice.speculation.drafting import Drafting

FILL_SECONDS = 0.0005
"""Seconds between two steps of reading ahead."""


class DrafterSwitch:
    """One loaded model that drafts with one drafter after another.

    Each drafter begins as if the model had just been loaded for it: offloaded weights are read anew. What a
    drafter has learned stays for its next turn, and so do the neuron cache's statistics. Memory of drafters
    that aren't in use is in no plan. If one of them drafts by streams, the engine must have been made with
    streams.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._made: dict[str, Drafting | None] = {}
        self._closing = ExitStack()

    def draft_as(self, arm: ResolvedModel) -> None:
        """Switch to the drafter and the memory plan of `arm`, the same model with another `--speculation`.

        Raises BudgetError, and changes nothing, if the plan doesn't fit. Raises what making a drafter raises.
        """
        engine, name = self.engine, arm.runtime.speculation
        engine.set_plan(arm.plan, emptied=engine.plan.offloads_weights or arm.plan.offloads_weights)
        if name not in self._made:
            drafting = self._made[name] = engine.make_drafting(arm, never_cancelled)
            if drafting is not None:
                self._closing.callback(drafting.close)
        engine.draft_with(name, self._made[name])
        while engine.fill_ahead():
            time.sleep(FILL_SECONDS)

    def close(self) -> None:
        """Close every drafter that the switch has made."""
        self._closing.close()
        self._made.clear()
