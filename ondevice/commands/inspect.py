"""`ondevice inspect`: shows what a model needs and can do, before it is loaded."""

from __future__ import annotations

from typing import Any

import click

from ondevice.commands.opening import CONTEXT_SHARE, runtime_of
from ondevice.commands.options import Command, add_options, hosts_option, json_option, model_option, option
from ondevice.commands.terminal import print_result
from ondevice.settings import RUNTIME_OPTIONS, runtime_config


@click.command(cls=Command)
@model_option
@hosts_option("Say how the hosts of this file would share the model.")
@option("--list", "listing", is_flag=True, help="List the models that are here, and the short names.")
@add_options(RUNTIME_OPTIONS)
@json_option
def inspect(model: str | None, hosts: str | None, listing: bool, as_json: bool, **values: Any) -> None:
    """Say what a model needs and can do, before loading anything. Exit code 5: it doesn't fit the budget.

    The context is that of `chat` and `serve`.
    """
    from ondevice import api
    from ondevice.commands.inspection import inspection, inspection_text, model_list, model_list_text
    from ondevice.runtime.models import find_model

    if listing:
        print_result(as_json, model_list(), model_list_text())
        return
    if hosts is not None:
        from ondevice.commands.host_reports import division_json, division_text
        from ondevice.distributed.planning import plan_model

        bundle, planned = plan_model(model, hosts, runtime_config(values))
        print_result(as_json, division_json(bundle, planned), division_text(bundle, planned))
        return
    path = find_model(model)
    runtime = runtime_of(path, values, context_share=CONTEXT_SHARE)
    resolved = api.open_model(path, runtime, sliced=True)
    print_result(as_json, inspection(resolved), inspection_text(resolved))
    resolved.require_fit()
