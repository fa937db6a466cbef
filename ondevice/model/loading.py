"""From a bundle on flash to the weights an engine has loaded: which bytes are what, in bounded pieces.

The sources read through the flash reader, which checks every byte it returns; nothing here holds a whole
matrix. A `_Part` says once what is read for it and how it is loaded, so reading ahead keeps to the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from ondevice.backends.base import Backend, Bytes, Float32, Int32, RowChunk, Selector
from ondevice.bundle.layout import DATA_OFFSET, RESIDENT, RecordLayout, RowLayout
from ondevice.bundle.predictors import OperatingPoint
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.config import ModelConfig, Sparsity
from ondevice.flash.reader import FlashReader
from ondevice.model.tensor_file import ReadAhead, TensorFile
from ondevice.model.transformer import Cancelled
from ondevice.model.weights import LayerWeights, ModelWeights

# Indices in the flash reader.
RESIDENT_FILE = 0
EMBEDDING_FILE = 1
FIRST_NEURON_FILE = 2
CHUNK_BYTES = 4 << 20
"""Codes of one RowChunk, at most, unless a single row is longer."""

Rows = Callable[[int, int], RowChunk]
"""(row0, count) -> those rows of one matrix."""


def bundle_files(bundle: Bundle, sparsity: Sparsity = "dense") -> list[CheckedFile]:
    """The files to open a FlashReader with, in the order that the sources' indices mean.

    With `exact`, what decides which neurons are multiplied are gate rows of their own; with `predicted`, the
    predictors.
    """
    layers = range(bundle.config.num_layers)
    files = [bundle.file(RESIDENT), bundle.embedding_file, *(bundle.neuron_file(layer) for layer in layers)]
    if sparsity == "exact":
        files += [bundle.gate_file(layer) for layer in layers]
    elif sparsity == "predicted":
        files.append(bundle.predictors_file())
    return files


def load_weights(
    bundle: Bundle,
    reader: FlashReader,
    backend: Backend,
    cancelled: Callable[[], bool] = lambda: False,
    sparsity: Sparsity = "dense",
    point: OperatingPoint | None = None,
) -> ModelWeights:
    """Load a whole model into `backend` from `reader`, opened over `bundle_files(bundle, sparsity)`.

    sparsity: what decides which neurons are read and multiplied: nothing (`dense`), their gates (`exact`) or
    the predictors at an operating point of theirs (`predicted`).

    Raises FlashReadError when bytes don't match their checksum, BundleError when what they hold can't be
    weights, Cancelled when `cancelled()` holds between two pieces, and what the backend raises when memory
    runs out.
    """
    config = bundle.config
    resident = TensorFile(bundle, reader, bundle.file(RESIDENT), RESIDENT_FILE, bundle.quant.bits)
    embedding = EmbeddingRecords(bundle, reader)
    layers = [_layer_parts(bundle, resident, layer) for layer in range(config.num_layers)]
    head_rows = embedding.rows if config.tie_embeddings else partial(resident.rows, "head")
    final_norm = _Vector("final_norm", partial(resident.vector, "final_norm.weight"))
    head = _Matrix("head", config.vocab_size, config.hidden_size, bundle.quant.bits, head_rows)
    selectors = _selector_parts(bundle, reader, sparsity, point)
    order: list[_Part] = [
        part for parts, selector in zip(layers, selectors, strict=True) for part in (*parts, *selector)
    ]
    order += [final_norm, head]

    def tasks() -> Iterator[Callable[[], Any]]:
        for part in order:
            for task in part.tasks():
                if cancelled():
                    raise Cancelled
                yield task

    with ReadAhead(tasks()) as ahead:
        loaded_layers = [
            LayerWeights(
                **(
                    {"q_norm": None, "k_norm": None}
                    | {part.field: part.load(backend, ahead) for part in parts}
                ),
                feed_forward=backend.load_feed_forward(
                    layer,
                    NeuronRecords(bundle, reader, layer),
                    _selector([part.load(backend, ahead) for part in selector], sparsity),
                ),
            )
            for layer, (parts, selector) in enumerate(zip(layers, selectors, strict=True))
        ]
        loaded_norm, loaded_head = final_norm.load(backend, ahead), head.load(backend, ahead)
    return ModelWeights(backend.load_embedding(embedding), loaded_layers, loaded_norm, loaded_head)


def _layer_parts(bundle: Bundle, resident: TensorFile, layer: int) -> list[_Part]:
    """What LayerWeights holds of the resident file, in the order in which it lies there."""
    config, prefix = bundle.config, f"layers.{layer}"

    def vector(name: str) -> _Vector:
        return _Vector(name.split(".")[-1], partial(resident.vector, f"{prefix}.{name}.weight"))

    def matrix(field: str, rows: int, cols: int, has_bias: bool) -> _Matrix:
        name = f"{prefix}.attention.{field}"
        bias = partial(resident.vector, f"{name}.bias") if has_bias else None
        return _Matrix(field, rows, cols, bundle.quant.bits, partial(resident.rows, name), bias)

    norms = [vector("attention.q_norm"), vector("attention.k_norm")] if config.qk_norm else []
    return [
        vector("attention_norm"),
        matrix("qkv", config.qkv_size, config.hidden_size, config.attention_bias),
        *norms,
        matrix("out", config.hidden_size, config.query_size, config.attention_output_bias),
        vector("feed_forward_norm"),
    ]


def _selector(matrices: list[Any], sparsity: Sparsity) -> Selector | None:
    return Selector(tuple(matrices), predicted=sparsity == "predicted") if matrices else None


def _selector_parts(
    bundle: Bundle, reader: FlashReader, sparsity: Sparsity, point: OperatingPoint | None
) -> list[list[_Matrix]]:
    """Per layer, the matrices that score its neurons, in the order in which they multiply."""
    layers = range(bundle.config.num_layers)
    if sparsity == "exact":
        return [[_gate_part(bundle, reader, layer)] for layer in layers]
    if sparsity != "predicted" or bundle.predictors is None or point is None:
        return [[] for _ in layers]
    index = FIRST_NEURON_FILE + bundle.config.num_layers
    file = TensorFile(bundle, reader, bundle.predictors_file(), index, bundle.predictors.bits)
    return [
        _predictor_parts(bundle.config, file, layer, rank, offset)
        for layer, (rank, offset) in enumerate(zip(bundle.predictors.ranks, point.offsets, strict=True))
    ]


def _predictor_parts(
    config: ModelConfig, file: TensorFile, layer: int, rank: int, offset: float
) -> list[_Matrix]:
    down, up = f"layers.{layer}.down", f"layers.{layer}.up"

    def bias() -> Float32:
        return file.vector(f"layers.{layer}.bias") + np.float32(offset)

    return [
        _Matrix("down", rank, config.hidden_size, file.bits, partial(file.rows, down)),
        _Matrix("up", config.intermediate_size, rank, file.bits, partial(file.rows, up), bias),
    ]


def _gate_part(bundle: Bundle, reader: FlashReader, layer: int) -> _Matrix:
    """One layer's gate projection, from its own file."""
    config = bundle.config
    file = FIRST_NEURON_FILE + config.num_layers + layer
    rows = partial(_record_rows, reader, file, bundle.gate_layout)
    return _Matrix("gate", config.intermediate_size, config.hidden_size, bundle.quant.bits, rows)


class _Part(Protocol):
    """Something to load: its reads, in order, and the loading that consumes their results in that order."""

    @property
    def field(self) -> str: ...

    def tasks(self) -> Iterator[Callable[[], Any]]: ...

    def load(self, backend: Backend, ahead: ReadAhead) -> Any: ...


@dataclass(frozen=True)
class _Vector:
    field: str
    read: Callable[[], Float32]

    def tasks(self) -> Iterator[Callable[[], Float32]]:
        yield self.read

    def load(self, backend: Backend, ahead: ReadAhead) -> Any:
        return backend.load_vector(ahead.next())


@dataclass(frozen=True)
class _Matrix:
    field: str
    num_rows: int
    cols: int
    bits: Literal[4, 8, 16]
    rows: Rows
    bias: Callable[[], Float32] | None = None

    @property
    def starts(self) -> range:
        """First row of each chunk."""
        return range(0, self.num_rows, max(1, CHUNK_BYTES // RowLayout(self.cols, self.bits).codes_bytes))

    def tasks(self) -> Iterator[Callable[[], Any]]:
        if self.bias is not None:
            yield self.bias
        for row0 in self.starts:
            yield partial(self.rows, row0, min(self.starts.step, self.num_rows - row0))

    def load(self, backend: Backend, ahead: ReadAhead) -> Any:
        bias = None if self.bias is None else ahead.next()
        return backend.load_linear(_ReadLinear(self, bias, ahead))


class _ReadLinear:
    """`LinearSource` of a matrix whose chunks come next."""

    def __init__(self, matrix: _Matrix, bias: Float32 | None, ahead: ReadAhead) -> None:
        self.rows = matrix.num_rows
        self.cols = matrix.cols
        self.bits = matrix.bits
        self.bias = bias
        self._count = len(matrix.starts)
        self._ahead = ahead

    def chunks(self) -> Iterator[RowChunk]:
        for _ in range(self._count):
            yield self._ahead.next()


class NeuronRecords:
    """`FeedForwardSource` of one layer."""

    def __init__(self, bundle: Bundle, reader: FlashReader, layer: int) -> None:
        self._reader = reader
        self.file = FIRST_NEURON_FILE + layer
        self.num_neurons = bundle.config.intermediate_size
        self.hidden_size = bundle.config.hidden_size
        self.bits: Literal[4, 8, 16] = bundle.quant.bits
        self.layout: RecordLayout = bundle.neuron_layout

    def read(self, first: int, count: int) -> Bytes:
        return _read_span(self._reader, self.file, self.layout, first, count)


class EmbeddingRecords:
    """`EmbeddingSource` of the bundle's embedding file."""

    def __init__(self, bundle: Bundle, reader: FlashReader) -> None:
        self._reader = reader
        self.file = EMBEDDING_FILE
        self.vocab_size = bundle.config.vocab_size
        self.hidden_size = bundle.config.hidden_size
        self.bits: Literal[4, 8, 16] = bundle.quant.bits
        self.layout: RecordLayout = bundle.embedding_layout

    def read(self, tokens: Int32) -> Bytes:
        records = np.empty((len(tokens), self.layout.stride), dtype=np.uint8)
        self._reader.read_records(self.file, tokens.astype(np.int64), records)
        return records

    def rows(self, row0: int, count: int) -> RowChunk:
        """The rows of an output head that shares these records, as views of them."""
        return _record_rows(self._reader, self.file, self.layout, row0, count)


def _record_rows(reader: FlashReader, file: int, layout: RecordLayout, row0: int, count: int) -> RowChunk:
    """Records of one row each as rows of a matrix: views of them."""
    records = _read_span(reader, file, layout, row0, count)
    row = layout.parts[0][0]
    scales_at, biases_at = row.codes_bytes, row.codes_bytes + row.scales_bytes
    scales, biases = records[:, scales_at:biases_at], records[:, biases_at : row.nbytes]
    return RowChunk(row0, records[:, :scales_at], scales.view(np.float16), biases.view(np.float16))


def _read_span(reader: FlashReader, file: int, layout: RecordLayout, first: int, count: int) -> Bytes:
    start = DATA_OFFSET + first * layout.stride
    return reader.read(file, start, count * layout.stride).reshape(count, layout.stride)
