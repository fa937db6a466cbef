"""`ondevice bench` and `ondevice profile`: how fast a model runs here, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ondevice.command_model import loaded_model, prepared_model
from ondevice.config import PROFILE_LEAST, PROFILE_TOKENS
from ondevice.errors import UsageError
from ondevice.options import Command, add_options, complete_path, json_option, model_option, option, read_text
from ondevice.settings import MAX_CONTEXT, RUNTIME_OPTIONS, runtime_config
from ondevice.terminal import print_result, progress, say, take_interrupts

BENCH_PROMPT_TOKENS, BENCH_MAX_TOKENS, BENCH_RUNS, BENCH_WARM_UP_TOKENS = 128, 64, 3, 8
ABLATION_MAX_TOKENS = 16


@click.command(cls=Command)
@model_option
@option(
    "--prompt-tokens",
    type=click.IntRange(1, MAX_CONTEXT),
    default=BENCH_PROMPT_TOKENS,
    help="Length of the prompt.",
)
@option(
    "--max-tokens",
    type=click.IntRange(0),
    default=BENCH_MAX_TOKENS,
    help=f"Tokens to generate; with --ablation, {ABLATION_MAX_TOKENS} if not given.",
)
@option("--runs", type=click.IntRange(1), default=BENCH_RUNS, help="Repetitions; medians are shown.")
@option(
    "--ablation",
    is_flag=True,
    help='Take the ideas of "LLM in a flash" one by one: a row each of where time and bytes go, run once.',
)
@add_options(RUNTIME_OPTIONS)
@json_option
@click.pass_context
def bench(
    context: click.Context,
    /,
    model: str | None,
    prompt_tokens: int,
    max_tokens: int,
    runs: int,
    ablation: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure how fast a model runs, once it is warm: medians of a few runs over a made-up prompt.

    With --ablation, one configuration after the other: everything read from flash for every token, only the
    neurons, only those that are selected, with a cache, in one read each, and overlapped with computing. The
    first tokens behind the prompt warm up and aren't counted. Give a --dram-budget smaller than the model.
    """
    if ablation:
        if context.get_parameter_source("runs") is ParameterSource.COMMANDLINE:
            raise UsageError(
                f"--runs {runs}: --ablation runs every row once; ask for more --max-tokens instead"
            )
        given = context.get_parameter_source("max_tokens") is not ParameterSource.DEFAULT
        run_ablation(model, prompt_tokens, max_tokens if given else ABLATION_MAX_TOKENS, as_json, values)
        return
    from ondevice import api, report
    from ondevice.scoring import benchmark_report
    from ondevice.stats import median_stats

    prepared = prepared_model(model, values)
    api.check_tokens(prepared, range(prompt_tokens), max_tokens)
    with loaded_model(prepared) as loaded:
        # Memory fills in the first passes: they aren't what a run of any length is like.
        loaded.measure(1, min(max_tokens, BENCH_WARM_UP_TOKENS))
        measured = []
        for index in range(runs):
            measured.append(loaded.measure(prompt_tokens, max_tokens))
            say(f"run {index + 1} of {runs}: {report.figures(measured[-1])}")
        print_result(
            as_json, benchmark_report(measured, loaded.kernel_target), report.figures(median_stats(measured))
        )


def run_ablation(
    model: str | None, prompt_tokens: int, max_tokens: int, as_json: bool, values: dict[str, Any]
) -> None:
    """Measure and print the table of `bench --ablation`."""
    from ondevice import report
    from ondevice.ablation import ablation

    runtime = runtime_config(values)
    take_interrupts()
    with progress() as show:
        found = ablation(
            model,
            runtime,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            warm_up_tokens=BENCH_WARM_UP_TOKENS,
            on_progress=show,
        )
    print_result(as_json, found.to_dict(), report.ablation_table(found))


@click.command(cls=Command)
@model_option
@option("--output", "-o", type=click.Path(path_type=Path), help="A new folder: four SVGs and profile.json.")
@option(
    "--text",
    metavar="FILE|-",
    shell_complete=complete_path,
    help="The text to run; if not given, the model writes one.",
)
@option("--tokens", type=click.IntRange(PROFILE_LEAST), default=PROFILE_TOKENS, help="Tokens run at most.")
@json_option
def profile(model: str | None, output: Path | None, text: str | None, tokens: int, as_json: bool) -> None:
    """Measure which neurons fire, what caches of any size would miss, and how fast flash is read.

    With --output it is drawn, too, which takes matplotlib: pip install 'ondevice[plots]'.
    """
    from ondevice import plots, report

    content = None if text is None else read_text(text)
    take_interrupts()
    with progress() as show:
        found = plots.draw_profile(output, model, content, tokens=tokens, on_progress=show)
    print_result(as_json, found.to_dict(), report.profile_table(found))
