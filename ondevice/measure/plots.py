"""Plots of profiles and of drafter comparisons, with their numbers. The only module that needs matplotlib.

It draws without a display and leaves matplotlib's global state unchanged.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import util
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ondevice.api import Name
from ondevice.bundle.files import disk_errors
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.config import PROFILE_TOKENS
from ondevice.errors import BackendUnavailableError, UsageError
from ondevice.measure.drafters import ALL_TASKS, OFF, Comparison
from ondevice.measure.expected_speed import SpeedForecast
from ondevice.measure.profiling import Profile, profile
from ondevice.sparsity.policies import DEFAULT_POLICY
from ondevice.training import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBERS = "profile.json"
SPARSITY, AGGREGATED = "sparsity.svg", "aggregated_neurons.svg"
MISSES, READS = "cache_misses.svg", "read_throughput.svg"
SPECULATION, SPECULATION_NUMBERS = "speculation.png", "speculation.json"
INCHES = (6.4, 4.0)
COMPARISON_INCHES, COMPARISON_DPI = (9.0, 10.0), 120
BARS_WIDTH = 0.8
"""Share of the distance between two tasks that a task's bars take."""
TICKED_LAYERS = 40
"""Most layers for which every bar is labelled."""


def draw_profile(
    output: Path | None,
    model: Name | None = None,
    text: Text | None = None,
    *,
    tokens: int = PROFILE_TOKENS,
    on_progress: OnProgress = ignore_progress,
) -> Profile:
    """Run `profiling.profile`, and draw its result in `output`, a new or empty folder, if given.

    The other arguments are those of `profile`. Before anything is measured, raises BackendUnavailableError if
    matplotlib is missing, UsageError for an output that isn't an empty folder, and OndeviceError for one that
    can't be made. Raises what `profile` and `draw` raise.
    """
    with nullcontext() if output is None else _new_folder(output):
        drawn = profile(model, text, tokens=tokens, on_progress=on_progress)
        if output is not None:
            draw(drawn, output)
    return drawn


def draw_comparison(output: Path | None, compare: Callable[[], Comparison]) -> Comparison:
    """Run `compare()`, and write its result as PNG and JSON to `output`, a new or empty folder, if given.

    Before anything is measured, raises what `draw_profile` raises then. Raises OndeviceError if the disk
    refuses, and what `compare` raises.
    """
    with nullcontext() if output is None else _new_folder(output):
        comparison = compare()
        if output is not None:
            with disk_errors(output, "make room, or choose another --output"):
                _save_comparison(comparison, output / SPECULATION)
                _write_numbers(output / SPECULATION_NUMBERS, comparison.to_dict())
    return comparison


@contextmanager
def _new_folder(output: Path) -> Iterator[None]:
    """Make the folder to draw in. At the end it is removed if it is still empty."""
    _require_matplotlib("--output: the numbers are printed without it")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} exists and isn't an empty folder; choose another --output")
    with disk_errors(output, "choose another --output"):
        output.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            # rmdir fails unless the folder is empty.
            output.rmdir()


def draw_speeds(forecast: SpeedForecast, model: str, path: Path) -> None:
    """Write the speeds to expect by budget as an SVG.

    Raises BackendUnavailableError without matplotlib, OndeviceError if the disk refuses.
    """
    _require_matplotlib("--curve: the table is printed without it")

    def draw_on(axes: Axes) -> None:
        gigabytes = [speed.budget_bytes / 1e9 for speed in forecast.by_budget]
        axes.plot(gigabytes, [speed.tokens_per_second for speed in forecast.by_budget], marker="o")
        axes.set(xlabel="budget, GB", ylabel="tokens per second")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _title(axes, model, "speed to expect by budget, without drafts")

    with disk_errors(path, "make room, or choose another file for --curve"):
        _save(path, draw_on)


def _require_matplotlib(without: str) -> None:
    """Check that matplotlib is installed. Raises BackendUnavailableError if not. without: the option to leave
    out.
    """
    if util.find_spec("matplotlib") is None:
        raise BackendUnavailableError(
            "drawing takes matplotlib, which isn't installed: pip install 'ondevice[plots]'; or leave out "
            f"{without}"
        )


def draw(profile: Profile, folder: Path) -> list[Path]:
    """Write the profile's plots and `profile.json` to a folder, and return the files.

    A model whose gates are hardly ever zero has only the plot of reads. Raises OndeviceError if the disk
    refuses.
    """
    drawn: dict[str, Callable[[Profile, Axes], None]] = {READS: _draw_reads}
    if profile.firing is not None:
        drawn = {SPARSITY: _draw_sparsity, AGGREGATED: _draw_aggregated, MISSES: _draw_misses} | drawn
    with disk_errors(folder, "make room, or choose another --output"):
        for name, draw_on in drawn.items():
            _save(folder / name, partial(draw_on, profile))
        _write_numbers(folder / NUMBERS, profile.to_dict())
    return [*(folder / name for name in drawn), folder / NUMBERS]


def _write_numbers(path: Path, numbers: dict[str, Any]) -> None:
    text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _save(path: Path, draw_on: Callable[[Axes], None]) -> None:
    import matplotlib.style
    from matplotlib.figure import Figure

    # Text stays text in the SVG, and equal numbers give equal bytes.
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": path.name}
    # Use matplotlib's default style, whatever the user's matplotlibrc says.
    with matplotlib.style.context("default"), matplotlib.rc_context(settings):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(True, alpha=0.3)
        axes.set_axisbelow(True)
        draw_on(axes)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_sparsity(profile: Profile, axes: Axes) -> None:
    assert profile.firing is not None
    zeros = [100 * (1 - share) for share in profile.firing.active]
    mean = sum(zeros) / len(zeros)
    axes.bar(range(len(zeros)), zeros)
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.1f} %")
    axes.set(xlabel="layer", ylabel="gates that are zero, %", ylim=(0, 100))
    if len(zeros) <= TICKED_LAYERS:
        axes.set_xticks(range(len(zeros)))
    axes.legend(loc="lower right")
    _title(axes, profile.model, "activation sparsity by layer")


def _draw_aggregated(profile: Profile, axes: Axes) -> None:
    import matplotlib

    assert profile.firing is not None
    curves = [[100 * share for share in layer] for layer in profile.firing.distinct]
    spans = range(1, len(curves[0]) + 1)
    colours = matplotlib.colormaps["viridis"]
    for layer, curve in enumerate(curves):
        # The legend names the first and the last layer only; colours between them follow the scale.
        named = layer in (0, len(curves) - 1)
        colour = colours(layer / max(1, len(curves) - 1))
        axes.plot(spans, curve, color=colour, linewidth=1, label=f"layer {layer}" if named else None)
    mean = [sum(column) / len(curves) for column in zip(*curves, strict=True)]
    axes.plot(spans, mean, color="black", linewidth=2.5, label="mean")
    axes.set(xlabel="neighbouring tokens", ylabel="distinct neurons that fire, %", ylim=(0, 100))
    axes.legend(loc="lower right")
    _title(axes, profile.model, "aggregated neurons")


def _draw_misses(profile: Profile, axes: Axes) -> None:
    assert profile.misses is not None
    sizes = [100 * share for share in profile.misses.shares]
    # Some policies hardly differ. Alternating line styles keep lines visible that lie on each other.
    for (policy, rates), style in zip(
        profile.misses.policies.items(), itertools.cycle(("-", "-.")), strict=False
    ):
        name = f"{policy} (default)" if policy == DEFAULT_POLICY else policy
        axes.plot(sizes, [100 * rate for rate in rates], style, marker="o", markersize=3, label=name)
    optimum = [100 * rate for rate in profile.misses.optimum]
    axes.plot(sizes, optimum, color="black", linestyle="--", label="offline optimum (Belady)")
    axes.set(xlabel="neurons in the cache, %", ylabel="firing neurons that miss it, %", ylim=(0, 100))
    axes.set_xlim(0, 100)
    axes.legend(loc="upper right")
    _title(axes, profile.model, "cache misses by policy")


def _draw_reads(profile: Profile, axes: Axes) -> None:
    rates = [rate for rate in profile.reads.rates if rate.bytes_per_second is not None]
    for threads in sorted({rate.threads for rate in rates}):
        points = [
            (rate.read_bytes / 1024, rate.bytes_per_second / 1e9)
            for rate in rates
            if rate.threads == threads and rate.bytes_per_second is not None
        ]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"{threads} reader threads")
    axes.set_xscale("log", base=2)
    sizes = sorted({rate.read_bytes // 1024 for rate in profile.reads.rates})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="size of a read, KiB", ylabel="GB/s")
    axes.set_ylim(bottom=0)
    if rates:
        axes.legend()
    _title(axes, profile.model, f"random {profile.reads.io} reads of the feed-forward")


def _save_comparison(comparison: Comparison, path: Path) -> None:
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        figure = Figure(figsize=COMPARISON_INCHES, dpi=COMPARISON_DPI, layout="constrained")
        speeds, tokens, depths = figure.subplots(3)
        for axes in (speeds, tokens, depths):
            axes.grid(True, alpha=0.3)
            axes.set_axisbelow(True)
        _draw_speed_ups(comparison, speeds)
        _draw_tokens(comparison, tokens)
        _draw_depths(comparison, depths)
        figure.legend(*speeds.get_legend_handles_labels(), loc="outside upper center", ncols=8)
        figure.savefig(path, format="png", metadata={"Software": None})


def _drafters(comparison: Comparison) -> list[str]:
    return [row.drafter for row in comparison.rows if row.task == ALL_TASKS and row.drafter != OFF]


def _bars(comparison: Comparison) -> Iterator[tuple[str, list[float], float]]:
    """Yields each drafter, the x positions of the middles of its bars (one per task), and the
    width of a bar.
    """
    drafters = _drafters(comparison)
    width = BARS_WIDTH / max(1, len(drafters))
    for place, drafter in enumerate(drafters):
        shift = (place - (len(drafters) - 1) / 2) * width
        yield drafter, [task + shift for task in range(len(comparison.tasks))], width


def _draw_speed_ups(comparison: Comparison, axes: Axes) -> None:
    for drafter, middles, width in _bars(comparison):
        # A task may have no text with a decode pass to compare.
        ratios = [comparison.row(task, drafter).speed_ups or (1.0,) for task in comparison.tasks]
        heights = [median(of_task) for of_task in ratios]
        below = [height - min(of_task) for height, of_task in zip(heights, ratios, strict=True)]
        above = [max(of_task) - height for height, of_task in zip(heights, ratios, strict=True)]
        axes.bar(middles, heights, width, yerr=(below, above), label=drafter, error_kw={"linewidth": 1})
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(comparison.tasks)), [_plain(task) for task in comparison.tasks])
    axes.set(ylabel="speed over plain decoding")
    _title(axes, comparison.model, "median of pairs, with least and most")


def _draw_tokens(comparison: Comparison, axes: Axes) -> None:
    for drafter, middles, width in _bars(comparison):
        axes.bar(middles, [comparison.row(task, drafter).tokens_per_pass for task in comparison.tasks], width)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(comparison.tasks)), [_plain(task) for task in comparison.tasks])
    axes.set(ylabel="tokens per pass")


def _draw_depths(comparison: Comparison, axes: Axes) -> None:
    for drafter in _drafters(comparison):
        shares = [100 * share for share in comparison.row(ALL_TASKS, drafter).drafting.acceptance_by_depth]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=drafter)
    axes.set(xlabel="depth in the draft", ylabel="right, all before being right, %", ylim=(0, 105))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _title(axes: Axes, model: str, what: str) -> None:
    axes.set_title(_plain(f"{model}: {what}"), fontsize="medium")


def _plain(text: str) -> str:
    """`text` with dollar signs escaped, because matplotlib would take them for the start of a formula."""
    return text.replace("$", r"\$")
