"""Opening a model for a command: errors and the memory plan are shown before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from click import get_current_context

from ondevice.commands.obtaining import ensure_bundle
from ondevice.commands.options import SettingsContext
from ondevice.commands.terminal import can_ask, say, take_interrupts
from ondevice.errors import BudgetError
from ondevice.settings import runtime_config

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.api import Model
    from ondevice.config import RuntimeConfig
    from ondevice.runtime.resolving import ResolvedModel

CONTEXT_SHARE = 0.25
"""Largest share of the budget for conversations' keys and values, unless an option sets the context."""


def runtime_of(
    bundle: Path, values: dict[str, Any], parallel: int = 1, context_share: float = 0.0
) -> RuntimeConfig:
    """The options of running a model. The settings file's options for this model apply unless a flag or
    variable sets others.

    bundle: the model's folder. context_share: as in RuntimeConfig.
    """
    context = get_current_context()
    assert isinstance(context, SettingsContext)
    settings = context.of_model(bundle.name)
    runtime = runtime_config(values | {name: settings[name] for name in settings.keys() & values.keys()})
    return replace(runtime, parallel=parallel, context_share=context_share)


def resolved_model(
    model: str | None,
    values: dict[str, Any],
    yes: bool | None = None,
    parallel: int = 1,
    context_share: float = 0.0,
) -> ResolvedModel:
    """The resolved model, to be passed to `loaded_model`. Commands check their other arguments between the
    two calls.

    If several machines share the model, it is this rank's part. On a rank other than 0 this doesn't return:
    it serves layers until rank 0 ends.

    yes: None if the model must be a bundle. Otherwise it may be converted: without asking if True, after
    asking if False. parallel: texts that may share passes. context_share: as in RuntimeConfig; several
    machines share the default context.
    """
    from ondevice import api
    from ondevice.commands import sharing
    from ondevice.runtime.models import find_model

    sharing.start(model, values)
    runtime = replace(runtime_config(values), parallel=parallel)
    shared = sharing.resolved_part(model, runtime)
    if shared is not None:
        take_interrupts()
        return shared
    bundle = find_model(model if yes is None else ensure_bundle(model, runtime, yes))
    resolved = api.open_model(bundle, runtime_of(bundle, values, parallel, context_share))
    take_interrupts()
    return resolved


def require_fit(resolved: ResolvedModel) -> None:
    """Check that the model fits the budget. Raises BudgetError, with the speeds to expect in larger budgets,
    if not.
    """
    try:
        resolved.require_fit()
    except BudgetError as error:
        from ondevice.commands.speed_reports import speed_words
        from ondevice.measure.expected_speed import forecast_model

        error.add_note(f"what to expect: {speed_words(forecast_model(resolved))}")
        raise


def say_plan(resolved: ResolvedModel) -> None:
    """Print the plan, and what the options change about the text."""
    from ondevice.commands import reports

    _say_with_losses(
        f"{reports.model_words(resolved.bundle)}: {reports.plan_summary(resolved.plan)}", resolved
    )


def say_opening(resolved: ResolvedModel) -> None:
    """Print the model, its budget and the weights that stay on flash if at a terminal; otherwise print the
    plan.
    """
    from ondevice.commands import reports

    if can_ask():
        _say_with_losses(reports.opening(resolved.bundle, resolved.plan), resolved)
    else:
        say_plan(resolved)


def _say_with_losses(text: str, resolved: ResolvedModel) -> None:
    from ondevice.commands import reports

    say(text)
    for line in reports.lossy_lines(resolved):
        say(line)


@contextmanager
def loaded_model(
    resolved: ResolvedModel, show: Callable[[ResolvedModel], None] = say_plan
) -> Iterator[Model]:
    """A context with the loaded model, which is closed at the end. show: prints its plan before weights are
    read.
    """
    from ondevice import api
    from ondevice.commands import sharing

    resolved.require_fit()
    show(resolved)
    with api.Model(resolved, sharing.later_layers()) as loaded:
        yield loaded
    sharing.leave()


def say_stats(model: Model) -> None:
    """Print the line of stats, if any forward pass has run."""
    from ondevice.commands import reports

    if model.stats.forward_passes:
        say(reports.stats_line(model.stats, model.plan))
