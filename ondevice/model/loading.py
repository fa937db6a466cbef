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

from ondevice.backends.base import Backend, Bytes, Float32, Int32, RowChunk
from ondevice.bundle.layout import DATA_OFFSET, RESIDENT, RecordLayout, RowLayout
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.flash.reader import FlashReader
from ondevice.model.resident_file import ReadAhead, ResidentFile
from ondevice.model.transformer import Cancelled
from ondevice.model.weights import LayerWeights, ModelWeights

# Indices in the flash reader; the resident file comes first.
EMBEDDING_FILE = 1
FIRST_NEURON_FILE = 2
CHUNK_BYTES = 4 << 20
"""Codes of one RowChunk, at most, unless a single row is longer."""

Rows = Callable[[int, int], RowChunk]
"""(row0, count) -> those rows of one matrix."""


def bundle_files(bundle: Bundle, gates: bool = False) -> list[CheckedFile]:
    """The files to open a FlashReader with, in the order that the sources' indices mean.

    gates: with the separate gate rows, which bundles of ReLU-family models have.
    """
    layers = range(bundle.config.num_layers)
    neurons = [bundle.neuron_file(layer) for layer in layers]
    gate_files = [bundle.gate_file(layer) for layer in layers if gates]
    return [bundle.file(RESIDENT), bundle.embedding_file, *neurons, *gate_files]


def load_weights(
    bundle: Bundle,
    reader: FlashReader,
    backend: Backend,
    cancelled: Callable[[], bool] = lambda: False,
    gates: bool = False,
) -> ModelWeights:
    """Load a whole model into `backend` from `reader`, opened over `bundle_files(bundle, gates)`.

    gates: load the gate projections too, which then decide what is read and multiplied of the neurons.

    Raises FlashReadError when bytes don't match their checksum, BundleError when what they hold can't be
    weights, Cancelled when `cancelled()` holds between two pieces, and what the backend raises when memory
    runs out.
    """
    config = bundle.config
    resident, embedding = ResidentFile(bundle, reader), EmbeddingRecords(bundle, reader)
    layers = [_layer_parts(bundle, resident, layer) for layer in range(config.num_layers)]
    head_rows = embedding.rows if config.tie_embeddings else partial(resident.rows, "head")
    final_norm = _Vector("final_norm", partial(resident.vector, "final_norm.weight"))
    head = _Matrix("head", config.vocab_size, config.hidden_size, bundle.quant.bits, head_rows)
    gate_parts = [_gate_part(bundle, reader, layer) if gates else None for layer in range(config.num_layers)]
    per_layer = [[*parts, *([gate] if gate else [])] for parts, gate in zip(layers, gate_parts, strict=True)]
    order = [*(part for parts in per_layer for part in parts), final_norm, head]

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
                    layer, NeuronRecords(bundle, reader, layer), gate and gate.load(backend, ahead)
                ),
            )
            for layer, (parts, gate) in enumerate(zip(layers, gate_parts, strict=True))
        ]
        loaded_norm, loaded_head = final_norm.load(backend, ahead), head.load(backend, ahead)
    return ModelWeights(backend.load_embedding(embedding), loaded_layers, loaded_norm, loaded_head)


def _layer_parts(bundle: Bundle, resident: ResidentFile, layer: int) -> list[_Part]:
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
