"""Predictors with random weights, which differ from layer to layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ondevice.bundle.reader import Bundle
from ondevice.converters.training.predictors.layer_predictor import LayerPredictor
from ondevice.converters.training.predictors.operating_points import HeldBack
from ondevice.converters.training.predictors.train import store_predictor, write_predictors


def add_predictors(folder: Path) -> None:
    """Write made-up predictors for the bundle in `folder`, whose gates make zeros."""
    bundle, rng = Bundle.open(folder), np.random.default_rng(5)
    hidden, stored = bundle.config.hidden_size, []
    held = HeldBack(np.arange(0, 16, 2), np.arange(1, 16, 2), block=1)
    for neurons in bundle.config.widths:
        down, up = rng.standard_normal((2, hidden), np.float32), rng.standard_normal((neurons, 2), np.float32)
        predictor = LayerPredictor(down, up, np.zeros(neurons, np.float32))
        inputs = rng.standard_normal((16, hidden)).astype(np.float16)
        stored.append(store_predictor(predictor, inputs, predictor.scores(inputs) > 0, held, 8))
    write_predictors(bundle, stored, folder, 100, 10)
