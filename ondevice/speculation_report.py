"""The table of `bench --speculation all`, for people. Prints nothing."""

from __future__ import annotations

from statistics import median

from ondevice.speculation_bench import ALL_TASKS, OFF, Comparison, DrafterRow
from ondevice.stats import DraftStats, per_second
from ondevice.units import format_bytes

SHOWN_DEPTHS = 4
"""Of the acceptance by depth; JSON has all."""
_COLUMNS = ("tokens/pass", "guesses", "ms/pass", "drafting", "tokens/s", "flash/token")


def comparison_table(found: Comparison) -> str:
    """Every task's rows, those of all tasks last; then whether texts stayed the same, and notes."""
    greedy = "greedy" if found.sampling.temperature == 0 else f"temperature {found.sampling.temperature:g}"
    prompts = found.row(ALL_TASKS, OFF).prompts
    lines = [
        f"{found.model}: a budget of {format_bytes(found.budget_bytes)}, --sparsity {found.sparsity}, "
        f"{found.io} reads; {prompts} prompts, {found.sampling.max_tokens} tokens at most, {greedy}",
        "",
        _line("", "", _COLUMNS, "over off", "right at depth 1, 2, ..., of so many drafts"),
    ]
    for task in found.tasks:
        lines.append("")
        of_task = [row for row in found.rows if row.task == task]
        lines += [_row_line(task if row is of_task[0] else "", row) for row in of_task]
    if found.changed:
        lines += ["", f"{len(found.changed)} of {found.texts} texts are NOT those of plain decoding"]
    else:
        lines += ["", f"all {found.texts} texts of drafters are those of plain decoding, token for token"]
    lines += _decisions(found)
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _decisions(found: Comparison) -> list[str]:
    """What `auto` last decided on each task."""
    rows = [row for row in found.rows if row.drafter == "auto" and row.task != ALL_TASKS]
    return ["", *(f"auto at the end of {row.task}: {row.drafting.decision}" for row in rows)] if rows else []


def _row_line(task: str, row: DrafterRow) -> str:
    guesses = f"{row.guesses_per_draft:.1f}" if row.drafting.drafts else "-"
    rate = per_second(row.tokens, row.seconds)
    cells = (
        f"{row.tokens_per_pass:.2f}",
        guesses,
        f"{1e3 * row.seconds_per_pass:.2f}",
        f"{1e3 * row.drafting_seconds_per_pass:.2f}",
        f"{rate:.0f}" if rate >= 100 else f"{rate:.2g}",
        format_bytes(round(row.flash_bytes_per_token)),
    )
    if row.drafter == OFF:
        return _line(task, OFF, cells, "", "")
    ratios = row.speed_ups
    over = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
    return _line(task, row.drafter, cells, over, _by_depth(row.drafting))


def _by_depth(drafting: DraftStats) -> str:
    shares = zip(drafting.acceptance_by_depth, drafting.guessed_by_depth, strict=True)
    shown = [f"{100 * share:.0f} % of {count}" for share, count in shares]
    more = ["..."] if len(shown) > SHOWN_DEPTHS else []
    return ", ".join(shown[:SHOWN_DEPTHS] + more) or "-"


def _line(task: str, drafter: str, cells: tuple[str, ...], over: str, depths: str) -> str:
    numbers = "".join(f"{cell:>13}" for cell in cells)
    return f"{task[:12]:<13}{drafter:<10}{numbers}  {over:<21}  {depths}".rstrip()
