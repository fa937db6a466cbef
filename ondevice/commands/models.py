"""`ondevice list` and `ondevice remove`: the bundles in the model folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ondevice.commands.options import Command, json_option, option
from ondevice.commands.terminal import confirm, print_result, say

if TYPE_CHECKING:
    from ondevice.runtime.installed import InstalledModel


@click.command("list", cls=Command)
@json_option
def list_models(as_json: bool) -> None:
    """List the models that are here: converted ones, unfinished conversions, and what ships."""
    from ondevice.runtime.installed import installed_models
    from ondevice.runtime.models import model_home

    models = installed_models()
    value = {"folder": str(model_home()), "models": [_facts(model) for model in models]}
    width = max((len(model.name) for model in models), default=0)
    lines = [_line(model, width) for model in models] or ["  none"]
    lines.insert(0, f"models in {model_home()}, and what ships:")
    print_result(as_json, value, "\n".join(lines))


@click.command(cls=Command)
@click.argument("name")
@option("--yes", "-y", is_flag=True, help="Don't ask.")
def remove(name: str, yes: bool) -> None:
    """Delete a converted model, or what an interrupted conversion left of one."""
    from ondevice.commands.reports import size
    from ondevice.runtime import conversion
    from ondevice.runtime.installed import removable

    models = removable(name)
    for model in models:
        say(f"{model.path}: {model.state}, {size(model.nbytes)}")
    confirm("delete it for good?", yes, "nothing was deleted")
    freed = sum(conversion.remove(model.path) for model in models)
    click.echo(f"deleted {name}, {size(freed)}")


def _facts(model: InstalledModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.nbytes,
        "state": model.state,
        "changed": model.changed.isoformat(timespec="seconds"),
        "source": model.source,
        "architecture": model.architecture,
        "quantisation": model.quantisation,
        "ships": model.ships,
        "problem": model.problem,
    }


def _line(model: InstalledModel, width: int) -> str:
    from ondevice.commands.reports import harmless
    from ondevice.units import format_bytes

    kind = f"{model.architecture} {model.quantisation}" if model.state == "whole" else model.state
    date = model.changed.astimezone().strftime("%Y-%m-%d")
    note = "ships" if model.ships else f"from {model.source}" if model.source else model.problem
    line = f"  {model.name:<{width}}  {format_bytes(model.nbytes):>9}  {kind:<17} {date}  {note}"
    return harmless(line.replace("\n", " ")).rstrip()
