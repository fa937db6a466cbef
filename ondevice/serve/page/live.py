"""The state of the server that the page shows: the plan and running totals, all read at one moment."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from ondevice.chat_template import abilities
from ondevice.errors import OndeviceError
from ondevice.meter import Counters
from ondevice.serve.models import ModelFacts, ServedModel
from ondevice.units import process_memory

if TYPE_CHECKING:
    from ondevice.budget.plan import Plan
    from ondevice.serve.exchange import Service

INTERVAL_SECONDS = 0.5
"""Least time between two readings, for however many pages look."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of SamplingConfig that a chat's settings have."""


class Live:
    """Reads the server's state, at most once an interval, because every reading waits for the engine's next
    token.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._abilities = {name: abilities(it.template) for name, it in service.models.facts.items()}
        self._lock = asyncio.Lock()
        self._state: dict[str, Any] = {}

    async def state(self, newest: bool = False) -> dict[str, Any]:
        """The state as JSON. newest: whether to read it now; otherwise it may be up to an interval old."""
        async with self._lock:
            old = time.monotonic() - self._state.get("seconds", -INTERVAL_SECONDS)
            if newest or old >= INTERVAL_SECONDS:
                self._state = await self._read()
            return self._state

    async def _read(self) -> dict[str, Any]:
        service, loaded = self._service, self._service.models.loaded
        plan, counters = None, Counters()
        drafted, accepted = service.metrics.drafts
        if loaded is not None:
            plan, counters = await asyncio.to_thread(_read_model, loaded)
        return {
            "models": {name: self._told(facts) for name, facts in service.models.facts.items()},
            "loaded": None if loaded is None else loaded.facts.name,
            "plan": plan,
            "pressure": None if loaded is None else loaded.model.memory_pressure.level,
            "running": service.metrics.value("running_requests"),
            "waiting": service.metrics.value("waiting_requests"),
            "generated_tokens": service.metrics.value("generated_tokens_total"),
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
            "flash_bytes_read": counters.flash_bytes_read,
            "cache_hits": counters.neuron_cache_hits,
            "cache_lookups": counters.neuron_cache_lookups,
            "memory_bytes": process_memory().current_bytes,
            "seconds": time.monotonic(),
        }

    def _told(self, facts: ModelFacts) -> dict[str, Any]:
        """What the page shows of a model: its context in tokens, its authors' recommendations, and its
        template's abilities.
        """
        return {
            "context": self._service.models.context_tokens(facts),
            "sampling": {name: getattr(facts.sampling, name) for name in SAMPLING},
            "abilities": self._abilities[facts.name],
        }


def _read_model(loaded: ServedModel) -> tuple[dict[str, Any] | None, Counters]:
    """The plan and the totals of a model; None and zeros if it was closed meanwhile."""
    try:
        return shown(loaded.model.plan, loaded.model.replanned), loaded.model.counters
    except OndeviceError:
        return None, Counters()


def shown(plan: Plan, replanned: Plan) -> dict[str, Any]:
    """A plan as the page shows it, with its parts merged into a few, and the budgets that the models may have
    now.

    The smallest budget leaves out other models that are idle, because these would make room.
    """
    parts = {
        "Weights of every token": plan.resident_weights_bytes + plan.predictor_bytes,
        "Other weights kept": plan.neuron_cache_bytes,
        f"{plan.max_context} tokens of context": plan.kv_cache_bytes,
        "Buffers and drafting": plan.staging_bytes + plan.activation_bytes + plan.draft_bytes,
        "The process": plan.process_bytes + plan.unread_bytes + plan.constraint_bytes,
    }
    if plan.others_bytes:
        parts["Other models"] = plan.others_bytes
    return {
        "budget_bytes": plan.budget_bytes,
        "least_bytes": replanned.minimum_budget_bytes - replanned.others_bytes,
        "full_bytes": replanned.full_bytes,
        "total_bytes": plan.total_bytes,
        "flash_bytes": max(0, plan.model_bytes - plan.resident_weights_bytes - plan.neuron_cache_bytes),
        "parts": [{"name": name, "bytes": nbytes} for name, nbytes in parts.items()],
    }
