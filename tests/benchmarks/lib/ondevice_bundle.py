"""Bundles of the random shapes, made by `ondevice convert` once and re-used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ONDEVICE = str(Path(sys.executable).with_name("ondevice"))


def convert_command(source: Path, output: Path, *options: str, quant: str = "q4") -> list[str]:
    """The command line that converts `source` to a bundle without calibration."""
    return [
        ONDEVICE,
        "convert",
        str(source),
        "--output",
        str(output),
        "--quant",
        quant,
        "--no-calibrate",
        *options,
    ]


def bundle_folder(source: Path, workdir: Path, quant: str = "q4") -> Path:
    """Bundle of a checkpoint folder, converted on the first call."""
    output = workdir / f"{source.stem.removesuffix('-hf')}-{quant}"
    if not (output / "bundle.json").is_file():
        command = convert_command(source, output, "--resume", quant=quant)
        subprocess.run(command, check=True, stdout=sys.stderr)
    return output
