"""`ondevice split`: writes each host's layers of a model as a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ondevice.commands.options import Command, add_options, hosts_option, json_option, model_option, option
from ondevice.commands.terminal import print_result, say, take_interrupts
from ondevice.settings import RUNTIME_OPTIONS, runtime_config


@click.command(cls=Command)
@model_option
@hosts_option("The hosts that share the model, the first one with the embedding and the output head.", True)
@option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Where to make the folders rank-0, rank-1 and so on; by default NAME-slices, beside the model.",
)
@option("--force", is_flag=True, help="Replace slices that are there.")
@add_options(RUNTIME_OPTIONS)
@json_option
def split(
    model: str | None, hosts: str, output: Path | None, force: bool, as_json: bool, **values: Any
) -> None:
    """Write each host's layers as a slice, which that host needs instead of the whole model.

    The layers are divided as `ondevice inspect --hosts` says. Files of neurons are linked where they can be,
    so that slices on the model's own disk take little room.
    """
    from ondevice import api
    from ondevice.bundle.parts import layer_words
    from ondevice.commands.host_reports import division_json, slices_text
    from ondevice.distributed.division import rank_bundle
    from ondevice.distributed.planning import plan_model
    from ondevice.runtime.models import model_home, shipped_folder

    take_interrupts()
    bundle, planned = plan_model(model, hosts, runtime_config(values))
    if output is None:
        path = bundle.path.absolute()
        # The shipped model is in the package, where nothing is written.
        folder = model_home() if path.parent == shipped_folder() else path.parent
        output = folder / f"{path.name}-slices"
    written = []
    for rank, (first, stop) in enumerate(planned.division.ranges):
        say(f"rank {rank}: {layer_words(first, stop)} ...")
        part = rank_bundle(bundle, first, stop)
        written.append(api.write_slice(part, output / f"rank-{rank}", force=force))
    division = division_json(bundle, planned)
    for share, path in zip(division["ranks"], written, strict=True):
        share["path"] = str(path)
    print_result(as_json, division, slices_text(planned, written))
