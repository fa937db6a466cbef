"""Divides a model's layers among machines by their speed and memory.

A token goes through all ranks one after another, so its time is the sum of the ranks' times and of the hops
between them. A rank computes its layers and reads what its budget doesn't hold at the same time, so the
longer of the two counts. All divisions of the model are compared, by dynamic programming over the places
where it can be cut. This module opens no file and contacts no machine: it gets all figures as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.budget.draft_layers import draft_layer_bytes
from ondevice.budget.plan import Plan, plan_memory
from ondevice.budget.sizes import context_tokens
from ondevice.budget.token_costs import TokenBytes, active_shares, token_bytes
from ondevice.bundle.parts import layer_words, part_expert_use, part_predictors, part_streams
from ondevice.bundle.quantization_section import part_quant
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.errors import BudgetError, UnsupportedModelError, UsageError
from ondevice.model_config import LayerSpec, ModelConfig, cut_places, part_config
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import memory_model
from ondevice.runtime.models import for_slice
from ondevice.speculation.registry import datastore_bytes, used_draft_layer
from ondevice.units import format_bytes

TOLERANCE = 0.01
"""Share by which a token may be slower than in the fastest division.

Predictions are no better than that, and of divisions within it the one whose slowest rank is fastest is
taken: prompts are pipelined, and go as fast as that rank."""


@dataclass(frozen=True)
class RankResources:
    """The resources of one machine.

    Args:
        name: the machine's name, for people.
        budget_bytes: its DRAM budget.
        process_bytes: memory of its process without the model.
        compute_bytes_per_second: weights in memory that it multiplies by one token in a second.
        flash_bytes_per_second: bytes that it reads from flash in a second, in reads as its plan makes them.
        layers: the first layer in its bundle, and one past the last; None if it has all layers.
    """

    name: str
    budget_bytes: int
    process_bytes: int
    compute_bytes_per_second: float
    flash_bytes_per_second: float
    layers: tuple[int, int] | None = None

    def has(self, first: int, stop: int) -> bool:
        """Whether the machine's bundle has layers `first` to `stop` - 1."""
        return self.layers is None or self.layers[0] <= first < stop <= self.layers[1]


@dataclass(frozen=True)
class RankShare:
    """A rank's layers, `first` to `stop` - 1, with their plan and the time that a token takes in them."""

    name: str
    first: int
    stop: int
    plan: Plan
    bytes: TokenBytes
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The entry of `ranks` that `inspect --hosts --json` prints."""
        return {
            "name": self.name,
            "first_layer": self.first,
            "layers": self.stop - self.first,
            "computed_bytes_per_token": round(self.bytes.computed),
            "flash_bytes_per_token": round(self.bytes.read),
            "seconds_per_token": self.seconds,
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True)
class Division:
    """The layers of each rank. hop_seconds: time from one rank to the next."""

    shares: tuple[RankShare, ...]
    hop_seconds: float

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and one-past-last layer of every rank."""
        return tuple((share.first, share.stop) for share in self.shares)

    @property
    def hops(self) -> int:
        """Number of hops of a token: 0 on one machine, otherwise one per rank, around the ring."""
        return len(self.shares) if len(self.shares) > 1 else 0

    @property
    def seconds_per_token(self) -> float:
        """Predicted seconds for a token that is decoded without drafts."""
        return sum(share.seconds for share in self.shares) + self.hops * self.hop_seconds


def divide(
    bundle: Bundle,
    runtime: RuntimeConfig,
    ranks: Sequence[RankResources],
    hop_seconds: float = 0.0,
    draft_model_bytes: int = 0,
) -> Division:
    """The division of a model with the least predicted time per token.

    Args:
        bundle: the complete model.
        runtime: settled options, except for the budget. Rank 0 drafts as they say.
        ranks: in order; rank 0 has the embedding and the head.
        hop_seconds: time of a message from one rank to the next.
        draft_model_bytes: memory of a second model that drafts, on rank 0.

    Raises UnsupportedModelError if the model can't be cut into as many parts, UsageError if slices on the
    machines lack layers, and BudgetError, which says what would be enough, if budgets are too small.
    """
    config = bundle.config
    bounds = (0, *cut_places(config), config.num_layers)
    count = len(ranks)
    if count >= len(bounds):
        raise UnsupportedModelError(
            f"{count} hosts are too many for {bundle.name}: its {config.num_layers} layers can be cut into "
            f"{len(bounds) - 1} parts at most; name {len(bounds) - 1} hosts or fewer"
        )
    ranges = _Ranges(bundle, runtime, draft_model_bytes)
    # Seconds where budgets surely do, where they do by this measurement of the processes, and what they lack.
    surely, barely, missing = (np.full((count, len(bounds), len(bounds)), np.inf) for _ in range(3))
    for rank, resources in enumerate(ranks):
        # Every other rank needs a layer before and behind these.
        for low in range(rank, rank + 1 if rank == 0 else len(bounds) - count + rank):
            for high in range(low + 1, len(bounds) - count + rank + 1):
                if rank == count - 1 and high < len(bounds) - 1:
                    continue
                if not resources.has(bounds[low], bounds[high]):
                    continue
                share = ranges.share(rank, resources, bounds[low], bounds[high])
                plan, at = share.plan, (rank, low, high)
                missing[at] = max(0, plan.least_budget_bytes - plan.budget_bytes)
                if plan.suffices:
                    barely[at] = share.seconds
                if plan.budget_bytes >= plan.minimum_budget_bytes:
                    surely[at] = share.seconds
    if not np.isfinite(least_sum(missing)[0]):
        raise UsageError(slices_lack(bundle.name, config.num_layers, ranks))
    best = fastest(surely) or fastest(barely)
    cuts = [bounds[at] for at in (best or least_sum(missing)[1])]
    shares = tuple(
        ranges.share(rank, resources, *pairs)
        for rank, (resources, pairs) in enumerate(zip(ranks, pairwise(cuts), strict=True))
    )
    if best is None:
        raise _too_small(bundle.name, shares)
    return Division(shares, hop_seconds)


def slices_lack(name: str, num_layers: int, ranks: Sequence[RankResources]) -> str:
    """The text of an error for slices that together don't make a model of `num_layers` consecutive layers."""
    owned = ((it.name, it.layers or (0, num_layers)) for it in ranks)
    have = ", ".join(f"{rank} has {layer_words(first, stop)}" for rank, (first, stop) in owned)
    return (
        f"the hosts' slices don't make the {num_layers} layers of {name}, one rank behind the other: {have}; "
        "run `ondevice split` for these hosts and copy each its own, or the whole bundle to all"
    )


def _too_small(name: str, shares: Sequence[RankShare]) -> BudgetError:
    """The error for budgets that are too small, made from the division that lacks the least memory."""
    short = [it for it in shares if not it.plan.suffices]
    lines = (
        f"{it.name} has {_size(it.plan.budget_bytes)} of the {_size(it.plan.minimum_budget_bytes)} for "
        f"{layer_words(it.first, it.stop)}"
        for it in short
    )
    return BudgetError(
        f"the hosts' budgets are too small for {name}, however its layers are divided. In the division that "
        f"lacks least, {'; '.join(lines)}. Raise these budgets to that, add a host, or lower --max-context",
        required_bytes=max(it.plan.minimum_budget_bytes for it in short),
    )


def fastest(seconds: NDArray[np.float64]) -> list[int] | None:
    """The best division, as indices of the bounds between the ranks' ranges; None if no division is possible.

    Among the divisions whose sum of seconds is within `TOLERANCE` of the least, it has the smallest maximum.

    seconds: (R, B, B), of rank r with the layers between bounds i and j; infinite if that isn't possible.
    """
    least, _ = least_sum(seconds)
    if not np.isfinite(least):
        return None
    limits = np.unique(seconds[np.isfinite(seconds)])
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        total, _ = least_sum(np.where(seconds <= limits[middle], seconds, np.inf))
        if total <= (1 + TOLERANCE) * least:
            high = middle
        else:
            low = middle + 1
    return least_sum(np.where(seconds <= limits[high], seconds, np.inf))[1]


def least_sum(costs: NDArray[np.float64]) -> tuple[float, list[int]]:
    """The smallest sum of all ranks' costs, and the indices of the bounds of their consecutive ranges.

    costs: (R, B, B), of rank r with the layers between bounds i and j; infinite if j doesn't come after i.
    """
    ranks, count, _ = costs.shape
    best, before = np.full(count, np.inf), []
    best[0] = 0.0
    for rank in range(ranks):
        sums = best[:, None] + costs[rank]
        before.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    cuts = [count - 1]
    for chosen in reversed(before):
        cuts.append(int(chosen[cuts[-1]]))
    return float(best[-1]), cuts[::-1]


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({format_bytes(nbytes)})"


def rank_bundle(bundle: Bundle, first: int, stop: int) -> Bundle:
    """The slice that a rank with layers `first` to `stop` - 1 runs.

    bundle: complete, or a slice that has these layers. Raises what `Bundle.slice` raises.
    """
    return bundle.slice(first, stop, heads=bundle.config.part.heads and first == 0)


class _Ranges:
    """The plans of ranges of layers. Equal ranges share one plan."""

    def __init__(self, bundle: Bundle, runtime: RuntimeConfig, draft_model_bytes: int) -> None:
        config = bundle.config
        self._bundle = bundle
        self._runtime = replace(runtime, max_context=context_tokens(config, runtime))
        layer, of_layer = used_draft_layer(runtime.speculation, bundle.draft_layers), 0
        # `auto` drafts with one only where there is room for it.
        if layer is not None and runtime.speculation != "auto":
            of_layer = draft_layer_bytes(layer, config, runtime, self._runtime.max_context)
        self._drafting = draft_model_bytes, datastore_bytes(runtime.speculation, bundle.ngrams), of_layer
        self._active = active_shares(bundle, runtime)
        known: dict[tuple[LayerSpec, Any], int] = {}
        stored = map(bundle.quant.layer_formats, range(config.num_layers))
        self._kinds = [known.setdefault(kind, len(known)) for kind in zip(config.layers, stored, strict=True)]
        self._plans: dict[Any, tuple[ModelConfig, Plan]] = {}
        self._shares: dict[Any, RankShare] = {}

    def share(self, rank: int, resources: RankResources, first: int, stop: int) -> RankShare:
        """The share of a rank that has layers `first` to `stop` - 1, planned under its budget."""
        # Machines are often equal.
        key = rank == 0, replace(resources, name=""), first, stop
        if key not in self._shares:
            self._shares[key] = self._share(rank, resources, first, stop)
        return replace(self._shares[key], name=resources.name)

    def _share(self, rank: int, resources: RankResources, first: int, stop: int) -> RankShare:
        config, plan = self._planned(first, stop, embeds=rank == 0)
        process = resources.process_bytes
        plan = replace(plan, process_bytes=plan.process_bytes + process).with_budget(resources.budget_bytes)
        use = self._bundle.expert_use
        if use is not None:
            use = part_expert_use(use, self._bundle.config, config)
        quant = part_quant(self._bundle.quant, config, first)
        of_token = token_bytes(config, quant, plan, self._active[first:stop], use)
        computing = of_token.computed / resources.compute_bytes_per_second
        seconds = max(computing, of_token.read / resources.flash_bytes_per_second)
        return RankShare(resources.name, first, stop, plan, of_token, seconds)

    def _planned(self, first: int, stop: int, embeds: bool) -> tuple[ModelConfig, Plan]:
        """The config and the plan of a range of layers, without a budget and without the process's memory."""
        bundle, layer_slice = self._bundle, slice(first, stop)
        streams = bundle.streams and part_streams(bundle.streams, layer_slice)
        predictors = bundle.predictors and part_predictors(bundle.predictors, layer_slice)
        streams_entry = None if streams is None else (streams.first_layer, streams.begins)
        key = embeds, streams_entry, predictors and predictors.ranks, tuple(self._kinds[layer_slice])
        if key not in self._plans:
            config = part_config(bundle.config, first, stop, embeds, embeds)
            runtime = for_slice(config, self._runtime)
            quant = part_quant(bundle.quant, config, first)
            memory = memory_model(config, quant, runtime, predictors, streams)
            if embeds:
                model, store, layer = self._drafting
                memory = replace(
                    memory, draft_model_bytes=model, datastore_bytes=store, draft_layer_bytes=layer
                )
            self._plans[key] = config, plan_memory(memory, budget_bytes=0, process_bytes=0)
        return self._plans[key]
