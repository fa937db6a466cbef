"""Bundles of the random shapes, made by `ondevice convert` once and re-used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONVERT = (sys.executable, "-m", "ondevice.cli", "convert")


def convert_command(source: Path, output: Path, *options: str) -> list[str]:
    """The command line that converts `source` to a q4 bundle without calibration."""
    return [*CONVERT, str(source), "--output", str(output), "--quant", "q4", "--no-calibrate", *options]


def bundle_folder(source: Path, workdir: Path) -> Path:
    """q4 bundle of a checkpoint folder, converted on the first call."""
    output = workdir / source.name.replace("-hf", "-q4")
    if not (output / "bundle.json").is_file():
        subprocess.run(convert_command(source, output, "--resume"), check=True, stdout=sys.stderr)
    return output
