"""`ondevice profile`: measures which neurons fire, what caches would miss, and how fast flash is read."""

from __future__ import annotations

from pathlib import Path

import click

from ondevice.commands.options import Command, TextParts, complete_path, json_option, model_option, option
from ondevice.commands.terminal import print_result, progress, take_interrupts
from ondevice.config import PROFILE_LEAST, PROFILE_TOKENS


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
    from ondevice.commands.bench_reports import profile_table
    from ondevice.measure import plots

    content = None if text is None else TextParts(text)
    take_interrupts()
    with progress() as show:
        result = plots.draw_profile(output, model, content, tokens=tokens, on_progress=show)
    print_result(as_json, result.to_dict(), profile_table(result))
