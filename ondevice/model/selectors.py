"""The parts of what selects neurons: gates, or predictors."""

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
from ondevice.model.tensor_file import ReadAhead, TensorFile
from ondevice.model_config import FeedForwardSpec, ModelConfig
from ondevice.records import dataclass


def selector_parts(
    bundle: Bundle,
    reader: FlashReader,
    resident: TensorFile,
    sparsity: Sparsity,
    point: OperatingPoint | None,
) -> list[SelectorParts]:
    """The parts of every layer's selector; none where there is no feed-forward."""
    config, layers = bundle.config, range(bundle.config.num_layers)
    index = first_expert_file(config) + len(config.expert_layers)

    def gates(layer: int, file: int, layout: RecordLayout, digest: GateDigest | None = None) -> MatrixPart:
        bias = partial(resident.vector, gate_bias_name(layer)) if config.feed_forward.bias else None
        return _gate_part(bundle, reader, layer, file, layout, bias, digest)

    if sparsity == "exact" and not config.zeros_gates:
        # Gates of layers without a cutoff are hardly ever zero when they are activated.
        found = [
            SelectorParts(
                (gates(layer, FIRST_NEURON_FILE + layer, bundle.record_layout),),
                deviations=spec.feed_forward.cutoff,
                activated=spec.feed_forward if spec.feed_forward.cutoff is None else None,
            )
            for layer, spec in enumerate(config.layers)
        ]
    elif sparsity == "exact":
        found = [
            SelectorParts(
                (gates(layer, index + layer, bundle.gate_layout, GateDigest(bundle, layer)),),
                least_gate=config.feed_forward.threshold,
            )
            for layer in layers
        ]
    elif sparsity == "predicted" and point is not None and bundle.predictors is not None:
        file = TensorFile(bundle, reader, bundle.sidecar_file(PREDICTORS), index)
        stored = RowFormat(bundle.predictors.bits)
        found = [
            SelectorParts(_predictor_parts(config, file, stored, layer, rank, offset), predicted=True)
            for layer, (rank, offset) in enumerate(zip(bundle.predictors.ranks, point.offsets, strict=True))
        ]
    else:
        found = [SelectorParts()] * config.num_layers
    return [
        its if spec.has_feed_forward else SelectorParts()
        for spec, its in zip(config.layers, found, strict=True)
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
    """The gate projection of a layer whose cutoff is made of all of a token's gates; else nothing.

    In mode `exact` the layer's selector has it.
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
    """One layer's gate projection: the first row of each record of `file`."""
    config = bundle.config
    rows = partial(record_rows, reader, file, layout, digest=digest)
    # Whole records are read; a neuron's record has more rows.
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
    """The parts of one layer's `Selector`: its matrices in the order of multiplication. Fields as there."""

    matrices: tuple[MatrixPart, ...] = ()
    predicted: bool = False
    least_gate: float = 0.0
    deviations: float | None = None
    activated: FeedForwardSpec | None = None

    def load(self, backend: Backend, ahead: ReadAhead) -> Selector | None:
        """The loaded selector; None if every neuron is multiplied."""
        if not self.matrices:
            return None
        matrices = tuple(matrix.load(backend, ahead) for matrix in self.matrices)
        return Selector(matrices, self.predicted, self.least_gate, self.deviations, self.activated)
