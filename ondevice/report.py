"""Plans, figures and progress as lines of text, for people. Prints nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from statistics import mean
from typing import Any

from ondevice.budget_limits import context_words, verdict
from ondevice.budget_watch import MemoryPressure
from ondevice.bundle.predictors import OperatingPoint, Predictors
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import Streams, medusa_parameters
from ondevice.bundle.thresholds import ThresholdPoint, Thresholds
from ondevice.config import ModelConfig
from ondevice.memory_plan import Plan
from ondevice.memory_sizes import NARROW_TOKENS
from ondevice.models import ALIASES, SparsityMode, known_models, model_home, sparsity_modes
from ondevice.preparation import Prepared
from ondevice.profiling import Profile
from ondevice.stats import GenerationStats
from ondevice.units import format_bytes

PROFILE_SPANS = (8, 32)
"""Neighbouring tokens whose distinct neurons the table has; the plot has all."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plan_summary(plan: Plan) -> str:
    """The plan in two lines, as commands show it before they load; a third where the context is short."""
    shortened = f"\n      {context_words(plan)}" if plan.wanted_context else ""
    return (
        f"plan: budget {size(plan.budget_bytes)}, uses {size(plan.total_bytes)}: {_parts_line(plan)}\n"
        f"      {residency(plan)}{shortened}"
    )


def pressure_summary(found: MemoryPressure) -> str:
    """What memory pressure has done to a budget, in a line."""
    now, own = format_bytes(found.budget_bytes), format_bytes(found.user_budget_bytes)
    return (
        f"memory pressure: {found.level}; the budget is {now} of {own}, has shrunk {found.shrinks} times and "
        f"grown {found.growths} times"
    )


def residency(plan: Plan) -> str:
    """What will be in memory, and what is read from flash: `figures` counts it by the same plan."""
    least = plan.segment.least
    start, full = (
        plan.segments_for(kv, NARROW_TOKENS) - least for kv in (plan.kv_block_bytes, plan.kv_cache_bytes)
    )
    total = plan.segment.total - least
    if plan.reads_once:
        return "everything will be resident, read from flash once, as tokens first need it"
    if not plan.streams:
        return "the feed-forward will be resident; a row of the embedding is read from flash for each token"
    if plan.sparsity != "dense":
        return (
            f"room for {share(start, total)} of the neurons at the start, {share(full, total)} at "
            f"{plan.max_context} tokens; of the others, those that are selected are read from flash"
        )
    return (
        f"feed-forward to be resident: {share(start, total)} at the start, {share(full, total)} at "
        f"{plan.max_context} tokens; the rest streams from flash"
    )


def share(part: int, whole: int) -> str:
    """A percentage; 100 % of nothing."""
    return f"{100 * part // whole if whole else 100} %"


def size(nbytes: int) -> str:
    """`4.00 GB (4000000000 bytes)`."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def figures(stats: GenerationStats, plan: Plan) -> str:
    """The closing line of a generation. What fills memory once is no token's: it isn't divided by them."""

    def read(nbytes: int) -> str:
        if plan.reads_once:
            return format_bytes(nbytes)
        return f"{format_bytes(nbytes // max(1, stats.generated_tokens))}/token"

    filling = " to fill memory" if plan.reads_once else ""
    guesses = (
        f"; guessed {100.0 * stats.guess_recall:.0f} % of the rest, {read(stats.guess_wasted_bytes)} in vain"
        if stats.guess_recall or stats.guess_wasted_bytes
        else ""
    )
    waits = (
        f"; {stats.synchronisations / max(1, stats.forward_passes):.1f} waits for the device a pass, "
        f"{stats.synchronised_seconds:.2f} s in all"
        if stats.synchronisations
        else ""
    )
    return (
        f"{stats.generated_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s; "
        f"prompt {stats.prompt_tokens} tokens, {stats.prefill_tokens_per_second:.1f} tokens/s; "
        f"first token {stats.time_to_first_token_seconds:.2f} s; "
        f"peak {format_bytes(stats.peak_memory_bytes)}; flash {read(stats.flash_bytes_read)}{filling}, "
        f"read in {stats.flash_read_seconds:.2f} s with {stats.flash_cpu_seconds:.2f} s of CPU; "
        f"cache hits {100.0 * stats.neuron_cache_hit_rate:.0f} %{guesses}{waits}"
        f"{'' if stats.seed is None else f'; seed {stats.seed}'}"
    )


def model_list() -> dict[str, Any]:
    """`inspect --list --json`: the bundles by name, where they lie, and the short names of checkpoints."""
    return {
        "models": {name: str(path) for name, path in known_models().items()},
        "folder": str(model_home()),
        "aliases": dict(ALIASES),
    }


def model_list_text() -> str:
    """`inspect --list` for people."""
    found = model_list()
    models = found["models"].items()
    return "\n".join(
        [
            f"models, by name ({found['folder']} and what ships):",
            *([f"  {name:<24}{path}" for name, path in models] or ["  none"]),
            "short names, which `ondevice convert NAME` downloads and converts:",
            *(f"  {name:<24}{source}" for name, source in found["aliases"].items()),
        ]
    )


def inspection(prepared: Prepared) -> dict[str, Any]:
    """`inspect --json`; `minimum_budget_bytes` is that of the modes named with it, the plan's of its own."""
    bundle, plan, frugal = prepared.bundle, prepared.plan, prepared.frugal
    found, cuts = bundle.predictors, bundle.thresholds
    modes = sparsity_modes(bundle.config, bundle.predictors, bundle.thresholds, bundle.damaged)
    return {
        "model": bundle.name,
        "architecture": bundle.config.architecture,
        "parameters": bundle.parameters,
        "bundle_bytes": bundle.bundle_bytes,
        "quantisation": bundle.quant.name,
        "sparsity_modes": [mode.name for mode in modes if mode.available],
        "predictor_recalls": [] if found is None else [point.recall for point in found.points],
        "threshold_sparsities": [] if cuts is None else [point.sparsity for point in cuts.points],
        "streams": None if bundle.streams is None else stream_figures(bundle.streams, bundle.config),
        "damaged": {key: error.for_command_line for key, error in bundle.damaged.items()},
        "speculation": prepared.runtime.speculation,
        "minimum_budget_bytes": frugal.plan.minimum_budget_bytes,
        "minimum_budget_sparsity": frugal.plan.sparsity,
        "minimum_budget_speculation": frugal.runtime.speculation,
        "minimum_budget_context": frugal.plan.max_context,
        "fitting_context": prepared.fitting_context,
        "plan": plan.to_json(),
    }


def inspection_text(prepared: Prepared) -> str:
    """`inspect` for people: the model, its modes and why, the plan part by part."""
    bundle, plan, frugal = prepared.bundle, prepared.plan, prepared.frugal
    config = bundle.config
    lines = [
        f"{bundle.name}: {config.architecture}, {bundle.parameters:,} parameters, {bundle.quant.name}, "
        f"bundle {size(bundle.bundle_bytes)}",
        "sparsity modes:",
        *map(_mode_line, sparsity_modes(config, bundle.predictors, bundle.thresholds, bundle.damaged)),
        f"streams: {_streams_line(bundle)}",
        *(f"{key}: {bundle.damaged[key].for_command_line}" for key in ("hotness",) if key in bundle.damaged),
        f"memory for a budget of {size(plan.budget_bytes)}, {context_words(plan)}, "
        f"with {_modes_taken(prepared)}:",
        *(_part_line(what, nbytes) for what, nbytes in [*_parts(plan), ("total", plan.total_bytes)]),
        *([residency(plan)] if plan.fits else []),
        *([] if frugal is prepared else [f"smallest budget for these: {size(plan.minimum_budget_bytes)}"]),
        f"smallest budget that works: {size(frugal.plan.minimum_budget_bytes)}, with {_modes_taken(frugal)}:",
        *(_part_line(what, nbytes, 40) for what, nbytes in frugal.plan.minimum_parts.items()),
        f"everything resident: {size(plan.full_bytes)}",
        f"fits: {verdict(plan, prepared.fitting_context)}",
        *(f"warning: {warning}" for warning in prepared.budget_warnings),
    ]
    return "\n".join(lines)


def trained_figures(found: Predictors | Thresholds | Streams) -> dict[str, Any]:
    """`train predictors --json` and `train thresholds --json`."""
    shown = asdict(found)
    return {key: value for key, value in shown.items() if key not in ("model", "sha256", "crcs")}


def predictor_table(found: Predictors) -> str:
    """What each recall target takes and costs, means over layers, and every layer's rank."""
    lines = [
        f"ranks by layer: {' '.join(map(str, found.ranks))}; {found.bits} bits; trained on "
        f"{found.trained_tokens} tokens, measured on {found.measured_tokens}",
        "recall  missed  most of a layer  selected  perplexity  agrees with dense",
    ]
    for point in found.points:
        missed, most = (100 * of(point.false_negatives) for of in (mean, max))
        selected = f"{100 * mean(point.selected):6.1f} %"
        lines.append(f"{point.recall:<8g}{missed:4.2f} %  {most:13.2f} %  {selected}  {_quality(point)}")
    dense = "" if found.perplexity is None else f"{found.perplexity:.3f}"
    lines.append(f"dense      0 %              0 %   100.0 %  {dense}")
    return "\n".join(lines)


def threshold_table(found: Thresholds) -> str:
    """What each sparsity target leaves out and costs: the share of neurons of the layers, and their mean."""
    lines = [
        f"calibrated on {found.calibrated_tokens} tokens, measured on {found.measured_tokens}",
        "sparsity  left out  least and most of a layer  perplexity  agrees with dense",
    ]
    for point in found.points:
        least, most = (percent(share) for share in (min(point.skipped), max(point.skipped)))
        shares = f"{percent(mean(point.skipped)):<10}{f'{least} to {most}':<27}"
        lines.append(f"{point.sparsity:<10g}{shares}{_quality(point)}")
    dense = "" if found.perplexity is None else f"{found.perplexity:.3f}"
    lines.append(f"{'dense':<10}{'0 %':<37}{dense}")
    return "\n".join(lines)


def stream_figures(found: Streams, config: ModelConfig) -> dict[str, Any]:
    """What `streams.json` says, the parameters that it adds, and those of as many of Medusa's heads."""
    return {
        **trained_figures(found),
        "adapter_parameters": found.adapter_parameters(config),
        "embedding_parameters": found.embedding_parameters(config),
        "medusa_parameters": medusa_parameters(config, found.streams),
    }


def stream_table(found: Streams, config: ModelConfig) -> str:
    """The parameters that streams add, beside those of Medusa's heads, and how often each guesses right."""
    added = found.adapter_parameters(config) + found.embedding_parameters(config)
    medusa = medusa_parameters(config, found.streams)
    lines = [
        f"{found.mode}; layers {found.first_layer} to {config.num_layers - 1}; ranks {found.attention_rank} "
        f"of attention, {found.feed_forward_rank} of the feed-forward, {found.pruning_rank} of pruning",
        f"{found.bits} bits; trained on {found.trained_tokens} tokens, measured on {found.measured_tokens}",
        _counted("adapters", found.adapter_parameters(config)),
        _counted("embeddings, pruning", found.embedding_parameters(config)),
        _counted(f"{found.streams} streams", added),
        f"{_counted(f'{found.streams} heads of Medusa', medusa)}, {short(medusa / added)} times as many",
        "guessed right where all streams before had:",
    ]
    for stream, share in enumerate(found.acceptance, 1):
        lines.append(f"{f'stream {stream}':<22}{percent(share):>12}")
    return "\n".join(lines)


def _counted(name: str, parameters: int) -> str:
    return f"{name:<22}{parameters:>15,} parameters"


def _quality(point: OperatingPoint | ThresholdPoint) -> str:
    if point.perplexity is None or point.agreement is None:
        return "not measured"
    return f"{point.perplexity:<12.3f}{100 * point.agreement:.1f} %"


def profile_table(found: Profile) -> str:
    """`profile` for people: neurons by layer, misses by size of the cache, reads by size; notes."""
    lines = [f"{found.model}: {found.num_layers} layers of {found.num_neurons} neurons"]
    if found.firing is not None and found.misses is not None:
        firing, misses = found.firing, found.misses
        spans = [span for span in PROFILE_SPANS if span <= len(firing.distinct[0])]
        rows = [
            (f"layer {layer}", [active, also, *(distinct[span - 1] for span in spans)])
            for layer, (active, also, distinct) in enumerate(
                zip(firing.active, firing.also_before, firing.distinct, strict=True)
            )
        ]
        means = [mean(column) for column in zip(*(shares for _, shares in rows), strict=True)]
        lines += [
            f"{found.tokens} tokens: {found.text}",
            "",
            _columns("neurons", ["fire", "before too", *(f"in {span} tokens" for span in spans)]),
            *(_columns(name, map(percent, shares)) for name, shares in [*rows, ("mean", means)]),
            "",
            _columns("misses of a cache of", map(percent, misses.shares)),
            *(_columns(name, map(percent, rates)) for name, rates in misses.policies.items()),
            _columns("at best (Belady)", map(percent, misses.optimum)),
        ]
    threads = sorted({rate.threads for rate in found.reads.rates})
    sizes = sorted({rate.read_bytes for rate in found.reads.rates})
    rates = {(rate.read_bytes, rate.threads): rate.bytes_per_second for rate in found.reads.rates}
    lines += ["", _columns(f"{found.reads.io} reads, GB/s", [f"{count} threads" for count in threads])]
    for nbytes in sizes:
        lines.append(_columns(f"{nbytes >> 10} KiB", [_gigabytes(rates[nbytes, count]) for count in threads]))
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def short(number: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _columns(name: str, cells: Iterable[str]) -> str:
    return f"{name:<22}" + "".join(f"  {cell:>12}" for cell in cells)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _gigabytes(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.2f}"


def harmless(text: str) -> str:
    """For a terminal: control characters, with which a text could steer it, as U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)


def duration(seconds: float | None) -> str:
    """`3 min 20 s`; a question mark where it isn't known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _modes_taken(prepared: Prepared) -> str:
    shortened = f" --max-context {prepared.plan.max_context}" if prepared.plan.wanted_context else ""
    return f"--sparsity {prepared.plan.sparsity} --speculation {prepared.runtime.speculation}{shortened}"


def _part_line(what: str, nbytes: int, width: int = 24) -> str:
    return f"  {what:<{width}}{format_bytes(nbytes):>9}{nbytes:>16}"


def _mode_line(mode: SparsityMode) -> str:
    return f"  {mode.name:<10}{'yes' if mode.available else 'no'}: {mode.reason}"


def _streams_line(bundle: Bundle) -> str:
    found = bundle.streams
    if found is None:
        damage = bundle.damaged.get("streams")
        return "none" if damage is None else damage.for_command_line
    accepted = ", ".join(map(percent, found.acceptance))
    added = found.adapter_parameters(bundle.config) + found.embedding_parameters(bundle.config)
    return f"{found.streams}, {found.mode}, {added:,} parameters; accepted {accepted}"


def _parts(plan: Plan) -> list[tuple[str, int]]:
    parts = [
        ("weights of every token", plan.resident_weights_bytes),
        ("predictors", plan.predictor_bytes),
        ("KV cache", plan.kv_cache_bytes),
        ("feed-forward, resident", plan.neuron_cache_bytes),
        ("streaming buffers", plan.staging_bytes),
        ("working memory", plan.activation_bytes),
        ("drafts", plan.draft_bytes),
        ("process", plan.process_bytes),
        ("other models", plan.others_bytes),
    ]
    return [(what, nbytes) for what, nbytes in parts if nbytes]


def _parts_line(plan: Plan) -> str:
    return ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in _parts(plan))
