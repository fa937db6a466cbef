"""Predicts a model's tokens per second, under budgets from the smallest to one that holds everything.

A token takes as long as multiplying its weights, or as reading those that aren't in memory, whichever is
longer, since the two overlap. Both rates are measured. The prediction leaves out drafts, which may make text
faster, and long texts, whose keys and values take time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ondevice.budget.plan import Plan
from ondevice.budget.token_costs import active_shares, flash_rate, token_bytes
from ondevice.bundle.expert_use import ExpertUse
from ondevice.config import QuantConfig
from ondevice.doctor.rates import MachineRates, machine_rates
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass
from ondevice.runtime.conversion import Prepared
from ondevice.runtime.models import model_home
from ondevice.runtime.resolving import ResolvedModel
from ondevice.units import usable_cores

BUDGET_STEPS = 7
"""Equal steps between the smallest budget and the one that holds everything."""
LAYER_SECONDS = 0.0002
"""Seconds of a layer that don't depend on its size: calls, norms, attention to a short text."""
AMPLE_BYTES = 1 << 60
"""A budget that holds every model."""


@dataclass(frozen=True)
class ExpectedSpeed:
    """The speed to expect under one budget, at the start of a text."""

    budget_bytes: int
    tokens_per_second: float
    flash_bytes_per_token: int
    max_context: int
    sparsity: str


@dataclass(frozen=True)
class SpeedForecast:
    """The speeds to expect of a model under several budgets, from the smallest that works upwards."""

    rates: MachineRates
    flash_bytes_per_second: float
    """Rate of reads as dense passes, or those of experts, make them."""
    by_budget: tuple[ExpectedSpeed, ...]

    def to_json(self) -> dict[str, Any]:
        """The object `speed` that `inspect --json` prints."""
        return {
            "flash_bytes_per_second": round(self.flash_bytes_per_second),
            "flash_measured": self.rates.flash_measured,
            "multiply_bytes_per_second": round(self.rates.multiply_bytes_per_second),
            "threads": self.rates.threads,
            "by_budget": [asdict(speed) for speed in self.by_budget],
        }


def forecast_model(resolved: ResolvedModel) -> SpeedForecast:
    """The speeds to expect of a bundle, with the options that its plan was made for. Measures
    this machine.
    """
    bundle, under = resolved.bundle, resolved.under
    assert under is not None, "a model among alternatives has no plans for other budgets"
    smallest, full_bytes = resolved.smallest_plan.plan, under(AMPLE_BYTES).plan.full_bytes
    planned = [under(budget) for budget in _budgets(smallest.minimum_budget_bytes, full_bytes)]
    # Reading a bundle's hotness takes a while, and modes are few.
    runtimes = {it.plan.sparsity: it.runtime for it in planned}
    active = {sparsity: active_shares(bundle, runtime) for sparsity, runtime in runtimes.items()}
    files = [bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)]
    rates = machine_rates(resolved.runtime.threads, bundle.path, files)
    plans = [it.plan for it in planned]
    return _forecast(bundle.config, bundle.quant, plans, rates, active, bundle.expert_use)


def forecast_source(prepared: Prepared, plan: Plan) -> SpeedForecast:
    """The speeds to expect of a checkpoint after conversion. plan: its plan under the smallest budget.
    Measures this machine.
    """
    config = prepared.config
    plans = [plan.with_budget(budget) for budget in _budgets(plan.minimum_budget_bytes, plan.full_bytes)]
    rates = machine_rates(usable_cores(), model_home())
    return _forecast(config, prepared.quant, plans, rates, {plan.sparsity: [1.0] * config.num_layers})


def _budgets(least_bytes: int, full_bytes: int) -> list[int]:
    """Budgets in equal steps from the smallest to the one that holds everything."""
    span = max(0, full_bytes - least_bytes)
    return sorted({least_bytes + span * step // BUDGET_STEPS for step in range(BUDGET_STEPS + 1)})


def _forecast(
    config: ModelConfig,
    quant: QuantConfig,
    plans: Sequence[Plan],
    rates: MachineRates,
    active: Mapping[str, list[float]],
    use: ExpertUse | None = None,
) -> SpeedForecast:
    """The speeds to expect under each of the plans.

    active: the share of each layer's neurons that a token multiplies, by sparsity mode.
    """
    speeds = []
    for plan in plans:
        of_token = token_bytes(config, quant, plan, active[plan.sparsity], use, plan.kv_block_bytes)
        reading = of_token.read / flash_rate(config, quant, plan.sparsity, rates.flash)
        computing = of_token.computed / rates.multiply_bytes_per_second + LAYER_SECONDS * config.num_layers
        speeds.append(
            ExpectedSpeed(
                plan.budget_bytes,
                1 / max(reading, computing),
                round(of_token.read),
                plan.max_context,
                plan.sparsity,
            )
        )
    return SpeedForecast(rates, flash_rate(config, quant, "dense", rates.flash), tuple(speeds))
