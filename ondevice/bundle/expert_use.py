"""`expert_use.json` and `expert_use.safetensors`: how often tokens of a text chose each expert of a mixture.

They also hold the hit rates that expert caches of several sizes have on that text. A sidecar (`sidecar.py`),
added to a finished bundle by `ondevice train expert-use`; no text depends on it. `weights/README.md` is the
specification.

Legend: L layers with experts, E experts of a layer, k chosen for a token.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.file_layouts import FileLayout, TensorSpec, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import (
    MAX_POINTS,
    SHA256,
    Sidecar,
    parse_sidecar,
    require_weights,
    sidecar_text,
)
from ondevice.bundle.strict_json import Section
from ondevice.errors import BundleError
from ondevice.hashing import sha256_hex
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

EXPERT_USE = "expert_use.safetensors"
EXPERT_USE_MANIFEST = "expert_use.json"
EXPERT_USE_SIDECAR = Sidecar(
    "expert_use",
    EXPERT_USE_MANIFEST,
    EXPERT_USE,
    "ondevice train expert-use --model {model} --text FILE",
    "every mode",
)
COUNTS_TENSOR = "counts"
MAX_TOKENS = (1 << 32) - 1


@dataclass(frozen=True)
class HitPoint:
    """One point of the hit rate's curve: the share of lookups, `hits` from 0 to 1, served by a cache of
    `experts` experts.
    """

    experts: int
    hits: float


@dataclass(frozen=True)
class ExpertUse:
    """The content of `expert_use.json`.

    model: `weights_digest` of the weights that it belongs to. tokens: length of the text that was counted.
    replayed_tokens: how many of these the points were measured on, one token at a time, with a cache warmed
    by other tokens. points: by ascending cache size. sha256: that of the file with the tensor.
    """

    model: str
    tokens: int
    replayed_tokens: int
    points: tuple[HitPoint, ...]
    sha256: str

    def expected_hits(self, experts: int, total: int) -> float:
        """The expected share of hits, from 0 to 1, in a cache that keeps `experts` of `total` experts.

        Interpolated linearly between the points, no experts and all experts.
        """
        sizes = [0, *(point.experts for point in self.points), total]
        return float(np.interp(experts, sizes, [0.0, *(point.hits for point in self.points), 1.0]))


def expert_use_layout(config: ModelConfig) -> FileLayout:
    """Size and header of `expert_use.safetensors`: one tensor, `counts`, U32 (L, E)."""
    return tensors_layout({COUNTS_TENSOR: TensorSpec("U32", _shape(config))})


def expert_use_text(use: ExpertUse) -> bytes:
    """The bytes of `expert_use.json`."""
    return sidecar_text(EXPERT_USE_SIDECAR, {**EXPERT_USE_SIDECAR.facts, **asdict(use)})


def parse_expert_use(data: bytes, manifest: Manifest) -> ExpertUse:
    """The parsed `expert_use.json`. Raises BundleError if damaged, out of range, or made for other
    weights."""
    layers, experts = _shape(manifest.config)
    point = {"experts": (Section.integer, 1, layers * experts), "hits": (Section.number, 0.0, 1.0)}
    values = parse_sidecar(EXPERT_USE_SIDECAR, data).values(
        {
            "model": SHA256,
            **dict.fromkeys(("tokens", "replayed_tokens"), (Section.integer, 1, MAX_TOKENS)),
            "points": (Section.entries, MAX_POINTS, HitPoint, point),
            "sha256": SHA256,
        }
    )
    use = ExpertUse(**values)
    sizes = [point.experts for point in use.points]
    if not sizes or sizes != sorted(set(sizes)):
        raise BundleError(f"{EXPERT_USE_MANIFEST}: its points must be one or more, of ascending experts")
    require_weights(EXPERT_USE_SIDECAR, manifest, use.model)
    return use


def expert_counts_bytes(counts: NDArray[np.integer]) -> bytes:
    """The bytes of `expert_use.safetensors`. counts: (L, E) tokens that chose each expert."""
    spec = TensorSpec("U32", counts.shape)
    return tensors_layout({COUNTS_TENSOR: spec}).header + counts.astype("<u4").tobytes()


def parse_expert_counts(data: bytes, use: ExpertUse, config: ModelConfig) -> NDArray[np.uint32]:
    """(L, E) number of the text's tokens that chose each expert. Raises BundleError for a damaged file."""
    layout = expert_use_layout(config)
    if len(data) != layout.nbytes or not data.startswith(layout.header):
        raise BundleError(f"{EXPERT_USE} isn't the {layout.nbytes} bytes that this model implies")
    if sha256_hex(data) != use.sha256:
        raise BundleError(f"{EXPERT_USE} doesn't match its sha256; it was damaged")
    counts = np.frombuffer(data, "<u4", offset=len(layout.header)).reshape(_shape(config))
    assert config.experts is not None
    chosen = use.tokens * config.experts.chosen
    if int(counts.max()) > use.tokens or (counts.sum(axis=1, dtype=np.uint64) != chosen).any():
        raise BundleError(
            f"{EXPERT_USE}: its counts aren't those of {use.tokens} tokens that choose "
            f"{config.experts.chosen} experts in each layer"
        )
    return counts


def _shape(config: ModelConfig) -> tuple[int, int]:
    """The numbers L and E of a model. Raises BundleError for a model without experts."""
    if config.experts is None:
        raise BundleError(f"{EXPERT_USE_MANIFEST} is there, but this model has no experts: delete it")
    return sum(layer.experts is not None for layer in config.layers), config.experts.count
