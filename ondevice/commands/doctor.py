"""`ondevice doctor`: a self-test of this machine and this installation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ondevice.commands.options import Command, json_option, model_option
from ondevice.commands.terminal import print_result, progress, take_interrupts
from ondevice.errors import OndeviceError

if TYPE_CHECKING:
    from ondevice.doctor.check import DoctorReport

STATUS_WIDTH = 9


@click.command(cls=Command)
@model_option
@json_option
@click.pass_context
def doctor(context: click.Context, /, model: str | None, as_json: bool) -> None:
    """Examine this machine and this installation: versions, kernels, memory, MLX, folders, flash, backends.

    The model that ships writes a few tokens on every backend, which are compared with recorded ones. --model
    names one to examine too, and to measure the device it lies on. The exit code is 1 if a check failed, 0 if
    there are warnings at most.
    """
    from ondevice.doctor import examine

    take_interrupts()
    with progress() as show:
        report = examine(model, on_progress=show)
    print_result(as_json, report.to_dict(), report_text(report))
    if not report.ok:
        context.exit(OndeviceError.exit_code)


def report_text(report: DoctorReport) -> str:
    """The report for people: a line per check with its remedy below, and the number of problems."""
    width = max(len(check.name) for check in report.checks) + 2
    lines = []
    for check in report.checks:
        lines.append(f"{check.status:{STATUS_WIDTH}}{check.name:{width}}{check.value}")
        if check.remedy:
            lines.append(f"{'':{STATUS_WIDTH}}{'':{width}}-> {check.remedy}")
    counted = f"{report.count('failed')} failed, {report.count('warning')} with a warning"
    return "\n".join([*lines, f"{len(report.checks)} checks in {report.seconds:.1f} s: {counted}"])
