"""`ondevice bench`: measures how fast a model runs on this machine, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ondevice.commands.opening import loaded_model, resolved_model
from ondevice.commands.options import (
    Command,
    Text,
    add_options,
    complete_path,
    hosts_option,
    json_option,
    model_option,
    option,
    read_text,
)
from ondevice.commands.sharing import require_alone
from ondevice.commands.terminal import print_result, progress, say, take_interrupts
from ondevice.config import MAX_CONTEXT, SamplingConfig
from ondevice.errors import UsageError
from ondevice.measure.prompts import BUILT_IN, MAX_PROMPTS, Task, paragraphs
from ondevice.settings import (
    RUNTIME_OPTIONS,
    SAMPLING_OPTIONS,
    runtime_config,
    sampling_config,
)

BENCH_PROMPT_TOKENS, BENCH_MAX_TOKENS, BENCH_RUNS, BENCH_WARM_UP_TOKENS = 128, 64, 3, 8
ABLATION_MAX_TOKENS = 16
PARTS_PROMPT_TOKENS = 256
EVERY_DRAFTER = "all"
_RUNTIME = {name: entry for name, entry in RUNTIME_OPTIONS.items() if name != "speculation"}
_SAMPLING = {name: entry for name, entry in SAMPLING_OPTIONS.items() if name != "max_tokens"}
_ONLY_COMPARED = ("text", "chat", "prompts", "output", *_SAMPLING)
_NEVER_COMPARED = ("ablation", "parts", "runs", "prompt_tokens")
"""Parameters of `bench` that `--speculation all` doesn't take; those above, only it takes."""


@click.command(cls=Command)
@model_option
@option(
    "--prompt-tokens",
    type=click.IntRange(1, MAX_CONTEXT),
    default=BENCH_PROMPT_TOKENS,
    help=f"Length of the prompt; with --parts, {PARTS_PROMPT_TOKENS} if not given.",
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
@option(
    "--parts",
    is_flag=True,
    help="Split a prompt's, a token's and a draft's pass: what takes how long, beside this machine's peaks.",
)
@option(
    "--speculation",
    type=click.Choice([*RUNTIME_OPTIONS["speculation"].choices, EVERY_DRAFTER]),
    default=str(RUNTIME_OPTIONS["speculation"].default),
    help=f"How tokens are drafted; {EVERY_DRAFTER}: compare every way that the model can have with none.",
)
@option(
    "--text",
    metavar="FILE|-",
    type=Text(),
    multiple=True,
    shell_complete=complete_path,
    help=f"With --speculation {EVERY_DRAFTER}: prompts in place of those that ship, separated by empty "
    "lines; may be given several times, a task each.",
)
@option(
    "--chat",
    is_flag=True,
    help="The prompts of --text are a user's messages, for the chat template.",
    rare=True,
)
@option(
    "--prompts",
    type=click.IntRange(1),
    default=MAX_PROMPTS,
    help=f"With --speculation {EVERY_DRAFTER}: prompts of a task at most, spread over its text.",
    rare=True,
)
@option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help=f"With --speculation {EVERY_DRAFTER}: a new folder for speculation.png and speculation.json.",
    rare=True,
)
@add_options(_RUNTIME, _SAMPLING)
@hosts_option()
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
    parts: bool,
    speculation: str,
    text: tuple[str, ...],
    chat: bool,
    prompts: int,
    output: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure how fast a model runs, once it is warm: medians of a few runs over a made-up prompt.

    With --ablation, one configuration after the other: everything read from flash for every token, only the
    neurons, only those that are selected, with a cache, in one read each, and overlapped with computing. The
    first tokens after the prompt are for warming up and aren't counted. Give a --dram-budget smaller than the
    model.

    With --parts, products by matrix, attention, packing of activations, norms, Python and waits for flash:
    milliseconds, multiplications and bytes per second of each. Passes have no drafts. The pass that drafts
    with the weights in memory is split too, where the budget has one.

    With --speculation all, every drafter that the model can have on every kind of text, and plain decoding in
    the same run: tokens per pass, draft tokens and their acceptance by depth, time per pass, reads, and the
    speed over plain decoding, greedily if no sampling is asked for. That texts stay the same is checked: if
    one doesn't, the exit code is 1.
    """
    compared = speculation == EVERY_DRAFTER
    _refuse(context, _NEVER_COMPARED if compared else _ONLY_COMPARED, compared)
    if compared:
        require_alone(values, f"--speculation {EVERY_DRAFTER}")
        tasks = [task.at_most(prompts) for task in _tasks(context, text, chat)]
        sampling = replace(sampling_config(values), max_tokens=max_tokens)
        compare(model, tasks, sampling, output, as_json, values)
        return
    values["speculation"] = speculation
    if parts:
        run_parts(context, model, as_json, values)
        return
    if ablation:
        require_alone(values, "--ablation")
        if context.get_parameter_source("runs") is ParameterSource.COMMANDLINE:
            raise UsageError(
                f"--runs {runs}: --ablation runs every row once; ask for more --max-tokens instead"
            )
        given = context.get_parameter_source("max_tokens") is not ParameterSource.DEFAULT
        run_ablation(model, prompt_tokens, max_tokens if given else ABLATION_MAX_TOKENS, as_json, values)
        return
    from ondevice.commands import reports
    from ondevice.runtime.resolving import check_tokens
    from ondevice.scoring import benchmark_report
    from ondevice.stats import median_stats

    resolved = resolved_model(model, values)
    check_tokens(resolved, range(prompt_tokens), max_tokens)
    with loaded_model(resolved) as loaded:
        # Caches fill in the first passes, so these aren't typical.
        loaded.measure(1, min(max_tokens, BENCH_WARM_UP_TOKENS))
        measured = []
        for index in range(runs):
            measured.append(loaded.measure(prompt_tokens, max_tokens))
            say(f"run {index + 1} of {runs}: {reports.stats_line(measured[-1], loaded.plan)}")
        shown = reports.stats_line(median_stats(measured), loaded.plan)
        print_result(as_json, benchmark_report(measured, loaded.kernel_target), shown)


def run_ablation(
    model: str | None, prompt_tokens: int, max_tokens: int, as_json: bool, values: dict[str, Any]
) -> None:
    """Measure and print the table of `bench --ablation`."""
    from ondevice.commands.bench_reports import ablation_table
    from ondevice.measure.ablation import ablation

    measure = partial(
        ablation,
        model,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        warm_up_tokens=BENCH_WARM_UP_TOKENS,
    )
    _print_measured(measure, ablation_table, as_json, values)


def run_parts(context: click.Context, model: str | None, as_json: bool, values: dict[str, Any]) -> None:
    """Measure and print the table of `bench --parts`."""
    from ondevice.commands.bench_reports import parts_table
    from ondevice.measure.passes import split_passes

    require_alone(values, "--parts")
    given = context.params
    if given["ablation"]:
        raise UsageError("--parts and --ablation are two benchmarks; give one of them")
    is_default = context.get_parameter_source("prompt_tokens") is ParameterSource.DEFAULT
    sizes = {name: given[name] for name in ("prompt_tokens", "max_tokens", "runs")}
    if is_default:
        sizes["prompt_tokens"] = PARTS_PROMPT_TOKENS
    _print_measured(partial(split_passes, model, **sizes), parts_table, as_json, values)


def _print_measured(
    measure: Callable[..., Any], table: Callable[[Any], str], as_json: bool, values: dict[str, Any]
) -> None:
    """Print what `measure` returns for the options: the text that `table` makes of it, or its `to_dict()` as
    JSON.
    """
    runtime = runtime_config(values)
    take_interrupts()
    with progress() as show:
        result = measure(runtime=runtime, on_progress=show)
    print_result(as_json, result.to_dict(), table(result))


def compare(
    model: str | None,
    tasks: list[Task],
    sampling: SamplingConfig,
    output: Path | None,
    as_json: bool,
    values: dict[str, Any],
) -> None:
    """Measure and print the table of `bench --speculation all`.

    Raises TextChangedError, after printing, if a drafter changed a text.
    """
    from ondevice.commands.bench_reports import comparison_table
    from ondevice.measure import plots
    from ondevice.measure.drafters import compare_drafters

    runtime = runtime_config(values)
    take_interrupts()
    with progress() as show:
        comparison = plots.draw_comparison(
            output, lambda: compare_drafters(model, runtime, tasks, sampling, on_progress=show)
        )
    print_result(as_json, comparison.to_dict(), comparison_table(comparison))
    comparison.require_same_texts()


def _refuse(context: click.Context, names: Iterable[str], compared: bool) -> None:
    """Check the command line. Raises UsageError for an option that this kind of benchmark doesn't take."""
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            kind = "with" if compared else "without"
            raise UsageError(f"{flags[name]} has no meaning {kind} --speculation {EVERY_DRAFTER}")


def _tasks(context: click.Context, texts: tuple[str, ...], chat: bool) -> list[Task]:
    """One task per text, or the built-in tasks if there is none. Raises UsageError for a missing text."""
    # A text from the environment or the settings file is meant for `eval`.
    if context.get_parameter_source("text") is not ParameterSource.COMMANDLINE:
        if chat:
            raise UsageError("--chat says what the prompts of --text are; give both")
        return list(BUILT_IN)
    return [Task(Path(text).stem, paragraphs(read_text(text)), chat) for text in texts]
