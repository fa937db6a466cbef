"""The key `quantisation` of `bundle.json`: the format of each matrix."""

from __future__ import annotations

import re
from typing import Any, cast, get_args

from ondevice.bundle.layout import slice_neurons
from ondevice.bundle.strict_json import Section
from ondevice.config import (
    GROUP_SIZE,
    MATRIX_KINDS,
    MXFP4,
    SUPER_SIZE,
    TILE_FORMATS,
    Bits,
    GroupSize,
    MatrixKind,
    QuantConfig,
    RowFormat,
    Scales,
    format_order,
    matrix_name,
)
from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.model_config import ModelConfig

_BIASES: dict[str, Scales] = {"stored": "affine", "implied": "symmetric", "none": "mxfp4"}
_NAME = re.compile(rf"(?:layers\.(0|[1-9]\d{{0,5}})\.)?({'|'.join(MATRIX_KINDS)})(?:\.([a-z]+))?")
"""A `matrix_name`: its layer, its kind and its part."""


def quantization_section(quant: QuantConfig) -> dict[str, Any]:
    """The JSON of `quant`."""
    section: dict[str, Any] = {"bits": quant.bits, "group_size": GROUP_SIZE}
    if quant.formats:
        section["matrices"] = {name: _format_json(stored) for name, stored in quant.formats}
    return section


def _format_json(stored: RowFormat) -> dict[str, Any]:
    biases = {scales: bias for bias, scales in _BIASES.items()}
    scales = {"scales": stored.scales} if stored.tiles_only else {"bias": biases[stored.scales]}
    return {"bits": stored.bits, "group_size": stored.group_size, **scales}


def parse_quantization(section: Section, config: ModelConfig) -> QuantConfig:
    """The formats of the model `config`.

    Raises BundleError for formats that its matrices can't have, UnsupportedModelError for unknown ones.
    """
    bits = section.integer("bits", 1, 64)
    if bits not in get_args(Bits):
        raise UnsupportedModelError(f"quantisation to {bits} bits; this release reads 4, 5, 6, 8 and 16")
    section.equal("group_size", GROUP_SIZE)
    quant = QuantConfig(cast(Bits, bits))
    if "matrices" in section.names:
        quant = _with_formats(section.section("matrices"), quant, config)
    section.close()
    return quant


def _with_formats(section: Section, quant: QuantConfig, config: ModelConfig) -> QuantConfig:
    """`quant` with the formats of the key `matrices`."""
    unknown = [name for name in section.names if not _NAME.fullmatch(name)]
    if unknown:
        raise BundleError(f"{section.where} has {unknown[0]!a}, which names no matrices")
    formats: list[tuple[str, RowFormat]] = []
    for name in sorted(section.names, key=format_order):
        kind, layer, part = _parts(name)
        if not _exists(kind, layer, part, config):
            raise BundleError(f"{section.where} has {name!a}, but the model stores no such matrices")
        stored = _row_format(section.section(name))
        held = QuantConfig(quant.bits, tuple(formats)).of(kind, layer, part)
        if stored == held or quant.bits == 16:
            raise BundleError(f"{section.where}.{name} is needless: these matrices have {held.bits} bits")
        if (
            kind == "feed_forward"
            and not config.is_sliced
            and (stored.bits != quant.bits or layer is not None)
        ):
            raise BundleError(
                f"{section.where}.{name} has {stored.bits} bits; neurons with records of their own have the "
                f"model's {quant.bits}, in every layer"
            )
        if stored.tiles_only and not is_tiled(kind, config):
            raise BundleError(f"{section.where}.{name} has scales that are {stored.scales!a}; only tiles may")
        formats.append((name, stored))
    section.close()
    if not formats:
        raise BundleError(f"{section.where} is empty")
    quant = QuantConfig(quant.bits, tuple(formats))
    for name, stored in formats:
        for cols in _columns(name, config, quant) if stored.two_levels else ():
            if cols % SUPER_SIZE:
                raise BundleError(
                    f"{section.where}.{name} has two levels of scales for {cols} columns; these must "
                    f"be a multiple of {SUPER_SIZE}"
                )
    return quant


def _parts(name: str) -> tuple[MatrixKind, int | None, str]:
    """The kind, layer and part in a matrix's name, which `_NAME` matches."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return cast(MatrixKind, match[2]), None if match[1] is None else int(match[1]), match[3] or ""


def is_tiled(kind: MatrixKind, config: ModelConfig) -> bool:
    """Whether matrices of this kind are stored as tiles."""
    if kind in ("experts", "experts_down"):
        return config.experts is not None and config.experts.layout == "matrices"
    return config.is_sliced or kind not in ("feed_forward", "down")


def part_quant(quant: QuantConfig, config: ModelConfig, shift: int) -> QuantConfig:
    """The formats of a part of a model. config: the part's config. shift: index in the model of the part's
    first layer.
    """
    formats: list[tuple[str, RowFormat]] = []
    for name, stored in quant.formats:
        kind, layer, part = _parts(name)
        shifted = None if layer is None else layer - shift
        if (shifted is None or shifted >= 0) and _exists(kind, shifted, part, config):
            formats.append((matrix_name(kind, shifted, part), stored))
    return QuantConfig(quant.bits, tuple(formats))


def _exists(kind: MatrixKind, layer: int | None, part: str, config: ModelConfig) -> bool:
    """Whether the model stores matrices of this name."""
    if layer is not None and layer >= config.num_layers:
        return False
    layers = range(config.num_layers) if layer is None else (layer,)
    if part:
        return kind == "qkv" and any(part in config.projection_sizes(config.layers[it]) for it in layers)
    match kind:
        case "head":
            return layer is None and not config.tie_embeddings
        case "embedding":
            return layer is None
        case "down":
            return config.is_sliced and any(config.records[it] for it in layers)
        case "experts" | "experts_down":
            return is_tiled(kind, config) and any(it in config.expert_layers for it in layers)
    return True


def _columns(name: str, config: ModelConfig, quant: QuantConfig) -> set[int]:
    """The numbers of columns that matrices of this name have, in those layers that use two levels of
    scales.
    """
    kind, layer, _ = _parts(name)
    match kind:
        case "down":
            return {slice_neurons(config, quant)}
        case "experts_down":
            assert config.experts is not None
            return {config.experts.neurons}
        case "out":
            layers = range(config.num_layers) if layer is None else (layer,)
            tiled = (it for it in layers if quant.of("out", it).two_levels)
            return {config.out_cols(config.layers[it]) for it in tiled}
        case "head" | "embedding":
            return {config.embedding_size}
    return {config.hidden_size}


def _row_format(section: Section) -> RowFormat:
    bits, group_size = section.integer("bits", 1, 64), section.integer("group_size", 1, 1 << 31)
    key = "scales" if "scales" in section.names else "bias"
    value = section.text(key, 32)
    section.close()
    if key == "scales":
        stored = next((it for it in TILE_FORMATS if it == (bits, group_size, value)), None)
        if stored is None:
            raise UnsupportedModelError(
                f"{section.where} asks for {bits} bits, groups of {group_size} and scales that are "
                f"{value!a}; this release reads "
                f"{', '.join(f'{it.bits}/{it.group_size}/{it.scales}' for it in TILE_FORMATS)}"
            )
        return stored
    if bits not in (4, 5, 6, 8) or group_size not in (32, 64) or value not in _BIASES:
        raise UnsupportedModelError(
            f"{section.where} asks for {bits} bits, groups of {group_size} and a bias that is {value!a}; "
            "this release reads 4, 5, 6 and 8 bits, groups of 32 and 64, and biases that are stored, "
            "implied or, in MXFP4, none"
        )
    stored = RowFormat(cast(Bits, bits), cast(GroupSize, group_size), _BIASES[value])
    if stored.implied_bias and stored.group_size == GROUP_SIZE:
        raise BundleError(f"{section.where} implies biases of groups of 64; only groups of 32 may")
    if stored.mxfp4 and stored != MXFP4:
        raise BundleError(
            f"{section.where} has no biases; that means MXFP4, which has 4 bits and groups of 32"
        )
    return stored
