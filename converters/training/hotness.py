"""Measures how often every neuron fires on a text, from recorded activations, and writes it to a bundle's
folder.

The format is in `ondevice/bundle/hotness.py`. Memory: the counts of one layer, and the bits of a few tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.bundle.files import disk_errors, write_durably
from ondevice.bundle.hotness import HOTNESS, HOTNESS_MANIFEST, Hotness, frequencies_bytes, hotness_text
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.converters.training.activations import Activations
from ondevice.model_config import ModelConfig

COUNTED_TOKENS = 256
"""Tokens whose bits are unpacked together."""


def firing_frequencies(activations: Activations, config: ModelConfig, tokens: int) -> list[Float32]:
    """For each layer, the share of tokens that make each neuron fire, (F,), out of the first `tokens`
    recorded ones.
    """
    return [_share(activations.fired(layer)[:tokens], neurons) for layer, neurons in enumerate(config.widths)]


def write_hotness(bundle: Bundle, frequencies: Sequence[Float32], tokens: int, output: Path) -> None:
    """Write both files to the folder `output`: the frequencies (F,) of each layer, counted on `tokens`
    tokens.

    The JSON file is deleted first and written last, so that no crash leaves one that doesn't describe the
    data. Raises OndeviceError if the disk refuses.
    """
    data = frequencies_bytes(frequencies, bundle.config)
    hotness = Hotness(weights_digest(bundle.manifest), tokens, hashlib.sha256(data).hexdigest())
    with disk_errors(output, "make room, or choose another --output"):
        (output / HOTNESS_MANIFEST).unlink(missing_ok=True)
        write_durably(output / HOTNESS, data)
        write_durably(output / HOTNESS_MANIFEST, hotness_text(hotness))


def _share(fired: NDArray[np.uint8], neurons: int) -> Float32:
    """The share of tokens for which each neuron fired, (F,), computed from bits (N, ceil(F / 8))."""
    counts = np.zeros(neurons, dtype=np.int64)
    for start in range(0, len(fired), COUNTED_TOKENS):
        piece = np.unpackbits(fired[start : start + COUNTED_TOKENS], axis=1, count=neurons)
        counts += piece.sum(axis=0, dtype=np.int64)
    return (counts / len(fired)).astype(np.float32)
