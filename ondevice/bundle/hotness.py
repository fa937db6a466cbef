"""`hotness.json` and `hotness.safetensors`: how often every neuron fires, counted on text.

They are added to a finished bundle by what trains it and can be taken away again: nothing in `bundle.json`
knows them. They say what is worth reading before anybody asks, and never decide what is multiplied, so no
text depends on them. `weights/README.md` is the specification.

Legend: L layers, F neurons of a layer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.layout import CRC_BLOCK_BYTES, FileLayout, TensorSpec, resident_header
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.predictors import weights_digest
from ondevice.bundle.strict_json import Section, canonical_json, parse_json
from ondevice.config import ModelConfig
from ondevice.errors import BundleError

HOTNESS = "hotness.safetensors"
HOTNESS_MANIFEST = "hotness.json"
HOTNESS_VERSION = 1
FREQUENCY_TENSOR = "frequency"
_REMEDY = f"delete {HOTNESS_MANIFEST}; `ondevice train predictors` makes it again"


@dataclass(frozen=True)
class Hotness:
    """What `hotness.json` says. model: `weights_digest` of the weights it belongs to.

    tokens: of the text that was counted on. sha256: of the tensor's file.
    """

    model: str
    tokens: int
    sha256: str


def hotness_layout(config: ModelConfig) -> FileLayout:
    """Size and header of `hotness.safetensors`: one tensor, `frequency`, F16 (L, F)."""
    spec = TensorSpec("F16", (config.num_layers, config.intermediate_size))
    header = resident_header({FREQUENCY_TENSOR: spec})
    return FileLayout(len(header) + spec.nbytes, header, 0, (CRC_BLOCK_BYTES,))


def hotness_text(hotness: Hotness) -> bytes:
    """The bytes of `hotness.json`."""
    content = {"version": HOTNESS_VERSION, **asdict(hotness)}
    document = {"hotness": content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()}
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode("ascii") + b"\n"


def parse_hotness(data: bytes, manifest: Manifest) -> Hotness:
    """Raises BundleError for what is damaged, out of range, or was counted with other weights."""
    document = Section(parse_json(data, HOTNESS_MANIFEST), HOTNESS_MANIFEST)
    content = document.get("hotness")
    if document.get("sha256") != hashlib.sha256(canonical_json(content)).hexdigest():
        raise BundleError(
            f"{HOTNESS_MANIFEST} doesn't match its own sha256; it was damaged or edited: {_REMEDY}"
        )
    document.close()
    section = Section(content, "hotness")
    section.equal("version", HOTNESS_VERSION)
    hotness = Hotness(
        model=section.text("model", 64),
        tokens=section.integer("tokens", 1, 1 << 48),
        sha256=section.text("sha256", 64),
    )
    section.close()
    if hotness.model != weights_digest(manifest):
        raise BundleError(f"{HOTNESS_MANIFEST} was made for other weights than these: {_REMEDY}")
    return hotness


def frequencies_bytes(frequencies: NDArray[np.floating], config: ModelConfig) -> bytes:
    """The bytes of `hotness.safetensors` for frequencies (L, F), shares of tokens from 0 to 1."""
    shape = config.num_layers, config.intermediate_size
    if frequencies.shape != shape or not _are_shares(frequencies):
        raise ValueError(f"frequencies {frequencies.shape} aren't shares from 0 to 1 in the shape {shape}")
    return hotness_layout(config).header + frequencies.astype("<f2").tobytes()


def parse_frequencies(data: bytes, hotness: Hotness, config: ModelConfig) -> NDArray[np.float32]:
    """(L, F) share of tokens for which each neuron fired. Raises BundleError for a damaged file."""
    layout = hotness_layout(config)
    if len(data) != layout.nbytes or not data.startswith(layout.header):
        raise BundleError(f"{HOTNESS} isn't the {layout.nbytes} bytes that this model implies: {_REMEDY}")
    if hashlib.sha256(data).hexdigest() != hotness.sha256:
        raise BundleError(f"{HOTNESS} doesn't match its sha256; it was damaged: {_REMEDY}")
    stored = np.frombuffer(data, "<f2", offset=len(layout.header))
    if not _are_shares(stored):
        raise BundleError(f"{HOTNESS} holds what isn't a share from 0 to 1: {_REMEDY}")
    return stored.astype(np.float32).reshape(config.num_layers, config.intermediate_size)


def _are_shares(values: NDArray[np.floating]) -> bool:
    # NaN compares as neither.
    return bool(((values >= 0) & (values <= 1)).all())
