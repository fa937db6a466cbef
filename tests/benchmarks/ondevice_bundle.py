"""Bundles of the random shapes, made by `ondevice convert` once and re-used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ONDEVICE = str(Path(sys.executable).with_name("ondevice"))


def convert_command(source: Path, output: Path, *options: str) -> list[str]:
    """The command line that converts `source` to a q4 bundle without calibration."""
    return [
        ONDEVICE,
        "convert",
        str(source),
        "--output",
        str(output),
        "--quant",
        "q4",
        "--no-calibrate",
        *options,
    ]


def bundle_folder(source: Path, workdir: Path) -> Path:
    """q4 bundle of a checkpoint folder, converted on the first call."""
    output = workdir / source.name.replace("-hf", "-q4")
    if not (output / "bundle.json").is_file():
        subprocess.run(convert_command(source, output, "--resume"), check=True, stdout=sys.stderr)
    return output
