"""The `ondevice` command: text to stdout, everything about it to stderr, errors as exit codes.

Commands import what they need when they run, so that help is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ondevice.bench_commands import bench, profile
from ondevice.chat import chat
from ondevice.command_model import loaded_model, prepared_model, say_figures
from ondevice.config import QuantConfig
from ondevice.doctor_commands import doctor
from ondevice.errors import INTERRUPTED, OndeviceError
from ondevice.options import (
    CommandGroup,
    Text,
    TextParts,
    add_options,
    broken_pipe,
    complete_path,
    json_option,
    model_option,
    option,
)
from ondevice.settings import (
    RUNTIME_OPTIONS,
    SAMPLING_OPTIONS,
    runtime_config,
    sampling_config,
)
from ondevice.terminal import print_json, print_result, progress, say, take_interrupts, write_events
from ondevice.train_commands import train

if TYPE_CHECKING:
    from ondevice.models import ConversionProgress

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A file's name needn't be UTF-8, and is written as it is.
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        code = cli.main(list(arguments), prog_name="ondevice", standalone_mode=False)
        sys.stdout.flush()
    except OndeviceError as error:
        notes = getattr(error, "__notes__", [])
        return _fail("\n".join([error.for_command_line, *notes]), error.exit_code)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return broken_pipe()
    except MemoryError:
        return _fail("out of memory: lower --dram-budget", OndeviceError.exit_code)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        return _fail(f"{named}{error.strerror or error}", OndeviceError.exit_code)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    say(f"error: {message}")
    return code


@click.group(cls=CommandGroup, context_settings=HELP)
@click.version_option(package_name="ondevice")
@option("--verbose", "-v", is_flag=True, help="Log to stderr what the engine does.")
def cli(verbose: bool) -> None:
    """Run a language model that is larger than the memory you give it.

    Every option may also be set as ONDEVICE_<OPTION> in the environment (--max-tokens as
    ONDEVICE_MAX_TOKENS), or as max_tokens in a TOML file: config.toml in the platform's configuration
    folder, or the file that ONDEVICE_CONFIG names. A flag beats the environment, the environment beats
    the file. ONDEVICE_HOME is the folder of converted models, by name.

    Completion: eval "$(_ONDEVICE_COMPLETE=bash_source ondevice)", or zsh_source, or fish_source.
    """


@cli.command()
@click.argument("source", shell_complete=complete_path)
@option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="The bundle's folder; if not given, one of the source's name among the models.",
)
@option(
    "--quant",
    type=click.Choice(["q4", "q8", "f16"]),
    default=QuantConfig().name,
    help="Bits per weight.",
)
@option(
    "--text",
    metavar="FILE",
    shell_complete=complete_path,
    help="Text to order neurons by and train predictors on (ReLU).",
)
@option("--no-calibrate", is_flag=True, help="Order and train nothing, whatever --text says.")
@option("--resume", is_flag=True, help="Continue an interrupted conversion.")
@option("--force", is_flag=True, help="Replace an existing output.")
@option("--offline", is_flag=True, help="Download nothing.")
@click.pass_context
def convert(
    context: click.Context,
    /,
    source: str,
    output: Path | None,
    quant: str,
    text: str | None,
    no_calibrate: bool,
    resume: bool,
    force: bool,
    offline: bool,
) -> None:
    """Turn a checkpoint into a bundle.

    SOURCE is a Hugging Face folder, a llama2.c .bin file, a repository id or an alias.
    """
    from ondevice import api, report, training
    from ondevice.bundle.reader import Bundle

    # Set elsewhere than in the command line, it is meant for `eval`.
    given = context.get_parameter_source("text") is click.core.ParameterSource.COMMANDLINE
    content = None if text is None or no_calibrate or not given else TextParts(text)
    take_interrupts()
    options: dict[str, Any] = {"resume": resume, "force": force, "offline": offline}
    with progress() as show, progress() as show_training:

        def on_progress(done: ConversionProgress) -> None:
            show(done.fraction, f"{done.step}, {report.duration(done.remaining_seconds)} left")

        if content is None:
            path = api.convert(source, output, quant, on_progress=on_progress, **options)
        else:
            path = training.convert_and_train(
                source,
                output,
                content,
                quant,
                on_progress=on_progress,
                on_training=show_training,
                **options,
            )
    if content is not None:
        bundle = Bundle.open(path)
        if bundle.predictors is not None:
            say(report.predictor_table(bundle.predictors))
        elif not bundle.config.zeros_gates:
            say(
                f"--text trains nothing: {bundle.config.hidden_act} gates are hardly ever exactly zero; "
                "`ondevice train thresholds` finds out which count for little"
            )
    click.echo(str(path))


@cli.command()
@model_option
@option(
    "--prompt",
    "-p",
    required=True,
    type=Text(),
    metavar="TEXT|-",
    help="The text to continue; - reads stdin.",
)
@add_options(SAMPLING_OPTIONS, RUNTIME_OPTIONS)
@json_option
def generate(model: str | None, prompt: str, as_json: bool, **values: Any) -> None:
    """Continue a text as it stands. Greedy unless --temp says otherwise."""
    from ondevice import api
    from ondevice.preparation import check_tokens

    sampling = sampling_config(values)
    text = TextParts(prompt) if prompt == "-" else [prompt]
    prepared = prepared_model(model, values)
    # No further than the context holds: a prompt from stdin may have no end.
    tokens = api.text_tokenizer(prepared).encode_within(text, most=prepared.plan.max_context)
    check_tokens(prepared, tokens)
    with loaded_model(prepared) as loaded:
        if as_json:
            response = loaded.generate(tokens=tokens, sampling=sampling)
            print_json(response.to_dict())
        else:
            write_events(loaded.stream(tokens=tokens, sampling=sampling))
        if loaded.stats.context_full:
            room = loaded.plan.max_context < loaded.config.max_context
            more = "--max-context makes room" if room else "that is the model's limit"
            say(f"(cut short: the context of {loaded.plan.max_context} tokens is full; {more})")
        say_figures(loaded)


cli.add_command(chat)


@cli.command()
@model_option
@option("--list", "listing", is_flag=True, help="List the models that are here, and the short names.")
@add_options(RUNTIME_OPTIONS)
@json_option
def inspect(model: str | None, listing: bool, as_json: bool, **values: Any) -> None:
    """Say what a model needs and can do, before loading anything."""
    from ondevice import api, report

    if listing:
        print_result(as_json, report.model_list(), report.model_list_text())
        return
    prepared = api.open_model(model, runtime_config(values))
    print_result(as_json, report.inspection(prepared), report.inspection_text(prepared))


cli.add_command(bench)


@cli.command("eval")
@model_option
@option("--text", required=True, metavar="FILE|-", shell_complete=complete_path, help="The text to predict.")
@add_options(RUNTIME_OPTIONS)
@json_option
def evaluate(model: str | None, text: str, as_json: bool, **values: Any) -> None:
    """Measure how well a model predicts a text: its perplexity."""
    from ondevice import api
    from ondevice.scoring import scoring_windows

    parts, taken = TextParts(text), 0
    prepared = prepared_model(model, values)
    tokenizer = api.text_tokenizer(prepared)

    def tokens() -> Iterator[int]:
        nonlocal taken
        for ids in tokenizer.encode_parts(parts):
            taken += len(ids)
            yield from ids

    stream = tokens()
    begun = list(islice(stream, 2))
    # What is too short to predict anything is refused before weights are read.
    next(scoring_windows(prepared, begun))

    def on_progress(done: int) -> None:
        show(parts.share * done / max(1, taken), f"{done} tokens")

    with loaded_model(prepared) as loaded, progress() as show:
        score = loaded.score(tokens=chain(begun, stream), on_progress=on_progress)
    if as_json:
        print_json(score.to_dict())
    else:
        click.echo(
            f"perplexity {score.perplexity:.4f} ({score.nll_per_token:.6f} nats/token, {score.tokens} tokens)"
        )


cli.add_command(train)
cli.add_command(profile)
cli.add_command(doctor)


@cli.command()
@model_option
def verify(model: str | None) -> None:
    """Read a whole bundle and compare every size, hash and checksum."""
    from ondevice import api
    from ondevice.units import format_bytes

    take_interrupts()
    with progress() as show:
        found = api.verify(
            model, on_progress=lambda done, total: show(done / max(1, total), format_bytes(done))
        )
    click.echo(f"ok: {len(found.files)} files, {found.nbytes} bytes, {found.checksums} checksums")
    if found.unused:
        say(f"not used, and not checked: {', '.join(found.unused)}; nothing in the bundle refers to them")
