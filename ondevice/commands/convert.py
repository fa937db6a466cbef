"""`ondevice convert`: turns a checkpoint into a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ondevice.commands.obtaining import offer_text, run_conversion, say_notes, shown
from ondevice.commands.options import Command, TextParts, complete_path, option
from ondevice.commands.terminal import confirm, progress, say, take_interrupts
from ondevice.config import AUTO_QUANT, RuntimeConfig
from ondevice.errors import UsageError

if TYPE_CHECKING:
    from ondevice.bundle.reader import Bundle
    from ondevice.runtime.conversion import Prepared


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
    type=click.Choice([AUTO_QUANT, "q4", "q5", "q6", "q8", "f16"]),
    default=AUTO_QUANT,
    help="Bits per weight; auto takes a quantised source's own, and q4 for others.",
)
@option(
    "--text",
    metavar="FILE",
    shell_complete=complete_path,
    help="Text to round 4- to 6-bit weights by and, with ReLU, to order neurons by and train predictors on; "
    "with experts, only to count their use on.",
)
@option("--random-text", is_flag=True, help="Round 4- to 6-bit weights by random tokens, without a text.")
@option(
    "--no-calibrate",
    is_flag=True,
    help="Round by, order and train nothing, whatever --text and --random-text say.",
)
@option(
    "--draft-for",
    metavar="BUNDLE",
    help="Add what drafts to this model's bundle: of a folder with an EAGLE-3 head, for --speculation eagle; "
    "with a DFlash or DSpark head, for --speculation dflash; of the model's checkpoint the layer that "
    "predicts one token more, for --speculation mtp.",
)
@option("--resume", is_flag=True, help="Continue an interrupted conversion.")
@option("--force", is_flag=True, help="Replace an existing output.")
@option("--offline", is_flag=True, help="Download nothing.")
@option(
    "--keep-source",
    is_flag=True,
    help="Keep a repository's files in the hub's cache; --text and --random-text imply it.",
)
@option(
    "--remove-source",
    is_flag=True,
    help="Delete the source, a GGUF file with all its parts, once the bundle is verified.",
)
@option(
    "--chat-template",
    metavar="FILE",
    shell_complete=complete_path,
    help="File with a Jinja template to take in place of the model's own.",
)
@option("--yes", "-y", is_flag=True, help="Download without asking.")
@click.pass_context
def convert(
    context: click.Context,
    /,
    source: str,
    output: Path | None,
    quant: str,
    text: str | None,
    random_text: bool,
    no_calibrate: bool,
    draft_for: str | None,
    resume: bool,
    force: bool,
    offline: bool,
    keep_source: bool,
    remove_source: bool,
    chat_template: str | None,
    yes: bool,
) -> None:
    """Turn a checkpoint into a bundle.

    SOURCE is a Hugging Face or MLX folder, a GGUF file (any part of one in parts), a llama2.c .bin file, a
    folder with one of these, a repository id, a GGUF file of one (OWNER/NAME:FILE.gguf) or an alias. A
    repository is downloaded after saying what that takes, and asking.
    """
    # The reported budget counts the imports of running a model: they must be loaded before the measurement.
    from ondevice import api  # noqa: F401
    from ondevice.bundle.reader import Bundle
    from ondevice.commands.reports import size
    from ondevice.runtime import conversion
    from ondevice.runtime.local_source import removable_source

    if draft_for is not None:
        if output is not None:
            raise UsageError("--draft-for adds to a bundle: leave --output out")
        if remove_source:
            raise UsageError("--draft-for reads a folder, which --remove-source doesn't delete: leave it out")
        _add_draft_layer(source, draft_for, quant)
        return
    # A text from the environment or the settings file is meant for `eval`.
    given = context.get_parameter_source("text") is click.core.ParameterSource.COMMANDLINE
    content = None if text is None or no_calibrate or not given else TextParts(text)
    if content is not None and random_text:
        raise UsageError("--text rounds better than --random-text: give one of them")
    random_text = random_text and not no_calibrate
    rounds = content is not None or random_text
    removable = removable_source(source) if remove_source else None
    take_interrupts()
    kept = keep_source or rounds
    with conversion.prepare(
        source, output, quant, offline=offline, keep_source=kept, chat_template=chat_template or None
    ) as prepared:
        implied = rounds and not keep_source
        _agree(prepared, trains=content is not None, keeps=implied, resume=resume, force=force, yes=yes)
        path = _converted(prepared, content, random_text, resume=resume, force=force)
    bundle = Bundle.open(path)
    say_notes(bundle)
    if content is not None:
        say_trained(bundle)
    if removable is not None:
        with progress() as show:
            removable.remove(path, lambda done, total: show(done / max(1, total), "verifying"))
        say(f"verified, and deleted {size(removable.nbytes)}: {', '.join(map(str, removable.paths))}")
    click.echo(str(path))


def _converted(
    prepared: Prepared, content: TextParts | None, random_text: bool, *, resume: bool, force: bool
) -> Path:
    """Convert a checkpoint, and return the bundle's folder. With a text or random tokens, rounding follows
    their activations.
    """
    from ondevice import training

    try:
        if random_text:
            with progress() as show:
                return training.convert_by_random_tokens(
                    prepared, on_progress=lambda done: show(*shown(done)), resume=resume, force=force
                )
        if content is None:
            return run_conversion(prepared, resume=resume, force=force)
        with progress() as show, progress() as show_training:
            return training.train_converted(
                prepared,
                content,
                on_progress=lambda done: show(*shown(done)),
                on_training=show_training,
                resume=resume,
                force=force,
            )
    except KeyboardInterrupt:
        say("interrupted; the same command with --resume goes on with what is done")
        raise


def _add_draft_layer(source: str, draft_for: str, quant: str) -> None:
    """Add a draft layer to a bundle, and print the bundle's folder."""
    from ondevice.runtime.conversion import add_draft_layer
    from ondevice.units import format_bytes

    path, layer = add_draft_layer(source, draft_for, quant)
    nbytes = sum((path / name).stat().st_size for name in layer.sidecar.files)
    say(f"added {layer.sidecar.tensors}, {format_bytes(nbytes)}: --speculation {layer.kind} drafts with it")
    click.echo(str(path))


def say_trained(bundle: Bundle) -> None:
    """Print what training on a text has added, apart from the rounding that the bundle's notes mention."""
    from ondevice.bundle.sidecar import NO_PREDICTORS
    from ondevice.commands.training_reports import expert_use_table, predictor_table

    if bundle.expert_use is not None:
        say("--text has rounded and ordered nothing, as that takes a model without experts")
        say(expert_use_table(bundle.expert_use))
    elif bundle.predictors is not None:
        say(predictor_table(bundle.predictors))
    elif not bundle.config.zeros_gates:
        gates = f"{bundle.config.activation} gates are hardly ever exactly zero"
        reason = NO_PREDICTORS if bundle.config.cut_off_layers else gates
        say(f"--text has ordered no neurons and trained no predictors: {reason}")


def _agree(prepared: Prepared, *, trains: bool, keeps: bool, resume: bool, force: bool, yes: bool) -> None:
    """Say what a download takes, and ask. Raises errors that can be known before the download begins.

    keeps: whether the source stays even without --keep-source.
    """
    from ondevice.measure.expected_speed import forecast_source

    estimate = prepared.estimate(trains)
    if not estimate.download_bytes or (resume and prepared.is_converted):
        return
    prepared.check_output(resume, force)
    if keeps:
        say(
            "rounding by a text reads the checkpoint more than once, so its files are kept in the hub's cache"
        )
    say(f"{estimate.name}:")
    say(offer_text(estimate, forecast_source(prepared, prepared.smallest_plan(RuntimeConfig()))))
    estimate.require_space()
    confirm("download and convert it?", yes, "nothing was downloaded or written")
