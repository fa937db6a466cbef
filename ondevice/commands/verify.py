"""`ondevice verify`: compares every byte of a bundle with its manifest."""

from __future__ import annotations

import click

from ondevice.commands.options import Command, model_option
from ondevice.commands.terminal import progress, say, take_interrupts


@click.command(cls=Command)
@model_option
def verify(model: str | None) -> None:
    """Read a whole bundle and compare every size, hash and checksum."""
    from ondevice import api
    from ondevice.units import format_bytes

    take_interrupts()
    with progress() as show:
        report = api.verify(
            model, on_progress=lambda done, total: show(done / max(1, total), format_bytes(done))
        )
    click.echo(f"ok: {len(report.files)} files, {report.nbytes} bytes, {report.checksums} checksums")
    if report.unused:
        say(f"not used, and not checked: {', '.join(report.unused)}; nothing in the bundle refers to them")
