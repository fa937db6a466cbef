"""`bench --ablation` as a table, for people. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterable

from ondevice.ablation import BEFORE, Ablation
from ondevice.report import percent, short
from ondevice.units import format_bytes

ABLATION_COLUMNS = (
    *("neurons", "rest", "MB", "reads", "GB/s"),
    *("I/O", "waited", "managed", "compute", "total", "tokens/s"),
)


def ablation_table(found: Ablation) -> str:
    """What every row holds, reads and takes per token, and what each step changes."""
    lines = [
        f"{found.model}: a budget of {format_bytes(found.budget_bytes)}, {found.rows[0].io} reads; means of "
        f"{found.max_tokens} tokens, behind {found.prompt_tokens} of prompt and {found.warm_up_tokens} that "
        "warm up",
        "",
        f"{'':<10}{'in memory, MB':>18}{'read per token':>18}{'reading':>9}{'ms per token':>45}{'':>9}",
        _cells("", ABLATION_COLUMNS),
    ]
    for row in found.rows:
        held = (row.feed_forward_bytes / 1e6, row.resident_bytes / 1e6)
        read = (row.flash_bytes / 1e6, row.flash_reads, row.bytes_per_second / 1e9)
        reading = (row.io_seconds, row.waited_seconds)
        seconds = (*reading, row.managed_seconds, row.compute_seconds, row.total_seconds)
        times = (1e3 * value for value in seconds)
        lines.append(_cells(row.name, map(short, (*held, *read, *times, 1 / row.total_seconds))))
    lines += ["", "what changes: bytes / rate = I/O, and the total"]
    for row in found.rows[1:]:
        before = found.row(BEFORE[row.name])
        change = (
            _factor(row.flash_bytes, before.flash_bytes),
            _factor(row.bytes_per_second, before.bytes_per_second),
            _factor(row.io_seconds, before.io_seconds),
        )
        lines.append(
            f"{row.name:<10} after {before.name:<10}{' / '.join(change[:2])} = {change[2]}; total "
            f"{_factor(row.total_seconds, before.total_seconds)}"
        )
    return "\n".join([*lines, *_overlap_lines(found), *(f"note: {note}" for note in found.notes)])


def _overlap_lines(found: Ablation) -> list[str]:
    if found.overlap_ratio is None:
        return []
    apart, row = found.row("all"), found.row("overlap")
    longer, own = (max(it.io_seconds, it.compute_seconds) for it in (apart, row))
    return [
        "",
        f"overlap takes {1e3 * row.total_seconds:.1f} ms, {found.overlap_ratio:.2f} x the longer of I/O and "
        f"compute in `all` ({1e3 * longer:.1f} ms), {found.own_overlap_ratio:.2f} x that of its own "
        f"({1e3 * own:.1f} ms)",
        f"guesses found {percent(row.guess_recall)} of what was missing and read "
        f"{row.guess_wasted_bytes / 1e6:.2f} MB per token in vain",
    ]


def _cells(name: str, cells: Iterable[str]) -> str:
    return f"{name:<10}" + "".join(f"{cell:>9}" for cell in cells)


def _factor(after: float, before: float) -> str:
    """`x 0.12`; a dash where there is nothing to compare."""
    return f"x {short(after / before)}" if before > 0 else "-"
