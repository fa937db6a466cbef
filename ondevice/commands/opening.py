"""Opening a model for a command: errors and the memory plan are shown before weights are read."""

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
    """The resolved model for `loaded_model`. Commands check their other arguments between the two calls."""
    from ondevice import api

    resolved = api.open_model(model, runtime_config(values))
    take_interrupts()
    return resolved


@contextmanager
def loaded_model(resolved: ResolvedModel) -> Iterator[Model]:
    """The loaded model, closed at the end. Its plan is shown before its weights are read."""
    from ondevice import api
    from ondevice.commands import reports

    resolved.require_fit()
    say(f"{resolved.bundle.name}: {reports.plan_summary(resolved.plan)}")
    with api.Model(resolved) as loaded:
        yield loaded


def say_stats(model: Model) -> None:
    """Show the closing stats line, if any forward pass has run."""
    from ondevice.commands import reports

    if model.stats.forward_passes:
        say(reports.stats_line(model.stats, model.plan))
