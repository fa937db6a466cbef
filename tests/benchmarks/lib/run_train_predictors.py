"""A part of `ondevice train predictors` on a synthetic bundle, in a fresh process. JSON in, JSON out.

Spec: model, folder (of recorded activations), tokens, part: `record` activations of as many tokens; `fit` one
`layer`'s predictor on as many, repeated where there are fewer, without gradient steps; or `step`, one epoch
of these for all `ranks` at once. Seconds are of the wall and of the processor: others may use the
machine meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.reader import Bundle
from ondevice.converters.training.activations import Activations, gate_rows, record_activations
from ondevice.converters.training.predictors.arrays import NumpyArrays
from ondevice.converters.training.predictors.fine_tune import FineTuning
from ondevice.converters.training.predictors.layer_predictor import LayerPredictor, active_count
from ondevice.converters.training.predictors.train import PredictorOptions, fit_layer
from ondevice.training import PIECE_TOKENS
from tests.benchmarks.lib.measure import peak_memory_bytes
from tests.benchmarks.lib.random_model import random_tokens


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, object]:
        """Of the wall and of the processor."""
        return {
            "wall_seconds": time.perf_counter() - self._wall,
            "processor_seconds": time.process_time() - self._processor,
        }


def record(bundle: Bundle, spec: dict[str, Any]) -> dict[str, object]:
    """Activations of random tokens, in pieces as the command cuts a text."""
    ids = random_tokens(spec["tokens"], bundle.config.vocab_size)
    pieces = [ids[start : start + PIECE_TOKENS] for start in range(0, len(ids), PIECE_TOKENS)]
    folder = Path(spec["folder"])
    record_activations(bundle, pieces, folder)
    return {"disk_bytes": sum(path.stat().st_size for path in folder.iterdir())}


def fit(bundle: Bundle, spec: dict[str, Any]) -> dict[str, object]:
    """One layer's predictor, from principal components to the quantised matrices' rates, but for epochs."""
    options = PredictorOptions()
    options = replace(options, training=replace(options.training, epochs=0))
    trained = spec["tokens"] - round(options.measured_share * spec["tokens"])
    repeated = activations(bundle, Path(spec["folder"]) / "repeated")
    return {"rank": fit_layer(bundle, repeated, spec["layer"], trained, options, NumpyArrays()).rank}


def step(bundle: Bundle, spec: dict[str, Any]) -> dict[str, object]:
    """An epoch on all tokens, from random matrices; the clock is of that alone."""
    options, random = PredictorOptions(), np.random.default_rng(3)
    repeated = activations(bundle, Path(spec["folder"]) / "repeated")
    gate = gate_rows(bundle, spec["layer"])
    neurons, width = gate.shape
    predictors = [
        LayerPredictor(
            random.standard_normal((rank, width), np.float32),
            random.standard_normal((neurons, rank), np.float32),
            np.zeros(neurons, np.float32),
        )
        for rank in spec["ranks"]
    ]
    samples = (repeated.inputs(spec["layer"]), repeated.fired(spec["layer"]), gate)
    training = replace(options.training, epochs=1)
    ids = np.arange(spec["tokens"])
    active = active_count(samples[1], ids, neurons)
    tuning = FineTuning(predictors, *samples, ids, active, training, random, NumpyArrays())
    clock = Clock()
    tuning.epoch()
    return clock.read()


def repeat(bundle: Bundle, spec: dict[str, Any]) -> None:
    """One layer's recorded activations over and over, until there are `tokens` of them."""
    folder, layer = Path(spec["folder"]), spec["layer"]
    (folder / "repeated").mkdir(exist_ok=True)
    recorded, repeated = activations(bundle, folder), activations(bundle, folder / "repeated")
    for kind, rows in (("inputs", recorded.inputs(layer)), ("fired", recorded.fired(layer))):
        with repeated.path(kind, layer).open("wb") as file:
            for start in range(0, spec["tokens"], len(rows)):
                file.write(rows[: spec["tokens"] - start].tobytes())


def activations(bundle: Bundle, folder: Path) -> Activations:
    """What is recorded in `folder`."""
    config = bundle.config
    return Activations(folder, config.hidden_size, config.widths)


def run(spec: dict[str, Any]) -> dict[str, object]:
    """One part, measured."""
    bundle = Bundle.open(spec["model"])
    if spec["part"] != "record":
        repeat(bundle, spec)
    clock = Clock()
    result = {"record": record, "fit": fit, "step": step}[spec["part"]](bundle, spec)
    return clock.read() | result | {"peak_memory_bytes": peak_memory_bytes()}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
