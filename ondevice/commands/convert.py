"""`ondevice convert`: turns a checkpoint into a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ondevice.commands.options import Command, TextParts, complete_path, option
from ondevice.commands.terminal import progress, say, take_interrupts
from ondevice.config import AUTO_QUANT

if TYPE_CHECKING:
    from ondevice.runtime.models import ConversionProgress


@click.command(cls=Command)
@click.argument("source", shell_complete=complete_path)
@option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="The bundle's folder; if not given, one of the source's name among the models.",
)
@option(
    "--quant",
    type=click.Choice([AUTO_QUANT, "q4", "q8", "f16"]),
    default=AUTO_QUANT,
    help="Bits per weight; auto takes a quantised source's own, and q4 for others.",
)
@option(
    "--text",
    metavar="FILE",
    shell_complete=complete_path,
    help="Text to order neurons by and, with ReLU, to train predictors on.",
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

    SOURCE is a Hugging Face or MLX folder, a GGUF file (any part of one in parts), a llama2.c .bin file, a
    folder with one of these, a repository id or an alias.
    """
    from ondevice import api, training
    from ondevice.bundle.reader import Bundle
    from ondevice.commands.reports import duration
    from ondevice.commands.training_reports import predictor_table

    # A text that is set elsewhere than on the command line is meant for `eval`.
    given = context.get_parameter_source("text") is click.core.ParameterSource.COMMANDLINE
    content = None if text is None or no_calibrate or not given else TextParts(text)
    take_interrupts()
    options: dict[str, Any] = {"resume": resume, "force": force, "offline": offline}
    with progress() as show, progress() as show_training:

        def on_progress(done: ConversionProgress) -> None:
            show(done.fraction, f"{done.step}, {duration(done.remaining_seconds)} left")

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
    bundle = Bundle.open(path)
    for note in bundle.manifest.provenance.notes:
        say(note)
    if content is not None:
        if bundle.predictors is not None:
            say(predictor_table(bundle.predictors))
        elif not bundle.config.zeros_gates:
            say(
                "--text has ordered the neurons and trained no predictors: "
                f"{bundle.config.activation} gates are hardly ever exactly zero; `ondevice train thresholds` "
                "finds out which count for little"
            )
    click.echo(str(path))
