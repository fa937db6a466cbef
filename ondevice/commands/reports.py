"""Plans, stats and durations as lines of text for people. Prints nothing."""

from __future__ import annotations

import re

from ondevice.budget.limits import context_words
from ondevice.budget.plan import Plan
from ondevice.budget.sizes import DECODE_TOKENS, SlotShape
from ondevice.bundle.parts import layer_words
from ondevice.bundle.reader import Bundle
from ondevice.model_config import FULL_MODEL
from ondevice.runtime.budget_watch import MemoryPressure
from ondevice.runtime.resolving import ResolvedModel
from ondevice.stats import GenerationStats, RankStats
from ondevice.units import format_bytes

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plan_summary(plan: Plan) -> str:
    """The plan in two lines, shown before loading, and a third line if the context isn't the default."""
    context = f"\n      {context_words(plan)}" if plan.wanted_context or plan.context_share else ""
    listed = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in parts(plan))
    return (
        f"plan: budget {size(plan.budget_bytes)}, uses {format_bytes(plan.start_bytes)} at the start, "
        f"{size(plan.total_bytes)} at {plan.max_context} tokens: {listed}\n"
        f"      {residency(plan)}{context}"
    )


def opening(bundle: Bundle, plan: Plan) -> str:
    """The opening lines of a chat: the model, its budget, and what stays on flash."""
    return (
        f"{model_words(bundle)} in {format_bytes(plan.budget_bytes)}, where {format_bytes(plan.full_bytes)} "
        f"would hold everything; {context_words(plan)}\n{residency(plan)}"
    )


def model_words(bundle: Bundle) -> str:
    """The model's name, and which layers run on this machine if others run the rest."""
    config, part = bundle.config, bundle.config.part
    if part == FULL_MODEL:
        return bundle.name
    return f"{bundle.name}, {layer_words(part.first, part.first + config.num_layers)} of {part.layers}"


def fewer_experts(chosen: int, model_experts: int) -> str:
    """A sentence on how `--experts` changes the text."""
    return (
        f"lossy: {chosen} of the model's own {model_experts} experts a token (--experts); not the text of all"
    )


def lossy_lines(resolved: ResolvedModel) -> list[str]:
    """Sentences on how the options change the text; empty for models without experts."""
    runtime, model_experts = resolved.runtime, resolved.default_experts
    if resolved.bundle.config.experts is None:
        return []
    return [fewer_experts(runtime.experts, model_experts)] if model_experts else []


def pressure_summary(pressure: MemoryPressure) -> str:
    """Memory pressure and its effect on the budget, in one line."""
    now, full = format_bytes(pressure.budget_bytes), format_bytes(pressure.user_budget_bytes)
    return (
        f"memory pressure: {pressure.level}; the budget is {now} of {full}, has shrunk {pressure.shrinks} "
        f"times and grown {pressure.growths} times"
    )


def residency(plan: Plan) -> str:
    """A sentence on which weights stay in memory and which are read from flash."""
    neurons = _neuron_residency(plan)
    if plan.matrices is None or plan.holds_matrices:
        return neurons
    start, full = (
        share(plan.matrices.held_bytes(plan.held_weights(kv, DECODE_TOKENS).units), plan.matrices.total_bytes)
        for kv in (plan.kv_block_bytes, plan.kv_cache_bytes)
    )
    return f"attention and head to be resident: {start} at the start, {full} when full; {neurons}"


def _neuron_residency(plan: Plan) -> str:
    segment, blocks = plan.segment, (plan.kv_block_bytes, plan.kv_cache_bytes)
    if isinstance(segment, SlotShape):
        start, full = map(plan.kept_slots_for, blocks)
        total = segment.total * segment.slots - segment.reserve
    else:
        start, full = (plan.segments_for(kv, DECODE_TOKENS) - segment.least for kv in blocks)
        total = segment.total - segment.least
    if plan.reads_once:
        return "everything will be resident, read from flash once, as tokens first need it"
    if not plan.offloads_weights:
        return "the feed-forward will be resident; a row of the embedding is read from flash for each token"
    if plan.sparsity == "experts":
        line = (
            f"room for {share(start, total)} of the experts at the start, {share(full, total)} at "
            f"{plan.max_context} tokens; of the others, those that are chosen are read from flash"
        )
        if plan.dense is None or plan.dense_segments == plan.dense.total:
            return line
        kept = share(plan.dense_segments, plan.dense.total)
        return (
            f"{line}; of other feed-forwards {kept} to be resident, the rest is read from flash for each pass"
        )
    if plan.sparsity != "dense":
        return (
            f"room for {share(start, total)} of the neurons at the start, {share(full, total)} at "
            f"{plan.max_context} tokens; of the others, those that are selected are read from flash"
        )
    return (
        f"feed-forward to be resident: {share(start, total)} at the start, {share(full, total)} at "
        f"{plan.max_context} tokens; the rest is read from flash for each pass"
    )


def share(part: int, total: int) -> str:
    """`part` of `total` as a percentage; 100 % if `total` is 0."""
    return f"{100 * part // total if total else 100} %"


def size(nbytes: int) -> str:
    """Bytes in both forms: `4.00 GB (4000000000 bytes)`."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def stats_line(stats: GenerationStats, plan: Plan) -> str:
    """The stats of a generation in one line, and a line for each rank if there are several.

    Flash bytes are per token, or totals if the plan reads flash only once. Those of ranks are totals.
    """

    def read(nbytes: int) -> str:
        if plan.reads_once:
            return format_bytes(nbytes)
        return f"{format_bytes(nbytes // max(1, stats.generated_tokens))}/token"

    filling = " to fill memory" if plan.reads_once else ""
    wasted = stats.prefetch_wasted_bytes
    prefetched = (
        f"; prefetched {100.0 * stats.prefetch_recall:.0f} % of the rest, {read(wasted)} in vain"
        if stats.prefetch_recall or wasted
        else ""
    )
    waits = (
        f"; {stats.synchronisations / max(1, stats.forward_passes):.1f} waits for the device a pass, "
        f"{stats.synchronised_seconds:.2f} s in all"
        if stats.synchronisations
        else ""
    )
    lossy = f"; lossy: --experts {stats.experts}" if stats.experts else ""
    return (
        f"{stats.generated_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s; "
        f"prompt {stats.prompt_tokens} tokens, {stats.prefill_tokens_per_second:.1f} tokens/s; "
        f"first token {stats.time_to_first_token_seconds:.2f} s; "
        f"peak {format_bytes(stats.peak_memory_bytes)}; flash {read(stats.flash_bytes_read)}{filling}, "
        f"read in {stats.flash_read_seconds:.2f} s with {stats.flash_cpu_seconds:.2f} s of CPU; "
        f"cache hits {100.0 * stats.neuron_cache_hit_rate:.0f} %{prefetched}{waits}{lossy}"
        f"{'' if stats.seed is None else f'; seed {stats.seed}'}"
        f"{''.join(map(_rank_line, stats.ranks))}"
    )


def _rank_line(stats: RankStats) -> str:
    layers = layer_words(stats.first_layer, stats.first_layer + stats.layers)
    return (
        f"\nrank {stats.rank}: {layers}; peak {format_bytes(stats.peak_memory_bytes)} of "
        f"{format_bytes(stats.budget_bytes)}; flash {format_bytes(stats.flash_bytes_read)}; "
        f"{stats.hops.messages} messages, {format_bytes(stats.hops.sent_bytes)} sent; "
        f"waited {stats.hops.waited_seconds:.2f} s for others"
    )


def short(number: float) -> str:
    """A number with three significant digits, or with all digits before the point if there are more."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def harmless(text: str) -> str:
    """`text` with control characters, which could steer a terminal, replaced by U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)


def duration(seconds: float | None) -> str:
    """A duration such as `3 min 20 s`; a question mark for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def parts(plan: Plan) -> list[tuple[str, int]]:
    """The names and bytes of the plan's parts, without empty ones."""
    parts = [
        ("weights of every token", plan.resident_weights_bytes),
        ("predictors", plan.predictor_bytes),
        ("KV cache", plan.kv_cache_bytes),
        ("feed-forward, resident", plan.neuron_cache_bytes),
        ("read buffers", plan.staging_bytes),
        ("scratch memory", plan.activation_bytes),
        ("drafts", plan.draft_bytes),
        ("constraints", plan.constraint_bytes),
        ("process", plan.process_bytes),
        ("other models", plan.others_bytes),
    ]
    return [(what, nbytes) for what, nbytes in parts if nbytes]
