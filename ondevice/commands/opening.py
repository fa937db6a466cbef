"""A model as commands open it: what is wrong is told before weights are read, the plan before they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ondevice.commands.terminal import say, take_interrupts
from ondevice.settings import runtime_config

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.runtime.resolving import ResolvedModel


def resolved_model(model: str | None, values: dict[str, Any]) -> ResolvedModel:
    """The model as `loaded_model` takes it. What is wrong with what it will get is to be said in between."""
    from ondevice import api

    resolved = api.open_model(model, runtime_config(values))
    take_interrupts()
    return resolved


@contextmanager
def loaded_model(resolved: ResolvedModel) -> Iterator[Model]:
    """The model, its plan said before its weights are read, closed at the end."""
    from ondevice import api
    from ondevice.commands import reports

    resolved.require_fit()
    say(f"{resolved.bundle.name}: {reports.plan_summary(resolved.plan)}")
    with api.Model(resolved) as loaded:
        yield loaded


def say_stats(model: Model) -> None:
    """The closing line, where there is something to close."""
    from ondevice.commands import reports

    if model.stats.forward_passes:
        say(reports.stats_line(model.stats, model.plan))
