"""Loads weights from a bundle on flash into a backend, in bounded pieces.

All reads go through the flash reader, which checks every byte that it returns; no whole matrix is ever held
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from ondevice.backends.base import (
    Array,
    Backend,
    Biases,
    Bytes,
    Cutoff,
    Embedding,
    FeedForward,
    Float32,
    HeadNorms,
    Int32,
    Norm,
    RowChunk,
    Selector,
)
from ondevice.bundle.gates import GateDigest
from ondevice.bundle.layout import (
    DATA_OFFSET,
    PER_LAYER,
    POSITIONS,
    RESIDENT,
    RecordLayout,
    RowLayout,
    gate_bias_name,
)
from ondevice.bundle.predictors import PREDICTORS, OperatingPoint
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.bundle.streams import STREAMS
from ondevice.bundle.thresholds import THRESHOLDS, ThresholdPoint, importance_name
from ondevice.bundle.weight_shapes import WeightShape, layer_weight_shapes, model_weight_shapes
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import QuantConfig, RowFormat, Sparsity
from ondevice.flash.reader import FlashReader
from ondevice.kernels import memory
from ondevice.model.parts import MatrixPart, Part, VectorPart, part_tasks
from ondevice.model.tensor_file import ReadAhead, TensorFile
from ondevice.model.weights import (
    CopiesOfLayer,
    CopiesOfModel,
    Laurel,
    LayerWeights,
    ModelWeights,
    PerLayerBlock,
    PerLayerInputs,
)
from ondevice.model_config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig

# Indices of files in the flash reader.
RESIDENT_FILE = 0
EMBEDDING_FILE = 1
FIRST_NEURON_FILE = 2


def bundle_files(bundle: Bundle, sparsity: Sparsity = "dense", streams: bool = False) -> list[CheckedFile]:
    """The files to open a FlashReader with, in the order of the indices that sources use.

    The file of per-layer inputs comes after those of neurons. Then come the files that select neurons: gate
    rows for `exact` where activations zero them, predictors for `predicted`, thresholds for `threshold`. With
    `streams`, the adapters' file comes last. Raises BundleError if the bundle lacks one of them.
    """
    layers = range(bundle.config.num_layers)
    files = [bundle.file(RESIDENT), bundle.embedding_file, *(bundle.neuron_file(layer) for layer in layers)]
    if bundle.config.per_layer_width:
        files.append(bundle.file(PER_LAYER))
    if sparsity == "exact" and bundle.config.zeros_gates:
        files += [bundle.gate_file(layer) for layer in layers]
    elif sparsity == "predicted":
        files.append(bundle.added_file(PREDICTORS))
    elif sparsity == "threshold":
        files.append(bundle.added_file(THRESHOLDS))
    if streams:
        files.append(bundle.added_file(STREAMS))
    return files


def load_weights(
    bundle: Bundle,
    reader: FlashReader,
    backend: Backend,
    cancelled: IsCancelled = never_cancelled,
    sparsity: Sparsity = "dense",
    point: OperatingPoint | ThresholdPoint | None = None,
) -> ModelWeights:
    """Load a whole model into `backend` from `reader`, opened over `bundle_files(bundle, sparsity)`.

    Raises FlashReadError if bytes don't match their checksum, BundleError if they can't be weights, Cancelled
    if `cancelled()` holds between two pieces, and the backend's error if memory runs out.

    Args:
        bundle: the model's bundle.
        reader: opened over the bundle's files.
        backend: loads and holds the weights.
        cancelled: asked between two pieces.
        sparsity: how the neurons to multiply are selected: all are (`dense`), by their gates (`exact`), by
            predictors (`predicted`) or by gate thresholds (`threshold`).
        point: the operating point of `predicted` or `threshold`.
    """
    config = bundle.config
    resident = TensorFile(bundle, reader, bundle.file(RESIDENT), RESIDENT_FILE)
    embedding = embedding_records(bundle, reader)
    layers = [
        [
            *layer_parts(config, bundle.quant, resident, layer),
            *_cutoff_gates(bundle, reader, layer, sparsity),
        ]
        for layer in range(config.num_layers)
    ]
    final_norm = norm_parts(config, resident, "final_norm") if config.final_norm else []
    head = head_part(bundle, resident, embedding)
    selectors = _selector_parts(bundle, reader, resident, sparsity, point)
    positions = position_parts(config, resident)
    extra = model_weight_parts(bundle, resident)
    order: list[Part] = [*positions]
    for parts, selector in zip(layers, selectors, strict=True):
        order += [*parts, *selector.parts]
    order += [*extra, *final_norm, head]

    with ReadAhead(part_tasks(order, cancelled)) as ahead:
        table = loaded_positions(config, {part.field: part.load(backend, ahead) for part in positions})
        loaded_layers = []
        for layer, (parts, selector) in enumerate(zip(layers, selectors, strict=True)):
            loaded = {part.field: part.load(backend, ahead) for part in parts}
            records, chosen = NeuronRecords(bundle, reader, layer), selector.load(backend, ahead)
            gates = loaded.get("gate") if chosen is None else chosen.cut_gates
            biases = feed_forward_biases(loaded)
            neurons = backend.load_feed_forward(layer, records, chosen, biases, gates)
            loaded_layers.append(layer_weights(backend, config, config.layers[layer], loaded, neurons))
        others = {part.field: part.load(backend, ahead) for part in extra}
        last = {part.field: part.load(backend, ahead) for part in final_norm}
        loaded_head = head.load(backend, ahead)
    norm = loaded_norm(config, last, "final_norm") if config.final_norm else None
    rows = None
    if config.per_layer_width:
        rows = backend.load_embedding(per_layer_records(bundle, reader), offloaded=True)
    loaded_table = backend.load_embedding(embedding)
    blocks = _other_blocks_of_model(config, others, rows)
    return ModelWeights(loaded_table, loaded_layers, norm, loaded_head, table, **blocks)


def _other_blocks_of_model(config: ModelConfig, own: Mapping[str, Any], rows: Embedding) -> dict[str, Any]:
    """The fields of ModelWeights that few models have, of weights by name. rows: of per-layer inputs."""
    found: dict[str, Any] = {name: own.get(name) for name in ("project_in", "project_out")}
    if config.per_layer_width:
        norm = _weight_norm(config, own, "per_layer")
        found["per_layer"] = PerLayerInputs(rows, own["per_layer.projection"], norm)
    if config.residual_copies > 1:
        spread, gather = (
            [own[f"copies.{name}.{copy}"] for copy in range(1, config.residual_copies)]
            for name in ("spread", "gather")
        )
        found["copies"] = CopiesOfModel(spread, gather)
    return found


def layer_weights(
    backend: Backend,
    config: ModelConfig,
    spec: LayerSpec,
    loaded: Mapping[str, Any],
    feed_forward: FeedForward,
) -> LayerWeights:
    """The weights of the layer `spec` of what `layer_parts` loaded, by field, and its neurons."""

    def norm(field: str) -> Norm | None:
        return loaded_norm(config, loaded, field) if field in loaded else None

    norms = head_norms(spec.attention, config.norm.eps, loaded)
    if norms is not None and spec.attention.value_norm and norms.k is not None:
        ones = backend.load_vector(np.ones(config.heads(spec.attention).width, dtype=np.float32))
        norms = norms._replace(v=Norm(ones, config.norm.eps))
    own = {weight.name: loaded[weight.name] for weight in layer_weight_shapes(config, spec)}
    return LayerWeights(
        attention_norm=norm("attention_norm"),
        qkv=loaded["qkv"],
        head_norms=norms,
        out=loaded["out"],
        attention_output_norm=norm("attention_output_norm"),
        feed_forward_norm=norm("feed_forward_norm"),
        feed_forward=feed_forward,
        feed_forward_output_norm=norm("feed_forward_output_norm"),
        **_other_blocks(config, own),
    )


def _other_blocks(config: ModelConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of LayerWeights that few models have, of a layer's own weights by name."""
    found: dict[str, Any] = {}
    if "laurel.down" in own:
        found["laurel"] = Laurel(own["laurel.down"], own["laurel.up"], _weight_norm(config, own, "laurel"))
    if "copies.router" in own:
        shape, count = (-1, config.hidden_size), config.residual_copies
        found["copies"] = CopiesOfLayer(
            _weight_norm(config, own, "copies"),
            own["copies.router"].reshape(shape),
            own["copies.predict"].reshape(-1, count),
            own["copies.correct"].reshape(-1, count),
            own["copies.scale"],
        )
    if "per_layer.gate" in own:
        norm = _weight_norm(config, own, "per_layer")
        found["per_layer"] = PerLayerBlock(own["per_layer.gate"], own["per_layer.out"], norm)
    found["scale"] = own.get("scale")
    return found


def _weight_norm(config: ModelConfig, loaded: Mapping[str, Any], block: str) -> Norm:
    return Norm(loaded[f"{block}.norm.weight"], config.norm.eps)


def head_norms(spec: AttentionSpec, eps: float, loaded: Mapping[str, Any]) -> HeadNorms | None:
    """The norms of queries and keys of loaded vectors: q_norm, k_norm, and the same with `_bias`."""
    if spec.head_norm == "none":
        return None
    q, k = (
        Norm(loaded[which], eps, loaded.get(f"{which}_bias"), spec.head_norm == "layer")
        if which in loaded
        else None
        for which in ("q_norm", "k_norm")
    )
    assert q is not None
    return HeadNorms(q, k, spec.head_norm == "projection")


def position_parts(config: ModelConfig, resident: TensorFile) -> list[Part]:
    """The part of learned positions, if the model has them."""
    return [VectorPart(POSITIONS, partial(resident.vector, POSITIONS))] if config.learned_positions else []


def loaded_positions(config: ModelConfig, loaded: Mapping[str, Any]) -> Array | None:
    """`ModelWeights.positions` of what `position_parts` loaded, by field."""
    if not config.learned_positions:
        return None
    return loaded[POSITIONS].reshape(config.max_context, config.hidden_size)


def feed_forward_biases(loaded: Mapping[str, Any]) -> Biases:
    """The biases of a layer's feed-forward of what `layer_parts` loaded, by field."""
    return Biases(loaded.get("gate_bias"), loaded.get("down_bias"))


def loaded_norm(config: ModelConfig, loaded: Mapping[str, Any], field: str) -> Norm:
    """The norm of what `norm_parts` loaded, by field."""
    norm = config.norm
    return Norm(loaded[field], norm.eps, loaded.get(f"{field}_bias"), norm.kind == "layer")


def layer_parts(config: ModelConfig, quant: QuantConfig, resident: TensorFile, layer: int) -> list[Part]:
    """The parts of one layer's LayerWeights that are in the resident file, in the file's order."""
    prefix = f"layers.{layer}"
    spec = config.layers[layer]
    attention, feed_forward = spec.attention, spec.feed_forward

    def matrix(field: Literal["qkv", "out"], rows: int, cols: int, has_bias: bool) -> list[Part]:
        name, stored = f"{prefix}.attention.{field}", quant.of(field)
        bias = partial(resident.vector, f"{name}.bias") if has_bias else None
        return [MatrixPart(field, rows, cols, stored, partial(resident.rows, name, stored), bias)]

    def norm(field: str, exists: bool) -> list[Part]:
        return norm_parts(config, resident, f"{prefix}.{field}") if exists else []

    def vector(field: str, name: str, exists: bool) -> list[Part]:
        return [VectorPart(field, partial(resident.vector, f"{prefix}.{name}"))] if exists else []

    def head_norm(which: str, exists: bool) -> list[Part]:
        name = f"attention.{which}"
        bias = vector(f"{which}_bias", f"{name}.bias", exists and attention.head_norm_bias)
        return [*vector(which, f"{name}.weight", exists), *bias]

    others = [
        part
        for weight in layer_weight_shapes(config, spec)
        for part in _weight_parts(resident, quant.down, f"{prefix}.", weight)
    ]

    return [
        *norm("attention_norm", spec.norms_input),
        *matrix("qkv", config.qkv_rows(spec), config.hidden_size, attention.bias),
        *head_norm("q_norm", attention.has_norms),
        *head_norm("k_norm", attention.has_norms and attention.keys_of is None),
        *matrix("out", config.hidden_size, config.out_cols(spec), attention.output_bias),
        *norm("attention_output_norm", spec.norms_output),
        *norm("feed_forward_norm", spec.norms_input),
        *vector("gate_bias", "feed_forward.gate.bias", feed_forward.bias),
        *vector("down_bias", "feed_forward.down.bias", feed_forward.output_bias),
        *norm("feed_forward_output_norm", spec.norms_output),
        *others,
    ]


def _cutoff_gates(bundle: Bundle, reader: FlashReader, layer: int, sparsity: Sparsity) -> list[Part]:
    """The gate projection of a layer whose cutoff is made of all of a token's gates; else nothing.

    In mode `exact` the layer's selector has it.
    """
    if bundle.config.layers[layer].feed_forward.cutoff is None or sparsity == "exact":
        return []
    return [_gate_part(bundle, reader, FIRST_NEURON_FILE + layer, bundle.neuron_layout, None, None)]


def model_weight_parts(bundle: Bundle, resident: TensorFile) -> list[Part]:
    """The parts of `model_weight_shapes`, whose fields are the names there."""
    return [
        part
        for weight in model_weight_shapes(bundle.config)
        for part in _weight_parts(resident, bundle.quant.down, "", weight)
    ]


def _weight_parts(resident: TensorFile, stored: RowFormat, prefix: str, weight: WeightShape) -> list[Part]:
    name = f"{prefix}{weight.name}"
    if not weight.quantised:
        return [VectorPart(weight.name, partial(resident.vector, name))]
    rows, cols = weight.shape
    return [MatrixPart(weight.name, rows, cols, stored, partial(resident.rows, name, stored))]


def norm_parts(config: ModelConfig, resident: TensorFile, name: str) -> list[Part]:
    """The parts of the norm `name`, whose fields are the last word of that, and the same with `_bias`."""
    field = name.split(".")[-1]
    weight = VectorPart(field, partial(resident.vector, f"{name}.weight"))
    if not config.norm.bias:
        return [weight]
    return [weight, VectorPart(f"{field}_bias", partial(resident.vector, f"{name}.bias"))]


def head_part(bundle: Bundle, resident: TensorFile, embedding: EmbeddingRecords) -> MatrixPart:
    """The output head: in the resident file, or the embedding's records where they are tied."""
    config = bundle.config
    stored = bundle.quant.head(config.tie_embeddings)
    rows = embedding.rows if config.tie_embeddings else partial(resident.rows, "head", stored)
    bias = partial(resident.vector, "head.bias") if config.head_bias else None
    return MatrixPart("head", config.vocab_size, config.embedding_size, stored, rows, bias)


def _selector_parts(
    bundle: Bundle,
    reader: FlashReader,
    resident: TensorFile,
    sparsity: Sparsity,
    point: OperatingPoint | ThresholdPoint | None,
) -> list[_SelectorParts]:
    """The parts of every layer's selector."""
    config, layers = bundle.config, range(bundle.config.num_layers)
    index = FIRST_NEURON_FILE + config.num_layers + (config.per_layer_width > 0)

    def gates(layer: int, file: int, layout: RecordLayout, digest: GateDigest | None = None) -> MatrixPart:
        bias = partial(resident.vector, gate_bias_name(layer)) if config.feed_forward.bias else None
        return _gate_part(bundle, reader, file, layout, bias, digest)

    if sparsity == "exact" and not config.zeros_gates:
        return [
            _cutoff_selector(gates(layer, FIRST_NEURON_FILE + layer, bundle.neuron_layout), config, spec)
            for layer, spec in enumerate(config.layers)
        ]
    if sparsity == "exact":
        return [
            _SelectorParts(
                (gates(layer, index + layer, bundle.gate_layout, GateDigest(bundle, layer)),),
                least_gate=config.feed_forward.threshold,
            )
            for layer in layers
        ]
    if sparsity == "predicted" and isinstance(point, OperatingPoint) and bundle.predictors is not None:
        file = TensorFile(bundle, reader, bundle.added_file(PREDICTORS), index)
        stored = RowFormat(bundle.predictors.bits)
        return [
            _SelectorParts(_predictor_parts(config, file, stored, layer, rank, offset), predicted=True)
            for layer, (rank, offset) in enumerate(zip(bundle.predictors.ranks, point.offsets, strict=True))
        ]
    if sparsity == "threshold" and isinstance(point, ThresholdPoint):
        file = TensorFile(bundle, reader, bundle.added_file(THRESHOLDS), index)
        return [
            _SelectorParts(
                (gates(layer, FIRST_NEURON_FILE + layer, bundle.neuron_layout),),
                cutoff=_CutoffPart(
                    partial(file.vector, importance_name(layer)), threshold, config.feed_forward
                ),
            )
            for layer, threshold in enumerate(point.thresholds)
        ]
    return [_SelectorParts()] * config.num_layers


def _cutoff_selector(gates: MatrixPart, config: ModelConfig, layer: LayerSpec) -> _SelectorParts:
    """What selects the neurons of a layer of which exact zeros are those of a cutoff, if it has one.

    Without, nearly every neuron is selected: those whose activated gate isn't zero.
    """
    spec = layer.feed_forward
    if spec.cutoff is not None:
        return _SelectorParts((gates,), deviations=spec.cutoff)

    def ones() -> Float32:
        return np.ones(config.intermediate_size, dtype=np.float32)

    return _SelectorParts((gates,), cutoff=_CutoffPart(ones, 0.0, spec))


def _predictor_parts(
    config: ModelConfig, file: TensorFile, stored: RowFormat, layer: int, rank: int, offset: float
) -> tuple[MatrixPart, ...]:
    down, up = f"layers.{layer}.down", f"layers.{layer}.up"

    def bias() -> Float32:
        return file.vector(f"layers.{layer}.bias") + np.float32(offset)

    return (
        MatrixPart("down", rank, config.hidden_size, stored, partial(file.rows, down, stored)),
        MatrixPart("up", config.intermediate_size, rank, stored, partial(file.rows, up, stored), bias),
    )


def _gate_part(
    bundle: Bundle,
    reader: FlashReader,
    file: int,
    layout: RecordLayout,
    bias: Callable[[], Float32] | None,
    digest: GateDigest | None,
) -> MatrixPart:
    """One layer's gate projection: the first row of each record of `file`."""
    config = bundle.config
    rows = partial(_record_rows, reader, file, layout, digest=digest)
    # Whole records are read; a neuron's record has more rows.
    return MatrixPart(
        "gate",
        config.intermediate_size,
        config.hidden_size,
        bundle.quant.of("feed_forward"),
        rows,
        bias,
        read_bytes=layout.stride,
    )


@dataclass(frozen=True)
class _CutoffPart:
    read: Callable[[], Float32]
    threshold: float
    spec: FeedForwardSpec
    field: str = "cutoff"

    def tasks(self) -> Iterator[Callable[[], Float32]]:
        yield self.read

    def load(self, backend: Backend, ahead: ReadAhead) -> Cutoff:
        return Cutoff(backend.load_vector(ahead.next()), self.threshold, self.spec)


@dataclass(frozen=True)
class _SelectorParts:
    """The parts of one layer's `Selector`: matrices in the order of multiplication, and a cutoff or None."""

    matrices: tuple[MatrixPart, ...] = ()
    predicted: bool = False
    cutoff: _CutoffPart | None = None
    least_gate: float = 0.0
    deviations: float | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order in which they are read."""
        return self.matrices if self.cutoff is None else (*self.matrices, self.cutoff)

    def load(self, backend: Backend, ahead: ReadAhead) -> Selector | None:
        """The loaded selector; None if every neuron is multiplied."""
        if not self.matrices:
            return None
        matrices = tuple(matrix.load(backend, ahead) for matrix in self.matrices)
        cutoff = None if self.cutoff is None else self.cutoff.load(backend, ahead)
        return Selector(matrices, self.predicted, cutoff, self.least_gate, self.deviations)


class NeuronRecords:
    """`FeedForwardSource` of one layer."""

    def __init__(self, bundle: Bundle, reader: FlashReader, layer: int) -> None:
        self._bundle = bundle
        self._layer = layer
        self._reader = reader
        self.file = FIRST_NEURON_FILE + layer
        self.num_neurons = bundle.config.intermediate_size
        self.hidden_size = bundle.config.hidden_size
        self.layout: RecordLayout = bundle.neuron_layout
        self._gates = GateDigest(bundle, layer) if bundle.config.zeros_gates else None

    def read(self, first: int, count: int) -> Bytes:
        records = read_span(self._reader, self.file, self.layout, first, count)
        self.check_gates(first, records)
        return records

    def gate_bias(self) -> Float32 | None:
        """(F,) biases of the gates, from the resident file; None without any."""
        bundle = self._bundle
        if not bundle.config.feed_forward.bias:
            return None
        resident = TensorFile(bundle, self._reader, bundle.file(RESIDENT), RESIDENT_FILE)
        return resident.vector(gate_bias_name(self._layer))

    def check_gates(self, first: int, records: Bytes) -> None:
        if self._gates is not None and first <= self._gates.rows:
            self._gates.take(first, records)


def embedding_records(bundle: Bundle, reader: FlashReader) -> EmbeddingRecords:
    """`EmbeddingSource` of the bundle's embedding file."""
    return EmbeddingRecords(
        bundle.config.vocab_size,
        reader,
        EMBEDDING_FILE,
        bundle.config.embedding_size,
        bundle.embedding_layout,
    )


def per_layer_records(bundle: Bundle, reader: FlashReader) -> EmbeddingRecords:
    """`EmbeddingSource` of the bundle's file of per-layer inputs."""
    file = FIRST_NEURON_FILE + bundle.config.num_layers
    return EmbeddingRecords(
        bundle.config.vocab_size, reader, file, bundle.config.per_layer_size, bundle.per_layer_layout
    )


class EmbeddingRecords:
    """`EmbeddingSource` of one of the bundle's tables.

    file: its index in the reader. width: columns of a row. layout: of its records.
    """

    def __init__(
        self, vocab_size: int, reader: FlashReader, file: int, width: int, layout: RecordLayout
    ) -> None:
        self._reader = reader
        self.file = file
        self.vocab_size = vocab_size
        self.hidden_size = width
        self.layout = layout

    def read(self, tokens: Int32) -> Bytes:
        records = memory.empty((len(tokens), self.layout.stride), np.uint8)
        self._reader.read_records(self.file, tokens.astype(np.int64), records)
        return records

    def rows(self, row0: int, count: int) -> RowChunk:
        """Rows row0 .. row0 + count for an output head tied to the embedding: views of the records."""
        return _record_rows(self._reader, self.file, self.layout, row0, count)


def _record_rows(
    reader: FlashReader,
    file: int,
    layout: RecordLayout,
    row0: int,
    count: int,
    digest: GateDigest | None = None,
) -> RowChunk:
    """Rows of the matrix made of each record's first row: views of the records.

    digest: checks gate rows against their layer's sha256.
    """
    records = read_span(reader, file, layout, row0, count)
    if digest is not None:
        digest.take(row0, records)
    return record_chunk(records, 0, layout.parts[0][0], row0)


def record_chunk(records: Bytes, offset: int, row: RowLayout, row0: int) -> RowChunk:
    """The row `offset` bytes into each record (n, stride), as rows row0 .. row0 + n: views of `records`."""
    scales_at = offset + row.codes_bytes
    biases_at, end = scales_at + row.scales_bytes, offset + row.nbytes
    scales, biases = records[:, scales_at:biases_at], records[:, biases_at:end]
    return RowChunk(row0, records[:, offset:scales_at], scales.view(np.float16), biases.view(np.float16))


def read_span(reader: FlashReader, file: int, layout: RecordLayout, first: int, count: int) -> Bytes:
    """Records first .. first + count of a file, (count, stride). Raises FlashReadError."""
    start = DATA_OFFSET + first * layout.stride
    return reader.read(file, start, count * layout.stride).reshape(count, layout.stride)
