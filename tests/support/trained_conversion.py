"""Conversions with a text, from a checkpoint that isn't open yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.config import AUTO_QUANT
from ondevice.runtime.conversion import prepare
from ondevice.training import train_converted


def convert_and_train(
    source: Path, output: Path, text: str, quant: str = AUTO_QUANT, *, offline: bool = False, **options: Any
) -> Path:
    """The bundle that `convert --text` makes. options: of `train_converted`."""
    with prepare(source, output, quant, offline=offline, keep_source=True) as prepared:
        return train_converted(prepared, text, **options)
