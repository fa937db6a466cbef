"""Predictors of which neurons fire, and the neurons' firing frequencies, from training text.

Blocks of training text that predictors aren't fitted to set their thresholds. Held-out text measures them.

    python -m recipe.predictors

adds them to a bundle (`--model`; by default the shipped one) and prints a table of the recall targets: the
neurons that each selects, and its cost in quality.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ondevice.commands.training_reports import predictor_table
from ondevice.config import RuntimeConfig
from ondevice.converters.training.sidecars import MEASURED_SHARE
from ondevice.training import train_predictors
from recipe.config import BUILD, CONTEXT, MIXTURE, MODEL_FOLDER
from recipe.pack import Batches, held_out_windows, read_stream

MEASURED_WINDOWS, SEED = 24, 23
Windows = list[list[int]]


def held_out(build: Path) -> Windows:
    """About MEASURED_WINDOWS windows in the proportions of the mixture, at least one of every domain."""
    counts = {domain: max(1, round(share * MEASURED_WINDOWS)) for domain, share in MIXTURE.items()}
    windows = [held_out_windows(build, domain, CONTEXT, count) for domain, count in counts.items()]
    found: Windows = np.concatenate(windows).tolist()
    return found


def trained(build: Path, measured: int) -> Windows:
    """Windows of training text in the same proportions, as many as belong to `measured` measured windows."""
    streams = {domain: read_stream(build, domain, "train") for domain in MIXTURE}
    count = round(measured / MEASURED_SHARE) - measured
    found: Windows = Batches(streams, MIXTURE, CONTEXT, SEED).draw(count)[:, :CONTEXT].tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and measure a bundle's predictors.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="the bundle's folder")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the token streams are")
    parser.add_argument("--backend", default=RuntimeConfig.backend, help="what trains: auto, cpu or mlx")
    arguments = parser.parse_args()
    measured = held_out(arguments.build)
    pieces = trained(arguments.build, len(measured)) + measured
    found = train_predictors(
        arguments.model,
        pieces=pieces,
        measured_tokens=CONTEXT * len(measured),
        backend=arguments.backend,
    )
    print(predictor_table(found))


if __name__ == "__main__":
    main()
