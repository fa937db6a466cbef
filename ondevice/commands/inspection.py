"""Reports of `inspect`, for people and as JSON: one model, or the list of models. Prints nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from ondevice.budget.limits import context_words, verdict
from ondevice.budget.plan import Plan
from ondevice.bundle.draft_layers import SIDECAR_OF, DraftLayer
from ondevice.bundle.expert_use import ExpertUse
from ondevice.bundle.layout import expert_bytes
from ondevice.bundle.parts import part_words
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import no_streams
from ondevice.commands.reports import lossy_lines, parts, percent, residency, size
from ondevice.commands.speed_reports import speed_lines
from ondevice.commands.training_reports import expert_cost_table, stream_facts, trained_facts
from ondevice.measure.expected_speed import SpeedForecast
from ondevice.model_config import FULL_MODEL, ModelConfig
from ondevice.runtime.conversion import Prepared
from ondevice.runtime.mode_change import mode_change
from ondevice.runtime.models import (
    ALIASES,
    SparsityMode,
    known_models,
    model_home,
    sparsity_modes,
)
from ondevice.runtime.resolving import ResolvedModel
from ondevice.units import format_bytes

NAMED_IF_DAMAGED = ("hotness", "expert_costs", "expert_use", "ngrams", *SIDECAR_OF)
"""Keys of sidecars that are reported only if they are damaged."""
BUDGET_STEPS = 4
"""Steps between the budgets for which hits are shown."""


def model_list() -> dict[str, Any]:
    """The object that `inspect --list --json` prints: bundle paths by name, their folder, and aliases."""
    return {
        "models": {name: str(path) for name, path in known_models().items()},
        "folder": str(model_home()),
        "aliases": dict(ALIASES),
    }


def model_list_text() -> str:
    """`inspect --list` for people."""
    listed = model_list()
    models, aliases = listed["models"], listed["aliases"]
    width = max(map(len, (*models, *aliases)))
    return "\n".join(
        [
            f"models, by name ({listed['folder']} and what ships):",
            *([f"  {name:<{width}}  {path}" for name, path in models.items()] or ["  none"]),
            "short names, which `ondevice convert NAME` downloads and converts:",
            *(f"  {name:<{width}}  {source}" for name, source in aliases.items()),
        ]
    )


def inspection(resolved: ResolvedModel, forecast: SpeedForecast | None = None) -> dict[str, Any]:
    """The object that `inspect --json` prints; without a forecast its `speed` is null.

    `minimum_budget_bytes` belongs to the modes in the other `minimum_budget_*` keys; that in `plan`, to the
    plan's modes.
    """
    bundle, plan, smallest = resolved.bundle, resolved.plan, resolved.smallest_plan
    predictors = bundle.predictors
    modes = _modes(bundle)
    change = mode_change(resolved)
    return {
        "model": bundle.name,
        "part": _part_facts(bundle),
        "architecture": bundle.config.architecture,
        "parameters": bundle.parameters,
        "bundle_bytes": bundle.bundle_bytes,
        "quantisation": bundle.quant.name,
        "neurons": list(bundle.config.widths),
        "sparsity_modes": [mode.name for mode in modes if mode.available],
        "predictor_recalls": [] if predictors is None else [point.recall for point in predictors.points],
        "experts": _expert_facts(resolved),
        "expert_costs": None if bundle.expert_costs is None else trained_facts(bundle.expert_costs),
        "streams": None if bundle.streams is None else stream_facts(bundle.streams, bundle.config),
        "ngrams": None if bundle.ngrams is None else trained_facts(bundle.ngrams),
        "draft_layers": list(bundle.draft_layers),
        "damaged": {key: error.for_command_line for key, error in bundle.damaged.items()},
        "speculation": resolved.runtime.speculation,
        "minimum_budget_bytes": smallest.plan.minimum_budget_bytes,
        "minimum_budget_sparsity": smallest.plan.sparsity,
        "minimum_budget_speculation": smallest.runtime.speculation,
        "minimum_budget_context": smallest.plan.max_context,
        "fitting_context": resolved.fitting_context,
        "mode_change": None if change is None else asdict(change),
        "plan": plan.to_json(),
        "speed": None if forecast is None else forecast.to_json(),
    }


def inspection_text(resolved: ResolvedModel, forecast: SpeedForecast | None = None) -> str:
    """`inspect` for people: the model, its modes with reasons, the plan part by part, speeds by budget."""
    bundle, plan, smallest = resolved.bundle, resolved.plan, resolved.smallest_plan
    config = bundle.config
    lines = [
        f"{bundle.name}: {config.architecture}, {bundle.parameters:,} parameters, {bundle.quant.name}, "
        f"bundle {size(bundle.bundle_bytes)}",
        *([] if config.part == FULL_MODEL else [part_words(bundle.manifest)]),
        *_widths_lines(config),
        "sparsity modes:",
        *(f"  {it.name:<10}{'yes' if it.available else 'no'}: {it.reason}" for it in _modes(bundle)),
        *_expert_lines(resolved),
        f"streams: {_streams_line(bundle)}",
        *(f"ngrams: a datastore of {it.tokens:,} tokens" for it in (bundle.ngrams,) if it is not None),
        *_draft_layer_lines(bundle),
        *(
            f"{key}: {bundle.damaged[key].for_command_line}"
            for key in NAMED_IF_DAMAGED
            if key in bundle.damaged
        ),
        f"memory for a budget of {size(plan.budget_bytes)}, {context_words(plan)}, "
        f"with {_modes_taken(resolved)}:",
        *(_part_line(what, nbytes) for what, nbytes in [*parts(plan), ("total", plan.total_bytes)]),
        *([f"at the start of a text: {size(plan.start_bytes)}", residency(plan)] if plan.fits else []),
        *_mode_change_lines(resolved),
        *([] if smallest is resolved else [f"smallest budget for these: {size(plan.minimum_budget_bytes)}"]),
        f"smallest budget that works: {size(smallest.plan.minimum_budget_bytes)}, "
        f"with {_modes_taken(smallest)}:",
        *(_part_line(what, nbytes, 40) for what, nbytes in smallest.plan.minimum_parts.items()),
        f"everything resident: {size(plan.full_bytes)}",
        f"fits: {verdict(plan, resolved.fitting_context)}",
        *(f"warning: {warning}" for warning in resolved.budget_warnings),
        *([] if forecast is None else speed_lines(forecast)),
    ]
    return "\n".join(lines)


def source_inspection(prepared: Prepared, plan: Plan, forecast: SpeedForecast) -> dict[str, Any]:
    """The object that `inspect --json` prints of a checkpoint that isn't converted yet."""
    estimate = prepared.estimate()
    return {
        "model": estimate.name,
        "converted": False,
        "architecture": estimate.architecture,
        "parameters": estimate.parameters,
        "download_bytes": estimate.download_bytes,
        "bundle_bytes": estimate.bundle_bytes,
        "quantisation": estimate.quantisation,
        "minimum_budget_bytes": plan.minimum_budget_bytes,
        "plan": plan.to_json(),
        "speed": forecast.to_json(),
    }


def source_inspection_text(prepared: Prepared, plan: Plan, forecast: SpeedForecast) -> str:
    """`inspect` of a checkpoint that isn't converted yet, for people."""
    estimate = prepared.estimate()
    lines = [
        f"{estimate.name}: {estimate.architecture}, {estimate.parameters:,} parameters, not converted yet; "
        f"as {estimate.quantisation} its bundle would have {size(estimate.bundle_bytes)}",
        f"smallest budget that works: about {size(plan.minimum_budget_bytes)}, {context_words(plan)}, with "
        f"--sparsity {plan.sparsity} --speculation off:",
        *(_part_line(what, nbytes, 40) for what, nbytes in plan.minimum_parts.items()),
        *([] if prepared.has_tokenizer else ["a tokenizer isn't here, and comes on top of that"]),
        f"everything resident: {size(plan.full_bytes)}",
        f"a budget of {size(plan.budget_bytes)} fits: {verdict(plan, 0)}",
        *speed_lines(forecast),
    ]
    return "\n".join(lines)


def _part_facts(bundle: Bundle) -> dict[str, Any] | None:
    """The facts of the part of a model that is in a slice; None for a complete model."""
    part = bundle.config.part
    if part == FULL_MODEL:
        return None
    return {
        "first_layer": part.first,
        "layers": bundle.config.num_layers,
        "model_layers": part.layers,
        "embeds": part.embeds,
        "heads": part.heads,
        "part_of": bundle.manifest.part_of,
    }


def _draft_layer_lines(bundle: Bundle) -> list[str]:
    """One line for each draft layer."""
    return [
        f"{layer.kind}: {len(layer.windows)} layers of {layer.neurons:,} neurons each that draft "
        f"{layer.block_drafts} tokens at once, at {layer.bits} bits"
        if layer.block
        else f"{layer.kind}: a draft layer of {_feed_forward(layer)} that knows {layer.tokens:,} tokens, at "
        f"{layer.bits} bits"
        for layer in bundle.draft_layers.values()
    ]


def _feed_forward(layer: DraftLayer) -> str:
    """A description of a draft layer's feed-forward."""
    if layer.experts is None:
        return f"{layer.neurons:,} neurons"
    return f"{layer.experts.count:,} experts"


def _modes(bundle: Bundle) -> tuple[SparsityMode, ...]:
    """The sparsity modes that the model can run in with any options."""
    return sparsity_modes(bundle.manifest.config, bundle.predictors, bundle.damaged)


def _expert_facts(resolved: ResolvedModel) -> dict[str, Any] | None:
    """Facts on experts: their numbers, and the bytes that a token's experts take in all layers; None without
    experts.

    `in_memory` is how many are kept with a full context. `own_chosen` is the model's number of experts per
    token, and `chosen` is smaller if `--experts` says so; then it is `lossy`. `expected_hits` is the share of
    lookups served from memory, as on the calibration's text; None without a calibration, and if `lossy`.
    `hits_by_budget` has the same for budgets in even steps, from the smallest with these modes and this
    context to one that holds all experts.
    """
    config, plan = resolved.bundle.config, resolved.plan
    experts = config.experts
    if experts is None:
        return None
    layers = sum(layer.experts is not None for layer in config.layers)
    nbytes = expert_bytes(config, resolved.bundle.quant)
    total, use = layers * experts.count, resolved.bundle.expert_use
    kept = total if resolved.runtime.backend == "reference" else min(total, plan.kept_slots)
    # A calibration's text chose as the model does.
    fewer = resolved.default_experts > 0
    return {
        "layers": layers,
        "count": experts.count,
        "chosen": experts.chosen,
        "own_chosen": resolved.default_experts or experts.chosen,
        "lossy": fewer,
        "expert_bytes": nbytes,
        "cycle_bytes": layers * experts.chosen * nbytes,
        "in_memory": kept,
        "expected_hits": None if use is None or fewer else use.expected_hits(kept, total),
        "hits_by_budget": None if use is None or fewer else _hits_by_budget(plan, use, total),
    }


def _hits_by_budget(plan: Plan, use: ExpertUse, total: int) -> list[dict[str, Any]]:
    """For several budgets, the number of experts that it keeps of `total`, and the expected share of hits."""
    least, most = plan.minimum_budget_bytes, max(plan.minimum_budget_bytes, plan.full_bytes)
    hits_by_budget = []
    for step in range(BUDGET_STEPS + 1):
        budget = least + (most - least) * step // BUDGET_STEPS
        kept = min(total, plan.with_budget(budget).kept_slots)
        hits = use.expected_hits(kept, total)
        hits_by_budget.append({"budget_bytes": budget, "in_memory": kept, "expected_hits": hits})
    return hits_by_budget


def _expert_lines(resolved: ResolvedModel) -> list[str]:
    """A line, for a model with experts, with how many experts a token uses and how many the budget keeps."""
    facts = _expert_facts(resolved)
    if facts is None:
        return []
    total, cycle = facts["layers"] * facts["count"], facts["layers"] * facts["chosen"]
    line = (
        f"experts: {facts['count']} in each of {facts['layers']} layers, {size(facts['expert_bytes'])} each; "
        f"a token's cycle is {cycle} of them, {size(facts['cycle_bytes'])}; with a full context the budget "
        f"keeps {facts['in_memory']} of {total}"
    )
    below = "less than a token's cycle: most are then read for each token"
    lossy, costs = lossy_lines(resolved), resolved.bundle.expert_costs
    if costs is not None:
        lossy += [f"  {row}" for row in expert_cost_table(costs).splitlines()]
    return [line if facts["in_memory"] >= cycle else f"{line}, {below}", *_hit_lines(resolved, facts), *lossy]


def _hit_lines(resolved: ResolvedModel, facts: dict[str, Any]) -> list[str]:
    """Lines with the expected hits, here and by budget, if the bundle has a calibration."""
    use, hits = resolved.bundle.expert_use, facts["expected_hits"]
    if use is None or hits is None:
        return []
    others = (
        f"{percent(it['expected_hits'])} in {size(it['budget_bytes'])}" for it in facts["hits_by_budget"]
    )
    return [
        f"hits to expect with a full context: {percent(hits)} of lookups, as on {use.replayed_tokens:,} "
        "tokens of a text",
        f"  by budget: {', '.join(others)}",
    ]


def _widths_lines(config: ModelConfig) -> list[str]:
    """A line with the layers' numbers of neurons, if they differ."""
    widths = sorted(Counter(config.widths).items())
    if len(widths) == 1:
        return []
    counts = (f"{neurons:,} in {layers} layer{'s' * (layers > 1)}" for neurons, layers in widths)
    return [f"feed-forward neurons: {', '.join(counts)}"]


def _mode_change_lines(resolved: ResolvedModel) -> list[str]:
    """A line with the budget below which `auto` chooses other modes, if there is one."""
    change = mode_change(resolved)
    if change is None:
        return []
    modes = f"--sparsity {change.sparsity} --speculation {change.speculation}"
    return [f"below a budget of {size(change.budget_bytes)}, auto takes {modes}"]


def _modes_taken(resolved: ResolvedModel) -> str:
    shortened = f" --max-context {resolved.plan.max_context}" if resolved.plan.wanted_context else ""
    return f"--sparsity {resolved.plan.sparsity} --speculation {resolved.runtime.speculation}{shortened}"


def _part_line(what: str, nbytes: int, width: int = 24) -> str:
    return f"  {what:<{width}}{format_bytes(nbytes):>9}{nbytes:>16}"


def _streams_line(bundle: Bundle) -> str:
    streams = bundle.streams
    if streams is None:
        damage = bundle.damaged.get("streams")
        if damage is not None:
            return damage.for_command_line
        return "none" if bundle.config.is_plain else f"none: {no_streams(bundle.config)}"
    accepted = ", ".join(map(percent, streams.acceptance))
    added = streams.adapter_parameters(bundle.config) + streams.embedding_parameters(bundle.config)
    return f"{streams.streams}, {streams.mode}, {added:,} parameters; accepted {accepted}"
