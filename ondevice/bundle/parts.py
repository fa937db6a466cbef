"""The files, tensors and sidecars of a part of a model. A part numbers its layers from 0 on.

Pure functions of parsed contents; they open no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ondevice.bundle.draft_layers import SIDECAR_OF
from ondevice.bundle.expert_use import ExpertUse, HitPoint
from ondevice.bundle.layout import expert_file_name, gate_file_name, neuron_file_name
from ondevice.bundle.manifest import FileEntry, Manifest, TokenizerInfo, bundle_files, model_json
from ondevice.bundle.predictors import Predictors, predictors_text
from ondevice.bundle.quantization_section import part_quant
from ondevice.bundle.sidecar import weights_digest
from ondevice.bundle.streams import MultiStreams, streams_text
from ondevice.bundle.strict_json import canonical_json
from ondevice.hashing import sha256_hex
from ondevice.model_config import ModelConfig

Value = TypeVar("Value")

_KEYS = (
    "predictors",
    "streams",
    "hotness",
    "expert_costs",
    "expert_use",
    "ngrams",
    *SIDECAR_OF,
)
"""Names of sidecars' contents in a bundle."""
_LAYER_TENSOR = re.compile(r"layers\.(\d+)(\..*)")


def model_digest(manifest: Manifest) -> str:
    """A hash that identifies the complete model of a bundle or slice: its weights and its shape."""
    if manifest.part_of:
        return manifest.part_of
    described = [weights_digest(manifest), model_json(manifest.config, manifest.quant)]
    return sha256_hex(canonical_json(described))


def sidecar_digest(content: Predictors | MultiStreams) -> str:
    """A hash that identifies the sidecar of the complete model, whether `content` is from the complete bundle
    or a slice.
    """
    if content.part_of:
        return content.part_of
    text = predictors_text(content) if isinstance(content, Predictors) else streams_text(content)
    return sha256_hex(text)


def layer_words(first: int, stop: int) -> str:
    """The layers `first` to `stop` - 1 in words, for messages."""
    return f"layer {first}" if stop - first == 1 else f"layers {first} to {stop - 1}"


def part_words(manifest: Manifest) -> str:
    """A description of which part of a model a slice is, for messages."""
    config, part = manifest.config, manifest.config.part
    layer_range = layer_words(part.first, part.first + config.num_layers)
    layers = f"{layer_range} of {part.layers}, which count from 0"
    ends = "with the embedding and the output head" if part.embeds else "without the embedding"
    return f"a slice of a model: {layers}, {ends}; the model's hash is {(manifest.part_of or '')[:16]}"


def part_files(config: ModelConfig, tokenizer: TokenizerInfo, shift: int) -> Iterator[tuple[str, str]]:
    """Yields the name of each file of a part, with the file's name in the bundle that the part is taken from.

    config, tokenizer: those of the part. shift: index, in that bundle, of the part's first layer.
    """
    names = {name: name for name in bundle_files(config, tokenizer)}
    for layer in range(config.num_layers):
        for name in (neuron_file_name, gate_file_name, expert_file_name):
            if name(layer) in names:
                names[name(layer)] = name(layer + shift)
    yield from names.items()


def part_manifest(manifest: Manifest, config: ModelConfig) -> Manifest:
    """The manifest of a part of a bundle. config: the part's config."""
    tokenizer = manifest.tokenizer if config.part.embeds else TokenizerInfo()
    shift = config.part.first - manifest.config.part.first
    files: dict[str, FileEntry] = {
        name: manifest.files[stored] for name, stored in part_files(config, tokenizer, shift)
    }
    return replace(
        manifest,
        config=config,
        quant=part_quant(manifest.quant, config, shift),
        tokenizer=tokenizer,
        files=files,
        part_of=model_digest(manifest),
    )


def part_contents(contents: Mapping[str, Any], config: ModelConfig, part: ModelConfig) -> dict[str, Any]:
    """The contents of a part's sidecars by key; None for absent ones.

    Drafters are in the part with the embedding, except the adapters of streams. No part has the costs of
    lossy options.

    Args:
        contents: the sidecars of the bundle that the part is taken from, None for absent ones; other keys are
            ignored.
    """
    layers, sidecars = part_range(config, part), dict[str, Any].fromkeys(_KEYS)
    sidecars["hotness"] = contents["hotness"]
    if contents["predictors"] is not None:
        sidecars["predictors"] = _of(contents["predictors"], part_predictors(contents["predictors"], layers))
    if contents["streams"] is not None:
        sidecars["streams"] = _of(contents["streams"], part_streams(contents["streams"], layers))
    if contents["expert_use"] is not None:
        sidecars["expert_use"] = part_expert_use(contents["expert_use"], config, part)
    if part.part.embeds:
        sidecars |= {key: contents[key] for key in ("ngrams", *SIDECAR_OF)}
    return sidecars


def _of(sidecar: Predictors | MultiStreams, part: Any) -> Any:
    """A part's sidecar `part`, marked with the hash of the sidecar that it is taken from."""
    return replace(part, part_of=sidecar_digest(sidecar))


def part_predictors(predictors: Predictors, layers: slice) -> Predictors:
    """The predictors of the layers in the range `layers`."""
    points = [
        replace(
            point,
            offsets=point.offsets[layers],
            false_negatives=point.false_negatives[layers],
            false_positives=point.false_positives[layers],
            selected=point.selected[layers],
        )
        for point in predictors.points
    ]
    return replace(predictors, ranks=predictors.ranks[layers], points=tuple(points))


def part_streams(streams: MultiStreams, layers: slice) -> MultiStreams:
    """The adapters of the layers in the range `layers`; those of no layer if streams enter in a
    later part.
    """
    first = streams.first_layer - layers.start
    if streams.first_layer >= layers.stop:
        return replace(streams, first_layer=first, begins=False)
    if first >= 0 and streams.begins:
        return replace(streams, first_layer=first)
    return replace(streams, first_layer=max(0, first), begins=False)


def part_expert_use(use: ExpertUse, config: ModelConfig, part: ModelConfig) -> ExpertUse | None:
    """The expected hits of a part's experts, for caches that hold the same share of all experts. None if the
    part has no experts.
    """
    layers, part_layers = (sum(layer.experts is not None for layer in it.layers) for it in (config, part))
    if not part_layers:
        return None
    points = {max(1, point.experts * part_layers // layers): point.hits for point in use.points}
    return replace(use, points=tuple(HitPoint(experts, hits) for experts, hits in points.items()))


def part_range(config: ModelConfig, part: ModelConfig) -> slice:
    """The range of a part's layers among the layers of `config`, the model that it is a part of."""
    first = part.part.first - config.part.first
    return slice(first, first + part.num_layers)


def part_experts(config: ModelConfig, part: ModelConfig) -> slice:
    """The range of a part's layers with experts among the layers with experts of `config`."""
    span = part_range(config, part)
    first, count = (
        sum(layer.experts is not None for layer in layers)
        for layers in (config.layers[: span.start], config.layers[span])
    )
    return slice(first, first + count)


def part_names(tensors: Mapping[str, Value], layers: slice) -> dict[str, Value]:
    """The tensors of a part with these layers, under the names that they have in the part."""
    named = ((_part_name(name, layers), value) for name, value in tensors.items())
    return {name: value for name, value in named if name is not None}


def _part_name(name: str, layers: slice) -> str | None:
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return name
    layer = int(match[1])
    return f"layers.{layer - layers.start}{match[2]}" if layers.start <= layer < layers.stop else None
