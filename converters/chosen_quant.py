"""The quantisation that `--quant auto` stands for: a quantised checkpoint's own, so that codes are copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import get_args

from ondevice.config import MATRIX_KINDS, MXFP4, Bits, MatrixKind, QuantConfig, RowFormat
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.base import Checkpoint, SourceTensor
from ondevice.converters.reading import EXPERT_KINDS, matrix_kind, resident_sources


def chosen_quant(checkpoint: Checkpoint) -> QuantConfig:
    """The quantisation that `auto` stands for: the bits of most quantised weights' codes, else q4.

    Each kind of matrix is stored in the format that holds its codes, if it holds those of at least half of
    its weights; the others are rounded to it. Experts whose matrices are of one type, all of a kind, are
    stored exactly where tiles hold that type.
    """
    bits = _chosen_bits(checkpoint.tensors.values(), 4)
    formats: list[tuple[MatrixKind, RowFormat]] = []
    for kind, tensors in _matrices(checkpoint).items():
        stored = _tile_format(tensors) if kind in EXPERT_KINDS.values() else None
        if stored is None:
            as_neurons = kind == "feed_forward" and not checkpoint.config.is_sliced
            stored = _chosen_format(tensors, bits if as_neurons else _chosen_bits(tensors, bits))
        if stored != RowFormat(bits):
            formats.append((kind, stored))
    return QuantConfig(bits, tuple(formats))


def _matrices(checkpoint: Checkpoint) -> dict[MatrixKind, list[SourceTensor]]:
    """The checkpoint's matrices by kind, but for down projections of neurons with records of their own."""
    found: dict[MatrixKind, list[SourceTensor]] = {kind: [] for kind in MATRIX_KINDS}
    for name, sources in resident_sources(checkpoint):
        kind = matrix_kind(name)
        if kind is not None and len(sources[0].shape) == 2:
            found[kind] += sources
    found["embedding"].append(checkpoint.tensors[names.EMBEDDING])
    for layer, spec in enumerate(checkpoint.config.layers):
        own = names.LayerNames(layer)
        *by_rows, down = own.neurons(spec) if checkpoint.config.records[layer] else ("",)
        found["feed_forward"] += [checkpoint.tensors[row] for row in by_rows]
        if checkpoint.config.is_sliced and by_rows:
            found["down"].append(checkpoint.tensors[down])
        if layer in checkpoint.config.expert_layers and spec.experts is not None:
            for expert in range(spec.experts.count):
                for which in names.expert_matrices(spec):
                    found[EXPERT_KINDS[which]].append(checkpoint.tensors[own.expert(expert, which)])
    return found


def _chosen_bits(tensors: Iterable[SourceTensor], otherwise: Bits) -> Bits:
    """The bits that hold the codes of most quantised weights; `otherwise` where none has codes."""
    weights: Counter[Bits] = Counter()
    for tensor in tensors:
        if tensor.code_bits:
            weights[next(bits for bits in get_args(Bits) if bits >= tensor.code_bits)] += prod(tensor.shape)
    return max(weights, key=lambda bits: (weights[bits], -bits), default=otherwise)


def _tile_format(tensors: Sequence[SourceTensor]) -> RowFormat | None:
    """The format of tiles alone that holds every value of these matrices, or None."""
    formats = {tensor.tile_format for tensor in tensors}
    stored = formats.pop() if len(formats) == 1 else None
    return stored if stored is not None and stored.tiles_only else None


def _chosen_format(tensors: Sequence[SourceTensor], bits: Bits) -> RowFormat:
    """The format of matrices at `bits` bits: that of most of their weights' codes, if it is one.

    MXFP4 is that of all or of none, as nothing is rounded to it.
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
    implied = len(held) == len(tensors) and all(own.implied_bias for _, own in held)
    return RowFormat(bits, min(own.group_size for _, own in held), "symmetric" if implied else "affine")
