"""The parts of weights from which selectors of neurons are loaded: gates, or predictors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ondevice.backends.base import Backend, Float32, Selector
from ondevice.bundle.gates import GateDigest
from ondevice.bundle.layout import RecordLayout, gate_bias_name
from ondevice.bundle.predictors import PREDICTORS, OperatingPoint
from ondevice.bundle.reader import Bundle
from ondevice.config import RowFormat, Sparsity
from ondevice.flash.reader import FlashReader
from ondevice.model.parts import MatrixPart, Part
from ondevice.model.records import FIRST_NEURON_FILE, first_expert_file, record_rows
from ondevice.model.tensor_file import TaskResults, TensorFile
from ondevice.model_config import FeedForwardSpec, ModelConfig
from ondevice.records import dataclass


def selector_parts(
    bundle: Bundle,
    reader: FlashReader,
    resident: TensorFile,
    sparsity: Sparsity,
    point: OperatingPoint | None,
) -> list[SelectorParts]:
    """For each layer, the parts to load for its selector; empty for layers without a feed-forward."""
    config, layers = bundle.config, range(bundle.config.num_layers)
    index = first_expert_file(config) + len(config.expert_layers)

    def gates(layer: int, file: int, layout: RecordLayout, digest: GateDigest | None = None) -> MatrixPart:
        bias = partial(resident.vector, gate_bias_name(layer)) if config.feed_forward.bias else None
        return _gate_part(bundle, reader, layer, file, layout, bias, digest)

    if sparsity == "exact" and not config.zeros_gates:
        # Activated gates of layers without a cutoff are hardly ever zero.
        parts = [
            SelectorParts(
                (gates(layer, FIRST_NEURON_FILE + layer, bundle.record_layout),),
                deviations=spec.feed_forward.cutoff,
                activated=spec.feed_forward if spec.feed_forward.cutoff is None else None,
            )
            for layer, spec in enumerate(config.layers)
        ]
    elif sparsity == "exact":
        parts = [
            SelectorParts(
                (gates(layer, index + layer, bundle.gate_layout, GateDigest(bundle, layer)),),
                min_gate=config.feed_forward.threshold,
            )
            for layer in layers
        ]
    elif sparsity == "predicted" and point is not None and bundle.predictors is not None:
        file = TensorFile(bundle, reader, bundle.sidecar_file(PREDICTORS), index)
        stored = RowFormat(bundle.predictors.bits)
        parts = [
            SelectorParts(_predictor_parts(config, file, stored, layer, rank, offset), predicted=True)
            for layer, (rank, offset) in enumerate(zip(bundle.predictors.ranks, point.offsets, strict=True))
        ]
    else:
        parts = [SelectorParts()] * config.num_layers
    return [
        selector if spec.has_feed_forward else SelectorParts()
        for spec, selector in zip(config.layers, parts, strict=True)
    ]


def _predictor_parts(
    config: ModelConfig, file: TensorFile, stored: RowFormat, layer: int, rank: int, offset: float
) -> tuple[MatrixPart, ...]:
    down, up = f"layers.{layer}.down", f"layers.{layer}.up"

    def bias() -> Float32:
        return file.vector(f"layers.{layer}.bias") + np.float32(offset)

    return (
        MatrixPart("down", rank, config.hidden_size, stored, partial(file.rows, down, stored)),
        MatrixPart("up", config.widths[layer], rank, stored, partial(file.rows, up, stored), bias),
    )


def cutoff_gates(bundle: Bundle, reader: FlashReader, layer: int, sparsity: Sparsity) -> list[Part]:
    """The part to load for the gates of a layer with a cutoff, which needs all of a token's gates; empty for
    others.

    In mode `exact` it is part of the layer's selector.
    """
    if bundle.config.layers[layer].feed_forward.cutoff is None or sparsity == "exact":
        return []
    return [_gate_part(bundle, reader, layer, FIRST_NEURON_FILE + layer, bundle.record_layout, None, None)]


def _gate_part(
    bundle: Bundle,
    reader: FlashReader,
    layer: int,
    file: int,
    layout: RecordLayout,
    bias: Callable[[], Float32] | None,
    digest: GateDigest | None,
) -> MatrixPart:
    """The part to load for one layer's gate projection: the first row of each record of `file`."""
    config = bundle.config
    rows = partial(record_rows, reader, file, layout, digest=digest)
    # Complete records are read; a neuron's record has more rows.
    return MatrixPart(
        "gate",
        config.widths[layer],
        config.hidden_size,
        bundle.quant.of("feed_forward"),
        rows,
        bias,
        read_bytes=layout.stride,
    )


@dataclass(frozen=True)
class SelectorParts:
    """The parts to load for one layer's `Selector`, and its other fields. Matrices are in the order of
    multiplication.
    """

    matrices: tuple[MatrixPart, ...] = ()
    predicted: bool = False
    min_gate: float = 0.0
    deviations: float | None = None
    activated: FeedForwardSpec | None = None

    def load(self, backend: Backend, ahead: TaskResults) -> Selector | None:
        """The loaded selector; None if every neuron is multiplied."""
        if not self.matrices:
            return None
        matrices = tuple(matrix.load(backend, ahead) for matrix in self.matrices)
        return Selector(matrices, self.predicted, self.min_gate, self.deviations, self.activated)
