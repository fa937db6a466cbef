"""Chooses the quantisation for `--quant auto`: the formats of a quantised checkpoint, so that its codes are
copied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import get_args

from ondevice.bundle.layout import slice_unit
from ondevice.bundle.quantization_section import is_tiled
from ondevice.config import (
    MATRIX_KINDS,
    MXFP4,
    SUPER_SIZE,
    Bits,
    MatrixKind,
    QuantConfig,
    RowFormat,
    format_order,
    matrix_name,
)
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.base import Checkpoint, SourceTensor
from ondevice.converters.reading import EXPERT_KINDS, matrix_kind, resident_sources
from ondevice.model_config import ModelConfig

Place = tuple[MatrixKind, int | None, str]
"""A kind of matrix, its layer (None: every layer) and its part of a projection (empty: no part)."""


def chosen_quant(checkpoint: Checkpoint) -> QuantConfig:
    """The quantisation for `--quant auto`: the number of bits that most quantised weights have; q4 if none is
    quantised.

    Matrices that are stored as tiles are copied exactly, if those of a layer have one format and tiles can
    have it. Other matrices get the format that can hold the codes of at least half of their weights, and the
    remaining ones are rounded to it. Matrices that aren't stored as tiles have one format for each kind. A
    checkpoint that consists only of a config.json is planned as q4.
    """
    if not checkpoint.tensors:
        return QuantConfig(4)
    config, bits = checkpoint.config, _chosen_bits(checkpoint.tensors.values(), 4)
    tensors: dict[Place, list[SourceTensor]] = defaultdict(list)
    for kind, layer, part, tensor in _matrices(checkpoint):
        tensors[kind, layer if is_tiled(kind, config) else None, part].append(tensor)
    formats: dict[Place, RowFormat] = {}
    for (kind, layer, part), of_place in tensors.items():
        stored = _exact_format(of_place, kind, config) if is_tiled(kind, config) else None
        if stored is None:
            as_neurons = kind == "feed_forward" and not config.is_sliced
            stored = _chosen_format(of_place, bits if as_neurons else _chosen_bits(of_place, bits))
        formats[kind, layer, part] = stored
    return QuantConfig(bits, _by_name(formats, tensors, RowFormat(bits)))


def _by_name(
    formats: Mapping[Place, RowFormat], tensors: Mapping[Place, Sequence[SourceTensor]], plain: RowFormat
) -> tuple[tuple[str, RowFormat], ...]:
    """The value of `QuantConfig.formats`: each kind's most common format, then those of parts and layers that
    differ.
    """
    named: dict[str, RowFormat] = {}
    for kind in MATRIX_KINDS:
        of_kind = {place: stored for place, stored in formats.items() if place[0] == kind}
        if not of_kind:
            continue
        common = _common(of_kind, tensors)
        if common != plain:
            named[matrix_name(kind)] = common
        for part in dict.fromkeys(part for _, _, part in of_kind):
            of_part = {place: stored for place, stored in of_kind.items() if place[2] == part}
            most = _common(of_part, tensors) if part else common
            if most != common:
                named[matrix_name(kind, None, part)] = most
            for place, stored in of_part.items():
                if stored != most:
                    named[matrix_name(*place)] = stored
    return tuple((name, named[name]) for name in sorted(named, key=format_order))


def _common(formats: Mapping[Place, RowFormat], tensors: Mapping[Place, Sequence[SourceTensor]]) -> RowFormat:
    """The format that most weights have."""
    weights: Counter[RowFormat] = Counter()
    for place, stored in formats.items():
        weights[stored] += sum(prod(tensor.shape) for tensor in tensors[place])
    return max(weights, key=lambda stored: (weights[stored], stored))


def _matrices(checkpoint: Checkpoint) -> Iterator[tuple[MatrixKind, int | None, str, SourceTensor]]:
    """Yields the checkpoint's matrices, each with its kind, layer and part.

    Down projections of neurons that are stored as records are left out.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    for name, sources in resident_sources(checkpoint):
        kind = matrix_kind(name)
        if kind is not None and len(sources[0].shape) == 2:
            layer = int(name.split(".")[1]) if name.startswith("layers.") else None
            part = name.split(".")[-1] if kind == "qkv" else ""
            yield from ((kind, layer, part, source) for source in sources)
    yield "embedding", None, "", tensors[names.EMBEDDING]
    for layer, spec in enumerate(config.layers):
        of_layer = names.LayerNames(layer)
        *by_rows, down = of_layer.neurons(spec) if config.records[layer] else ("",)
        yield from (("feed_forward", layer, "", tensors[row]) for row in by_rows)
        if config.is_sliced and by_rows:
            yield "down", layer, "", tensors[down]
        if layer in config.expert_layers and spec.experts is not None:
            for expert in range(spec.experts.count):
                for which in names.expert_matrices(spec):
                    yield EXPERT_KINDS[which], layer, "", tensors[of_layer.expert(expert, which)]


def _chosen_bits(tensors: Iterable[SourceTensor], otherwise: Bits) -> Bits:
    """The number of bits that can hold the codes of most quantised weights; `otherwise` if none has codes."""
    weights: Counter[Bits] = Counter()
    for tensor in tensors:
        if tensor.code_bits:
            weights[next(bits for bits in get_args(Bits) if bits >= tensor.code_bits)] += prod(tensor.shape)
    return max(weights, key=lambda bits: (weights[bits], -bits), default=otherwise)


def _exact_format(tensors: Sequence[SourceTensor], kind: MatrixKind, config: ModelConfig) -> RowFormat | None:
    """The tile format that holds every value of these matrices exactly, or None."""
    formats = {tensor.tile_format for tensor in tensors}
    stored = formats.pop() if len(formats) == 1 else None
    if stored is not None and stored.two_levels and kind == "down" and slice_unit(config) % SUPER_SIZE:
        return None
    return stored


def _chosen_format(tensors: Sequence[SourceTensor], bits: Bits) -> RowFormat:
    """The format of matrices with `bits` bits: the one that the codes of most of their weights have, if any.

    MXFP4 is chosen only if all of them have it, because nothing is rounded to it.
    """
    if tensors and bits == MXFP4.bits and all(tensor.code_format == MXFP4 for tensor in tensors):
        return MXFP4
    held = [
        (prod(tensor.shape), tensor.code_format)
        for tensor in tensors
        if tensor.code_format not in (None, MXFP4) and tensor.code_format.bits <= bits
    ]
    if not held or 2 * sum(count for count, _ in held) < sum(prod(tensor.shape) for tensor in tensors):
        return RowFormat(bits)
    implied = len(held) == len(tensors) and all(stored.implied_bias for _, stored in held)
    return RowFormat(bits, min(stored.group_size for _, stored in held), "symmetric" if implied else "affine")
