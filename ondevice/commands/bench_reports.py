"""Tables of `bench` and `profile` for people: ablations, parts of passes, drafter comparisons, profiles.

Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, median

from ondevice.commands.reports import percent, short
from ondevice.measure.ablation import BEFORE, Ablation
from ondevice.measure.drafters import ALL_TASKS, OFF, Comparison, DrafterRow
from ondevice.measure.passes import SplitPass, SplitPasses
from ondevice.measure.profiling import Profile
from ondevice.stats import DraftStats, per_second
from ondevice.units import format_bytes

PROFILE_SPANS = (8, 32)
"""Numbers of neighbouring tokens for which the table shows the distinct neurons; the plot shows all."""


def profile_table(profile: Profile) -> str:
    """`profile` for people: neurons by layer, misses by cache size, read rates by read size, and notes."""
    lines = [f"{profile.model}: {profile.num_layers} layers of {profile.num_neurons} neurons"]
    if profile.firing is not None and profile.misses is not None:
        firing, misses = profile.firing, profile.misses
        spans = [span for span in PROFILE_SPANS if span <= len(firing.distinct[0])]
        rows = [
            (f"layer {layer}", [active, also, *(distinct[span - 1] for span in spans)])
            for layer, (active, also, distinct) in enumerate(
                zip(firing.active, firing.also_before, firing.distinct, strict=True)
            )
        ]
        means = [mean(column) for column in zip(*(shares for _, shares in rows), strict=True)]
        lines += [
            f"{profile.tokens} tokens: {profile.text}",
            "",
            _columns("neurons", ["fire", "before too", *(f"in {span} tokens" for span in spans)]),
            *(_columns(name, map(percent, shares)) for name, shares in [*rows, ("mean", means)]),
            "",
            _columns("misses of a cache of", map(percent, misses.shares)),
            *(_columns(name, map(percent, rates)) for name, rates in misses.policies.items()),
            _columns("at best (Belady)", map(percent, misses.optimum)),
        ]
    threads = sorted({rate.threads for rate in profile.reads.rates})
    sizes = sorted({rate.read_bytes for rate in profile.reads.rates})
    rates = {(rate.read_bytes, rate.threads): rate.bytes_per_second for rate in profile.reads.rates}
    lines += ["", _columns(f"{profile.reads.io} reads, GB/s", [f"{count} threads" for count in threads])]
    for nbytes in sizes:
        lines.append(_columns(f"{nbytes >> 10} KiB", [_gigabytes(rates[nbytes, count]) for count in threads]))
    return "\n".join([*lines, *(f"note: {note}" for note in profile.notes)])


def _columns(name: str, cells: Iterable[str]) -> str:
    return f"{name:<22}" + "".join(f"  {cell:>12}" for cell in cells)


def _gigabytes(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.2f}"


PARTS = {
    "qkv": "q, k, v",
    "output": "attention's output",
    "gate_up": "gate, up",
    "down": "down",
    "head": "head",
    "other_products": "other products",
    "attention": "attention",
    "recurrence": "recurrence",
    "packing": "packing, input norms",
    "rest": "other norms and rest",
    "python": "Python",
    "flash": "waiting for flash",
}
"""Parts of a pass in the order of the table, as they are called there."""


def parts_table(result: SplitPasses) -> str:
    """`bench --parts` for people: each pass's parts, and the machine's peaks."""
    lines = [f"{result.model}: a budget of {format_bytes(result.budget_bytes)}, {result.threads} threads"]
    for split in result.passes:
        lines += ["", *_parts(split)]
    thread, threads, memory = map(_giga, result.peaks.values())
    most = f"{thread} GMAC/s on one thread and {threads} on {result.threads}, from caches"
    return "\n".join([*lines, "", f"at most: {most}; {memory} GB/s of weights from memory"])


def _parts(split: SplitPass) -> list[str]:
    """The lines for a pass: one for all of it, and one for each part that takes time."""
    where = f", {split.tokens} tokens" if split.name == "prompt" else f" behind {split.position}"
    lines = [_columns(split.name + where, ["ms", "", "GMAC/s", "GB/s"])]
    for key, title in PARTS.items():
        part = split.parts[key]
        if part.seconds > 0.0:
            rates = (per_second(count, part.seconds) for count in (part.macs, part.nbytes))
            cells = [f"{part.seconds * 1e3:.3f}", percent(part.seconds / split.seconds)]
            lines.append(_columns(title, [*cells, *(_giga(rate) if rate else "" for rate in rates)]))
    return [*lines, _columns("all", [f"{split.seconds * 1e3:.3f}"])]


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.1f}"


ABLATION_COLUMNS = (
    *("neurons", "rest", "MB", "reads", "GB/s"),
    *("I/O", "waited", "managed", "compute", "total", "tokens/s"),
)


def ablation_table(ablation: Ablation) -> str:
    """The ablation for people: each row's memory, its reads and time per token, and the effect of
    each step.
    """
    lines = [
        f"{ablation.model}: a budget of {format_bytes(ablation.budget_bytes)}, {ablation.rows[0].io} reads; "
        f"means of {ablation.max_tokens} tokens, behind {ablation.prompt_tokens} of prompt and "
        f"{ablation.warm_up_tokens} that warm up",
        "",
        f"{'':<10}{'in memory, MB':>18}{'read per token':>18}{'reading':>9}{'ms per token':>45}{'':>9}",
        _cells("", ABLATION_COLUMNS),
    ]
    for row in ablation.rows:
        held = (row.feed_forward_bytes / 1e6, row.resident_bytes / 1e6)
        read = (row.flash_bytes / 1e6, row.flash_reads, row.bytes_per_second / 1e9)
        reading = (row.io_seconds, row.waited_seconds)
        seconds = (*reading, row.managed_seconds, row.compute_seconds, row.total_seconds)
        times = (1e3 * value for value in seconds)
        lines.append(_cells(row.name, map(short, (*held, *read, *times, 1 / row.total_seconds))))
    lines += ["", "what changes: bytes / rate = I/O, and the total"]
    for row in ablation.rows[1:]:
        before = ablation.row(BEFORE[row.name])
        change = (
            _factor(row.flash_bytes, before.flash_bytes),
            _factor(row.bytes_per_second, before.bytes_per_second),
            _factor(row.io_seconds, before.io_seconds),
        )
        lines.append(
            f"{row.name:<10} after {before.name:<10}{' / '.join(change[:2])} = {change[2]}; total "
            f"{_factor(row.total_seconds, before.total_seconds)}"
        )
    return "\n".join([*lines, *_overlap_lines(ablation), *(f"note: {note}" for note in ablation.notes)])


def _overlap_lines(ablation: Ablation) -> list[str]:
    if ablation.overlap_ratio is None:
        return []
    apart, row = ablation.row("all"), ablation.row("overlap")
    longer, overlapped = (max(it.io_seconds, it.compute_seconds) for it in (apart, row))
    return [
        "",
        f"overlap takes {1e3 * row.total_seconds:.1f} ms, {ablation.overlap_ratio:.2f} x the longer of I/O "
        f"and compute in `all` ({1e3 * longer:.1f} ms), {ablation.own_overlap_ratio:.2f} x that of its own "
        f"({1e3 * overlapped:.1f} ms)",
        f"prefetching found {percent(row.prefetch_recall)} of the missing neurons and read "
        f"{row.prefetch_wasted_bytes / 1e6:.2f} MB per token in vain",
    ]


def _cells(name: str, cells: Iterable[str]) -> str:
    return f"{name:<10}" + "".join(f"{cell:>9}" for cell in cells)


def _factor(after: float, before: float) -> str:
    """The ratio of two values, as `x 0.12`; a dash if `before` is 0."""
    return f"x {short(after / before)}" if before > 0 else "-"


SHOWN_DEPTHS = 4
"""Number of depths whose acceptance rates the table shows; JSON has all."""
_DRAFTER_COLUMNS = ("tokens/pass", "draft tokens", "ms/pass", "drafting", "tokens/s", "flash/token")


def comparison_table(comparison: Comparison) -> str:
    """The comparison for people: rows by task, then of all tasks, changed texts, and notes."""
    greedy = (
        "greedy"
        if comparison.sampling.temperature == 0
        else f"temperature {comparison.sampling.temperature:g}"
    )
    prompts = comparison.row(ALL_TASKS, OFF).prompts
    lines = [
        f"{comparison.model}: a budget of {format_bytes(comparison.budget_bytes)}, "
        f"--sparsity {comparison.sparsity}, {comparison.io} reads; {prompts} prompts, "
        f"{comparison.sampling.max_tokens} tokens at most, {greedy}",
        "",
        _drafter_line("", "", _DRAFTER_COLUMNS, "over off", "accepted at depth 1, 2, ..., of drafts"),
    ]
    for task in comparison.tasks:
        lines.append("")
        of_task = [row for row in comparison.rows if row.task == task]
        lines += [_row_line(task if row is of_task[0] else "", row) for row in of_task]
    if comparison.changed:
        lines += [
            "",
            f"{len(comparison.changed)} of {comparison.texts} texts are NOT those of plain decoding",
        ]
    else:
        lines += [
            "",
            f"all {comparison.texts} texts of drafters are those of plain decoding, token for token",
        ]
    lines += _decisions(comparison)
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes)])


def _decisions(comparison: Comparison) -> list[str]:
    """For each task, the last choice that `auto` made."""
    rows = [row for row in comparison.rows if row.drafter == "auto" and row.task != ALL_TASKS]
    return ["", *(f"auto at the end of {row.task}: {row.drafting.decision}" for row in rows)] if rows else []


def _row_line(task: str, row: DrafterRow) -> str:
    drafted = f"{row.tokens_per_draft:.1f}" if row.drafting.drafts else "-"
    rate = per_second(row.tokens, row.seconds)
    cells = (
        f"{row.tokens_per_pass:.2f}",
        drafted,
        f"{1e3 * row.seconds_per_pass:.2f}",
        f"{1e3 * row.drafting_seconds_per_pass:.2f}",
        f"{rate:.0f}" if rate >= 100 else f"{rate:.2g}",
        format_bytes(round(row.flash_bytes_per_token)),
    )
    if row.drafter == OFF:
        return _drafter_line(task, OFF, cells, "", "")
    ratios = row.speed_ups
    over = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
    return _drafter_line(task, row.drafter, cells, over, _by_depth(row.drafting))


def _by_depth(drafting: DraftStats) -> str:
    shares = zip(drafting.acceptance_by_depth, drafting.drafted_by_depth, strict=True)
    shown = [f"{100 * share:.0f} % of {count}" for share, count in shares]
    more = ["..."] if len(shown) > SHOWN_DEPTHS else []
    return ", ".join(shown[:SHOWN_DEPTHS] + more) or "-"


def _drafter_line(task: str, drafter: str, cells: tuple[str, ...], over: str, depths: str) -> str:
    numbers = "".join(f"{cell:>13}" for cell in cells)
    return f"{task[:12]:<13}{drafter:<10}{numbers}  {over:<21}  {depths}".rstrip()
