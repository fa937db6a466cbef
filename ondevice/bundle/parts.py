"""What a part of a model has of a bundle's contents: its files, tensors and sidecars, by numbers of its own.

A part's layers are numbered from 0 on. Pure functions of what has been parsed; they open no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ondevice.bundle.expert_use import ExpertUse, HitPoint
from ondevice.bundle.layout import expert_file_name, gate_file_name, neuron_file_name
from ondevice.bundle.manifest import FileEntry, Manifest, TokenizerInfo, bundle_files, model_json
from ondevice.bundle.predictors import Predictors, predictors_text
from ondevice.bundle.quantisation_section import part_quant
from ondevice.bundle.sidecar import weights_digest
from ondevice.bundle.streams import MultiStreams, streams_text
from ondevice.bundle.strict_json import canonical_json
from ondevice.hashing import sha256_hex
from ondevice.model_config import ModelConfig

Found = TypeVar("Found")

_KEYS = (
    "predictors",
    "streams",
    "hotness",
    "expert_costs",
    "expert_use",
    "ngrams",
    "eagle",
    "mtp",
)
"""Names of sidecars' contents in a bundle."""
_LAYER_TENSOR = re.compile(r"layers\.(\d+)(\..*)")


def model_digest(manifest: Manifest) -> str:
    """A hash that identifies the whole model, its weights and its shape, of a bundle or a slice of one."""
    if manifest.part_of:
        return manifest.part_of
    described = [weights_digest(manifest), model_json(manifest.config, manifest.quant)]
    return sha256_hex(canonical_json(described))


def sidecar_digest(content: Predictors | MultiStreams) -> str:
    """A hash that identifies a whole model's sidecar, of a bundle or a slice of one."""
    if content.part_of:
        return content.part_of
    text = predictors_text(content) if isinstance(content, Predictors) else streams_text(content)
    return sha256_hex(text)


def layer_words(first: int, stop: int) -> str:
    """The layers `first` to `stop` - 1, for people."""
    return f"layer {first}" if stop - first == 1 else f"layers {first} to {stop - 1}"


def part_words(manifest: Manifest) -> str:
    """What a slice is, for people."""
    config, part = manifest.config, manifest.config.part
    own = layer_words(part.first, part.first + config.num_layers)
    layers = f"{own} of {part.layers}, which count from 0"
    ends = "with the embedding and the output head" if part.embeds else "without the embedding"
    return f"a slice of a model: {layers}, {ends}; the model's hash is {(manifest.part_of or '')[:16]}"


def part_files(config: ModelConfig, tokenizer: TokenizerInfo, shift: int) -> Iterator[tuple[str, str]]:
    """Names of a part's files, and of the same ones in the bundle that it is a part of.

    config, tokenizer: of the part. shift: index in that bundle of its first layer.
    """
    own = {name: name for name in bundle_files(config, tokenizer)}
    for layer in range(config.num_layers):
        for name in (neuron_file_name, gate_file_name, expert_file_name):
            if name(layer) in own:
                own[name(layer)] = name(layer + shift)
    yield from own.items()


def part_manifest(manifest: Manifest, config: ModelConfig) -> Manifest:
    """The manifest of a part, which has some of the bundle's resident file and checksums."""
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
    """Contents of a part's sidecars by key, None for absent ones.

    What drafts is where the embedding is, the adapters of streams aside; counts of tokens are where a head
    is. What lossy options cost is known of whole models only.

    Args:
        contents: of the bundle that it is a part of, None for absent ones; others are passed over.
        config, part: of that bundle, and of the part.
    """
    own, found = part_range(config, part), dict[str, Any].fromkeys(_KEYS)
    found["hotness"] = contents["hotness"]
    if contents["predictors"] is not None:
        found["predictors"] = _of(contents["predictors"], part_predictors(contents["predictors"], own))
    if contents["streams"] is not None:
        found["streams"] = _of(contents["streams"], part_streams(contents["streams"], own))
    if contents["expert_use"] is not None:
        found["expert_use"] = part_expert_use(contents["expert_use"], config, part)
    if part.part.embeds:
        found |= {key: contents[key] for key in ("ngrams", "eagle", "mtp")}
    return found


def _of(whole: Predictors | MultiStreams, part: Any) -> Any:
    """The part of a sidecar, which says what it is a part of."""
    return replace(part, part_of=sidecar_digest(whole))


def part_predictors(predictors: Predictors, own: slice) -> Predictors:
    """The predictors of the layers `own`."""
    points = [
        replace(
            point,
            offsets=point.offsets[own],
            false_negatives=point.false_negatives[own],
            false_positives=point.false_positives[own],
            selected=point.selected[own],
        )
        for point in predictors.points
    ]
    return replace(predictors, ranks=predictors.ranks[own], points=tuple(points))


def part_streams(streams: MultiStreams, own: slice) -> MultiStreams:
    """The adapters of the layers `own`; none where streams enter in a later part."""
    first = streams.first_layer - own.start
    if streams.first_layer >= own.stop:
        return replace(streams, first_layer=first, begins=False)
    if first >= 0 and streams.begins:
        return replace(streams, first_layer=first)
    return replace(streams, first_layer=max(0, first), begins=False)


def part_expert_use(use: ExpertUse, config: ModelConfig, part: ModelConfig) -> ExpertUse | None:
    """What a cache of a part's experts hits, if it hits as often as one of all experts that keeps the same
    share of them; None without experts.
    """
    layers, own = (sum(layer.experts is not None for layer in it.layers) for it in (config, part))
    if not own:
        return None
    points = {max(1, point.experts * own // layers): point.hits for point in use.points}
    return replace(use, points=tuple(HitPoint(experts, hits) for experts, hits in points.items()))


def part_range(config: ModelConfig, part: ModelConfig) -> slice:
    """Where a part's layers are among those of `config`, of which it is a part."""
    first = part.part.first - config.part.first
    return slice(first, first + part.num_layers)


def part_experts(config: ModelConfig, part: ModelConfig) -> slice:
    """Where a part's layers with experts are among those of `config`."""
    own = part_range(config, part)
    first, count = (
        sum(layer.experts is not None for layer in layers)
        for layers in (config.layers[: own.start], config.layers[own])
    )
    return slice(first, first + count)


def part_names(tensors: Mapping[str, Found], own: slice) -> dict[str, Found]:
    """A bundle's tensors that a part with the layers `own` has, by the part's names."""
    named = ((_part_name(name, own), found) for name, found in tensors.items())
    return {name: found for name, found in named if name is not None}


def _part_name(name: str, own: slice) -> str | None:
    found = _LAYER_TENSOR.fullmatch(name)
    if found is None:
        return name
    layer = int(found[1])
    return f"layers.{layer - own.start}{found[2]}" if own.start <= layer < own.stop else None
