"""Offers to convert a model that isn't a bundle yet: shows what that takes, and asks before it begins."""

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
"""Environment variable with a model and its bundle, in two lines, for a command that starts again."""


def ensure_bundle(model: str | None, runtime: RuntimeConfig, yes: bool) -> str | Path | None:
    """`model` if it is a bundle, else the bundle that it was converted to.

    Converts it now if necessary. That imports modules which stay in memory, so StartAgainError is raised
    afterwards: a new process then opens the bundle, with all of its budget for the model. Raises errors of
    the conversion, before any download where possible; UsageError if the answer is no; ModelNotFoundError if
    the model can't be converted, or there is no terminal to ask at.
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
            # find_model finds a repository's bundle by its name, so this is another's.
            raise
        if not (yes or can_ask() or is_done):
            missing.add_note("at a terminal, or with --yes, this command makes it")
            raise
        _convert_and_start_again(model, runtime, yes)


def _convert_and_start_again(model: str, runtime: RuntimeConfig, yes: bool) -> NoReturn:
    from ondevice.bundle.reader import Bundle
    from ondevice.runtime import conversion
    from ondevice.runtime.models import convert_line

    with conversion.prepare(model) as prepared:
        # After the process is measured: a run imports nothing of this.
        from ondevice.measure.expected_speed import forecast_source

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
    """Print the manifest's notes: what the conversion left out, copied or rounded."""
    for note in bundle.manifest.provenance.notes:
        say(note)


def shown(done: ConversionProgress) -> tuple[float, str]:
    """How much of a conversion is finished, from 0 to 1, and its present step, for `progress`."""
    from ondevice.commands.reports import duration

    left = "" if done.remaining_seconds is None else f", {duration(done.remaining_seconds)} left"
    return done.fraction, f"{done.step}{left}"


def offer_text(estimate: ConversionEstimate, forecast: SpeedForecast) -> str:
    """A text on what a conversion downloads and writes, and on its bundle's memory and speed."""
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
    """Whether `model` is a repository id, an alias, or a path to what looks like a checkpoint."""
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
