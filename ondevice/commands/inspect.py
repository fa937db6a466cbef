"""`ondevice inspect`: shows what a model needs and can do, before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ondevice.commands.obtaining import may_be_checkpoint
from ondevice.commands.opening import CONTEXT_SHARE, runtime_of
from ondevice.commands.options import Command, add_options, hosts_option, json_option, model_option, option
from ondevice.commands.terminal import print_result
from ondevice.settings import RUNTIME_OPTIONS, runtime_config

if TYPE_CHECKING:
    from ondevice.config import RuntimeConfig
    from ondevice.measure.expected_speed import SpeedForecast


@click.command(cls=Command)
@model_option
@hosts_option("Say how the hosts of this file would share the model.")
@option("--list", "listing", is_flag=True, help="List the models that are here, and the short names.")
@add_options(RUNTIME_OPTIONS)
@option(
    "--curve",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the speeds to expect by budget as an SVG, which takes matplotlib.",
)
@json_option
def inspect(
    model: str | None,
    hosts: str | None,
    listing: bool,
    curve: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Say what a model needs and can do, and how fast it will be in which budget, before loading anything.
    Exit code 5: it doesn't fit the budget.

    A checkpoint that isn't converted yet is inspected by its headers, and by its config.json where its
    weights aren't here. The context is that of `chat` and `serve`.
    """
    from ondevice.errors import ModelNotFoundError
    from ondevice.runtime.models import find_model

    if listing:
        from ondevice.commands.inspection import model_list, model_list_text

        print_result(as_json, model_list(), model_list_text())
        return
    if hosts is not None:
        from ondevice.commands.host_reports import division_json, division_text
        from ondevice.distributed.planning import plan_model

        bundle, planned = plan_model(model, hosts, runtime_config(values))
        print_result(as_json, division_json(bundle, planned), division_text(bundle, planned))
        return
    try:
        path = find_model(model)
    except ModelNotFoundError:
        if model is None or not may_be_checkpoint(model):
            raise
        _inspect_source(model, runtime_config(values), curve, as_json)
    else:
        _inspect_bundle(path, values, curve, as_json)


def _inspect_bundle(path: Path, values: dict[str, Any], curve: Path | None, as_json: bool) -> None:
    from ondevice import api

    resolved = api.open_model(path, runtime_of(path, values, context_share=CONTEXT_SHARE), sliced=True)
    # After the process is measured: a run imports nothing of these.
    from ondevice.commands.inspection import inspection, inspection_text
    from ondevice.measure.expected_speed import forecast_model

    forecast = forecast_model(resolved)
    _draw(forecast, resolved.bundle.name, curve)
    print_result(as_json, inspection(resolved, forecast), inspection_text(resolved, forecast))
    resolved.require_fit()


def _inspect_source(model: str, runtime: RuntimeConfig, curve: Path | None, as_json: bool) -> None:
    """Inspect a checkpoint by its headers, or only by its config.json."""
    from ondevice.runtime.conversion import prepare

    with prepare(model, needs_weights=False) as prepared:
        # After the process is measured: a run imports nothing of these.
        from ondevice.commands.inspection import source_inspection, source_inspection_text
        from ondevice.measure.expected_speed import forecast_source

        plan = prepared.smallest_plan(runtime)
        forecast = forecast_source(prepared, plan)
        _draw(forecast, prepared.name, curve)
        facts = source_inspection(prepared, plan, forecast)
        print_result(as_json, facts, source_inspection_text(prepared, plan, forecast))
        prepared.require_fit(plan)


def _draw(forecast: SpeedForecast, model: str, curve: Path | None) -> None:
    """Draw the expected speeds, if a file is named."""
    if curve is not None:
        from ondevice.measure.plots import draw_speeds

        draw_speeds(forecast, model, curve)
