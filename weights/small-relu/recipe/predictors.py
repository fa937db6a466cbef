"""Predictors of which neurons fire, for the bundle, and how often each does, from training text.

They are measured on held-out text.

    python -m recipe.predictors

adds them to a bundle (`--model`; by default the one that ships) and prints what each recall target takes and
costs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ondevice.report import predictor_table
from ondevice.training import train_predictors
from recipe.config import BUILD, CONTEXT, MIXTURE, MODEL_FOLDER
from recipe.pack import Batches, held_out_windows, read_stream

TRAINED_WINDOWS, MEASURED_WINDOWS, SEED = 108, 12, 23


def pieces(build: Path) -> list[list[int]]:
    """Windows of token ids in the proportions of the mixture; the last MEASURED_WINDOWS are held out."""
    streams = {domain: read_stream(build, domain, "train") for domain in MIXTURE}
    trained = Batches(streams, MIXTURE, CONTEXT, SEED).draw(TRAINED_WINDOWS)[:, :CONTEXT]
    counts = {domain: max(1, round(share * MEASURED_WINDOWS)) for domain, share in MIXTURE.items()}
    held_out = [held_out_windows(build, domain, CONTEXT, count) for domain, count in counts.items()]
    found: list[list[int]] = np.concatenate([trained, *held_out]).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and measure a bundle's predictors.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="the bundle's folder")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the token streams are")
    arguments = parser.parse_args()
    found = train_predictors(arguments.model, pieces=pieces(arguments.build))
    print(predictor_table(found))


if __name__ == "__main__":
    main()
