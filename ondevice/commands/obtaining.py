"""Models that aren't bundles yet: what a conversion would take is said and asked before it begins."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ondevice.commands.terminal import can_ask, confirm, progress, say, take_interrupts
from ondevice.config import RuntimeConfig
from ondevice.errors import ModelNotFoundError, OndeviceError, StartAgainError, UsageError

if TYPE_CHECKING:
    from ondevice.bundle.reader import Bundle
    from ondevice.measure.expected_speed import SpeedForecast
    from ondevice.runtime.conversion import ConversionEstimate, Prepared
    from ondevice.runtime.models import ConversionProgress

_CONVERTED = "_ONDEVICE_CONVERTED"
"""Variable by which a command that starts again is told a model and its bundle, in two lines."""


def obtained(model: str | None, runtime: RuntimeConfig, yes: bool) -> str | Path | None:
    """`model` if it is a bundle, else the bundle that it was converted to.

    If it has yet to be converted, that is done now. To find the bundle, the checkpoint is opened, and what
    that imports stays in memory. So StartAgainError is raised: in a new process, which is told the bundle,
    the model gets all of its budget. Raises what the conversion raises, before anything is downloaded if it
    can't work; UsageError if the answer is no; ModelNotFoundError for what can't be converted, and where
    nobody can be asked.
    """
    from ondevice.runtime.models import default_output, find_model

    if model is None:
        return None
    told, before = os.environ.pop(_CONVERTED, ""), f"{model}\n"
    if told.startswith(before) and (bundle := Path(told.removeprefix(before))).exists():
        return bundle
    try:
        find_model(model)
        return model
    except ModelNotFoundError as missing:
        if not may_be_checkpoint(model):
            raise
        is_here, is_done = Path(model).expanduser().exists(), default_output(model).exists()
        if is_done and not is_here:
            # A repository's bundle would have been found by its name: this is another's.
            raise
        if not (yes or can_ask() or is_done):
            missing.add_note("at a terminal, or with --yes, this command makes it")
            raise
        _convert_and_start_again(model, runtime, yes)


def _convert_and_start_again(model: str, runtime: RuntimeConfig, yes: bool) -> NoReturn:
    from ondevice.bundle.reader import Bundle
    from ondevice.measure.expected_speed import forecast_source
    from ondevice.runtime import conversion
    from ondevice.runtime.models import convert_line

    with conversion.prepare(model) as prepared:
        if prepared.is_converted:
            _start_again(model, prepared.output)
        if prepared.output.exists():
            others = (prepared.output.with_name(f"{prepared.output.name}-{n}") for n in count(2))
            free = next(other for other in others if not os.path.lexists(other))
            line = convert_line(model, free)
            raise UsageError(
                f"{prepared.output} exists and wasn't made from {model}; `{line}` converts that under "
                f"another name, and this command then takes {free.name} for it"
            )
        prepared.require_tokenizer()
        prepared.check_output(resume=True, force=False)
        plan = prepared.smallest_plan(runtime)
        estimate = prepared.estimate()
        say(f"{estimate.name} isn't converted yet.")
        say(offer_text(estimate, forecast_source(prepared, plan)))
        prepared.require_fit(plan)
        estimate.require_space()
        confirm("convert it?", yes, "nothing was downloaded or written")
        take_interrupts()
        try:
            path = run_conversion(prepared, resume=True)
        except OndeviceError as error:
            if not isinstance(error, UsageError):
                error.add_note("what is done is kept: the same command goes on with it")
            raise
        say(f"converted: {path}")
        say_notes(Bundle.open(path))
        _start_again(model, path)


def _start_again(model: str, bundle: Path) -> NoReturn:
    os.environ[_CONVERTED] = f"{model}\n{bundle}"
    raise StartAgainError


def run_conversion(prepared: Prepared, *, resume: bool, force: bool = False) -> Path:
    """Run a conversion, and show its progress."""
    with progress() as show:
        return prepared.run(lambda done: show(*shown(done)), resume=resume, force=force)


def say_notes(bundle: Bundle) -> None:
    """What its conversion left out, copied or rounded, as the bundle's manifest has it."""
    for note in bundle.manifest.provenance.notes:
        say(note)


def shown(done: ConversionProgress) -> tuple[float, str]:
    """The share of a conversion that is done, and what is being made, for `progress`."""
    from ondevice.commands.reports import duration

    left = "" if done.remaining_seconds is None else f", {duration(done.remaining_seconds)} left"
    return done.fraction, f"{done.step}{left}"


def offer_text(estimate: ConversionEstimate, forecast: SpeedForecast) -> str:
    """What a conversion downloads and writes, and what its bundle will need and give, in lines."""
    from ondevice.commands.reports import size
    from ondevice.commands.speed_reports import speed_words

    lines = [
        f"model     {estimate.architecture}, {estimate.parameters:,} parameters, as {estimate.quantisation}"
    ]
    if estimate.download_bytes:
        kept = "kept in the hub's cache" if estimate.kept_bytes else "none of it stored as it is"
        lines.append(f"download  {size(estimate.download_bytes)}, {kept}")
    lines.append(f"write     {size(estimate.bundle_bytes)} to {estimate.output}, where {_room(estimate)}")
    if estimate.source_bytes:
        lines.append(
            f"source    {size(estimate.source_bytes)}, which stay: with the bundle "
            f"{size(estimate.source_bytes + estimate.bundle_bytes)} of the disk; `ondevice convert "
            "--remove-source` deletes a GGUF file once its bundle is verified"
        )
    least_bytes = forecast.by_budget[0].budget_bytes
    lines.append(f"memory    {size(least_bytes)}, about, is the smallest budget that it will run in")
    lines.append(f"speed     {speed_words(forecast)}")
    if estimate.present_bytes:
        lines.append(f"begun     {size(estimate.present_bytes)} are written already, and aren't made again")
    return "\n".join(f"  {line}" for line in lines)


def _room(estimate: ConversionEstimate) -> str:
    from ondevice.units import format_bytes

    passing = f", and {format_bytes(estimate.passing_bytes)} meanwhile" if estimate.passing_bytes else ""
    return f"{format_bytes(estimate.free_bytes)} are free{passing}"


def may_be_checkpoint(model: str) -> bool:
    """True for a repository id, an alias, and a path to what looks like a checkpoint."""
    from ondevice.bundle.layout import MANIFEST
    from ondevice.runtime.models import find_source, holds_checkpoint
    from ondevice.runtime.repository import Repository

    try:
        source = find_source(model)
    except ModelNotFoundError:
        return False
    if isinstance(source, Repository):
        return True
    return holds_checkpoint(source) or (source.is_file() and source.name != MANIFEST)
