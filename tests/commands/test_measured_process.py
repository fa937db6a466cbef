"""Plans measure the process before a command imports what a run of the model doesn't have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bundles import write_chat_checkpoint

# The command line, which says last what is imported when memory is first measured.
PROGRAM = """
import json, sys
from ondevice.cli import run
from ondevice.runtime import conversion, resolving

forecasting = {"ondevice.doctor", "ondevice.measure.expected_speed", "ondevice.commands.inspection"}
found = []

def spied(measure):
    def measured():
        found.append(sorted(forecasting & sys.modules.keys()))
        return measure()
    return measured

resolving._measured = spied(resolving._measured)
conversion._process_bytes = spied(conversion._process_bytes)
run(sys.argv[1:])
print(json.dumps(found[:1]))
"""


@pytest.mark.parametrize("command", ["inspect", "generate", "inspect a checkpoint", "generate a checkpoint"])
def test_what_forecasts_is_imported_after_the_process_is_measured(
    chat_bundle: Path, tmp_path: Path, command: str
) -> None:
    name, *source = command.split(maxsplit=1)
    model = write_chat_checkpoint(tmp_path / "checkpoint") if source else chat_bundle
    arguments = [name, "-m", str(model)] if name == "generate" else [name, str(model)]
    if name == "generate":
        arguments += ["--prompt", "a", "--max-tokens", "1", "--yes"]
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"ONDEVICE_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert json.loads(said.splitlines()[-1]) == [[]]
