"""`hotness.json` and `hotness.safetensors`: how often every neuron fires, counted on text.

A sidecar (`sidecar.py`), added to a finished bundle by `ondevice train predictors`. It tells the neuron cache
which neurons are likely to fire, and never which are multiplied, so no text depends on it.
`weights/README.md` is the specification.

Legend: L layers, F neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.file_layouts import FileLayout, TensorSpec, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import SHA256, Sidecar, parse_sidecar, require_weights, sidecar_text
from ondevice.bundle.strict_json import Section
from ondevice.errors import BundleError
from ondevice.hashing import sha256_hex
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

HOTNESS = "hotness.safetensors"
HOTNESS_MANIFEST = "hotness.json"
HOTNESS_SIDECAR = Sidecar(
    "hotness",
    HOTNESS_MANIFEST,
    HOTNESS,
    "ondevice train predictors --model {model} --text FILE",
    "every mode",
)
FREQUENCY_TENSOR = "frequency"


@dataclass(frozen=True)
class Hotness:
    """The content of `hotness.json`.

    model: `weights_digest` of the weights that it belongs to. tokens: length of the text that was counted.
    sha256: that of the file with the tensor.
    """

    model: str
    tokens: int
    sha256: str


def hotness_layout(config: ModelConfig) -> FileLayout:
    """Size and header of `hotness.safetensors`: one tensor, `frequency`, F16 (L, F).

    If layers have different numbers of neurons, its shape is (N,), layer after layer.
    """
    equal = len(set(config.widths)) == 1
    shape = (config.num_layers, config.widest) if equal else (config.num_neurons,)
    return tensors_layout({FREQUENCY_TENSOR: TensorSpec("F16", shape)})


def hotness_text(hotness: Hotness) -> bytes:
    """The bytes of `hotness.json`."""
    return sidecar_text(HOTNESS_SIDECAR, {**HOTNESS_SIDECAR.facts, **asdict(hotness)})


def parse_hotness(data: bytes, manifest: Manifest) -> Hotness:
    """`hotness.json` parsed. Raises BundleError if it is damaged, out of range, or made for other weights."""
    rules = {"model": SHA256, "tokens": (Section.integer, 1, 1 << 48), "sha256": SHA256}
    hotness = Hotness(**parse_sidecar(HOTNESS_SIDECAR, data).values(rules))
    require_weights(HOTNESS_SIDECAR, manifest, hotness.model)
    return hotness


def frequencies_bytes(frequencies: Sequence[NDArray[np.floating]], config: ModelConfig) -> bytes:
    """The bytes of `hotness.safetensors`. frequencies: for each layer, (F,) shares of tokens, from 0 to 1."""
    shapes = [shares.shape for shares in frequencies]
    if shapes != [(neurons,) for neurons in config.widths] or not all(map(_are_shares, frequencies)):
        raise ValueError(f"frequencies {shapes} aren't shares from 0 to 1 of {config.widths} neurons")
    return hotness_layout(config).header + np.concatenate(frequencies).astype("<f2").tobytes()


def parse_frequencies(data: bytes, hotness: Hotness, config: ModelConfig) -> list[NDArray[np.float32]]:
    """For each layer, (F,) the share of tokens for which each neuron fired.

    Raises BundleError if the file is damaged.
    """
    layout = hotness_layout(config)
    if len(data) != layout.nbytes or not data.startswith(layout.header):
        raise BundleError(f"{HOTNESS} isn't the {layout.nbytes} bytes that this model implies")
    if sha256_hex(data) != hotness.sha256:
        raise BundleError(f"{HOTNESS} doesn't match its sha256; it was damaged")
    stored = np.frombuffer(data, "<f2", offset=len(layout.header))
    if not _are_shares(stored):
        raise BundleError(f"{HOTNESS} holds what isn't a share from 0 to 1")
    return np.split(stored.astype(np.float32), np.cumsum(config.widths)[:-1])


def _are_shares(values: NDArray[np.floating]) -> bool:
    # NaN fails both comparisons.
    return bool(((values >= 0) & (values <= 1)).all())
