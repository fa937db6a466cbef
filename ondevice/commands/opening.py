"""Opening a model for a command: errors and the memory plan are shown before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ondevice.commands.obtaining import obtained
from ondevice.commands.terminal import can_ask, say, take_interrupts
from ondevice.settings import runtime_config

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.runtime.resolving import ResolvedModel


def resolved_model(
    model: str | None, values: dict[str, Any], yes: bool | None = None, parallel: int = 1
) -> ResolvedModel:
    """The resolved model for `loaded_model`. Commands check their other arguments between the two calls.

    Where several machines share the model, it is this rank's part. On a rank other than 0 this doesn't
    return: it serves layers until rank 0 ends.

    yes: for commands that convert what isn't a bundle yet, True if they needn't ask first. parallel: texts
    that may share passes.
    """
    from ondevice import api
    from ondevice.commands import sharing

    sharing.start(model, values)
    runtime = replace(runtime_config(values), parallel=parallel)
    shared = sharing.resolved_part(model, runtime)
    if shared is not None:
        take_interrupts()
        return shared
    name = model if yes is None else obtained(model, runtime, yes)
    resolved = api.open_model(name, runtime)
    take_interrupts()
    return resolved


def say_plan(resolved: ResolvedModel) -> None:
    """Show the plan, and what options do to the text."""
    from ondevice.commands import reports

    _say_with_losses(
        f"{reports.model_words(resolved.bundle)}: {reports.plan_summary(resolved.plan)}", resolved
    )


def say_opening(resolved: ResolvedModel) -> None:
    """Show the model, its budget and what stays on flash to somebody at a terminal; elsewhere the plan."""
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
    """The loaded model, closed at the end. `show` tells of its plan before its weights are read."""
    from ondevice import api
    from ondevice.commands import sharing

    resolved.require_fit()
    show(resolved)
    with api.Model(resolved, sharing.later_layers()) as loaded:
        yield loaded
    sharing.leave()


def say_stats(model: Model) -> None:
    """Show the closing stats line, if any forward pass has run."""
    from ondevice.commands import reports

    if model.stats.forward_passes:
        say(reports.stats_line(model.stats, model.plan))
