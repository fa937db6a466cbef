"""Streams of random adapters for a small bundle: nothing was trained, so nothing is guessed well."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Literal

import numpy as np

from ondevice.backends.base import Float32
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import MultiStreamMode, MultiStreams
from ondevice.converters.training.streams.write import write_streams
from ondevice.model_config import ModelConfig

PARTS = ("qkv", "out", "feed_forward")
"""Of a layer, what has adapters."""


def made_up_arrays(
    config: ModelConfig,
    gamma: int = 2,
    layers: int = 1,
    attention_rank: int = 8,
    feed_forward_rank: int = 8,
    seed: int = 0,
    scale: float = 0.1,
) -> dict[str, Float32]:
    """Normal values of standard deviation `scale`, by the specification's names, in its order.

    layers: the last ones of the model, which have streams.
    """
    rng = np.random.default_rng(seed)
    hidden, a, f = config.hidden_size, attention_rank, feed_forward_rank
    shapes = {"embeddings": (gamma, hidden)}
    for layer in range(config.num_layers - layers, config.num_layers):
        prefix = f"layers.{layer}"
        shapes |= {f"{prefix}.qkv.down": (a, hidden), f"{prefix}.qkv.up": (config.qkv_size, a)}
        shapes |= {f"{prefix}.out.down": (a, config.query_size), f"{prefix}.out.up": (hidden, a)}
        shapes |= {f"{prefix}.feed_forward.down": (f, hidden), f"{prefix}.feed_forward.up": (hidden, f)}
    return {
        name: (scale * rng.standard_normal(shape)).astype(np.float32, copy=False)
        for name, shape in shapes.items()
    }


def add_streams(
    folder: Path,
    gamma: int = 2,
    layers: int = 1,
    attention_rank: int = 8,
    feed_forward_rank: int = 8,
    seed: int = 0,
    mode: MultiStreamMode = "lossless",
    bits: Literal[4, 8, 16] = 8,
    scale: float = 0.1,
    parts: Container[str] = PARTS,
) -> MultiStreams:
    """Write streams of `made_up_arrays` into the bundle in `folder`.

    parts: those of a layer whose adapters do anything.
    """
    config = Bundle.open(folder).config
    arrays = made_up_arrays(config, gamma, layers, attention_rank, feed_forward_rank, seed, scale)
    for name, array in arrays.items():
        if name.startswith("layers.") and name.split(".")[2] not in parts:
            array.fill(0.0)
    return write_streams(
        folder,
        arrays,
        mode=mode,
        bits=bits,
        streams=gamma,
        first_layer=config.num_layers - layers,
        attention_rank=attention_rank,
        feed_forward_rank=feed_forward_rank,
        trained_tokens=1000,
        measured_tokens=100,
        acceptance=[0.5**stream for stream in range(1, gamma + 1)],
    )
