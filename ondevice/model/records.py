"""Reads a bundle's records through the flash reader: neurons, embedding rows, per-layer inputs."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Bytes, Float32, Int32, RowChunk
from ondevice.backends.cpu_matrices import TilePlace
from ondevice.backends.expert_records import ExpertRecords
from ondevice.bundle.gates import GateDigest
from ondevice.bundle.layout import (
    DATA_OFFSET,
    RESIDENT,
    RecordLayout,
    SliceLayout,
    TileLayout,
    expert_layout,
    gate_bias_name,
    record_layout,
)
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig
from ondevice.flash.reader import FlashReader
from ondevice.kernels import memory
from ondevice.model.tensor_file import TensorFile
from ondevice.model_config import ModelConfig

# Indices of files in the flash reader.
RESIDENT_FILE = 0
FIRST_NEURON_FILE = 1


class NeuronRecords:
    """`FeedForwardSource` of one layer."""

    def __init__(self, bundle: Bundle, reader: FlashReader, layer: int) -> None:
        self._bundle = bundle
        self._layer = layer
        self._reader = reader
        self.file = FIRST_NEURON_FILE + layer
        self.num_neurons = bundle.config.records[layer]
        self.hidden_size = bundle.config.hidden_size
        self.layout: RecordLayout | SliceLayout = bundle.neuron_layouts[layer]
        self.experts = expert_records(bundle.config, bundle.quant, reader, layer, self.file)
        self._gates = GateDigest(bundle, layer) if bundle.config.zeros_gates else None

    def read(self, first: int, count: int) -> Bytes:
        layout = self.layout
        span = first // layout.neurons, layout.num_records(count)
        records = read_span(self._reader, self.file, layout, *span)
        self.check_gates(first, records)
        return records

    def gate_bias(self) -> Float32 | None:
        """(F,) biases of the gates, from the resident file, or None."""
        bundle = self._bundle
        if not bundle.config.feed_forward.bias:
            return None
        resident = TensorFile(bundle, self._reader, bundle.file(RESIDENT), RESIDENT_FILE)
        return resident.vector(gate_bias_name(self._layer))

    def check_gates(self, first: int, records: Bytes) -> None:
        if self._gates is not None and first <= self._gates.rows:
            self._gates.take(first, records)


def table_file(config: ModelConfig) -> int:
    """The flash reader's index of the embedding's file, if the bundle has it."""
    return FIRST_NEURON_FILE + config.num_layers


def inputs_file(config: ModelConfig) -> int:
    """The flash reader's index of the file of per-layer inputs, if the bundle has it."""
    return table_file(config) + config.has_table


def first_expert_file(config: ModelConfig) -> int:
    """The flash reader's index of the first file of experts that are stored as matrices."""
    return inputs_file(config) + config.has_inputs_table


def expert_records(
    config: ModelConfig, quant: QuantConfig, reader: FlashReader, layer: int, neuron_file: int
) -> ExpertRecords | None:
    """The experts of a layer, or None. neuron_file: index, in the reader, of the file with the layer's
    neurons.
    """
    spec = config.layers[layer]
    if spec.experts is None:
        return None
    layout = expert_layout(config, quant, layer)
    if layout is None:
        stride = record_layout(config, quant).stride
        first, nbytes = config.dense_neurons(spec) * stride, spec.experts.neurons * stride
        return ExpertRecords(neuron_file, DATA_OFFSET + first, nbytes, spec.experts.count, reader.read)
    file = first_expert_file(config) + config.expert_layers.index(layer)
    return ExpertRecords(file, DATA_OFFSET, layout.stride, spec.experts.count, reader.read, layout)


def embedding_records(bundle: Bundle, reader: FlashReader) -> EmbeddingRecords:
    """`EmbeddingSource` of the bundle's embedding file."""
    return EmbeddingRecords(
        bundle.config.vocab_size,
        reader,
        table_file(bundle.config),
        bundle.config.embedding_size,
        bundle.embedding_layout,
    )


def per_layer_records(bundle: Bundle, reader: FlashReader) -> EmbeddingRecords:
    """`EmbeddingSource` of the bundle's file of per-layer inputs."""
    file = inputs_file(bundle.config)
    return EmbeddingRecords(
        bundle.config.vocab_size, reader, file, bundle.config.per_layer_size, bundle.per_layer_layout
    )


class EmbeddingRecords:
    """`EmbeddingSource` of one of the bundle's tables.

    file: the table's index in the reader. width: columns of a row. layout: the layout of its records, each a
    row or a tile.
    """

    def __init__(
        self, vocab_size: int, reader: FlashReader, file: int, width: int, layout: RecordLayout | TileLayout
    ) -> None:
        self._reader = reader
        self.file = file
        self.vocab_size = vocab_size
        self.hidden_size = width
        self.layout = layout

    def read(self, tokens: Int32) -> Bytes:
        rows = TILE_ROWS if isinstance(self.layout, TileLayout) else 1
        records = memory.empty((len(tokens), self.layout.stride), np.uint8)
        self._reader.read_records(self.file, tokens.astype(np.int64) // rows, records)
        return records

    @property
    def place(self) -> TilePlace:
        """Where the tiles of the table lie, if it consists of tiles."""
        return TilePlace(self.file, DATA_OFFSET, self.layout.stride)

    def tiles(self, first: int, count: int) -> Bytes:
        """Tiles first .. first + count of a table of tiles, (count, tile_bytes), as views. For a
        tied head.
        """
        records = read_span(self._reader, self.file, self.layout, first, count)
        return records[:, : self.layout.row_bytes[0]]


def record_rows(
    reader: FlashReader,
    file: int,
    layout: RecordLayout,
    row0: int,
    count: int,
    digest: GateDigest | None = None,
) -> RowChunk:
    """Rows row0 .. row0 + count of a matrix whose rows are the first row of each record, as views.

    digest: checks gate rows against their layer's sha256.
    """
    records = read_span(reader, file, layout, row0, count)
    if digest is not None:
        digest.take(row0, records)
    return record_chunk(records, 0, layout.parts[0][0], row0)


def record_chunk(records: Bytes, offset: int, row: RowLayout, row0: int) -> RowChunk:
    """The rows that lie `offset` bytes into each record (n, stride), as rows row0 .. row0 + n of a matrix;
    views.
    """
    scales_at = offset + row.codes_bytes
    biases_at, end = scales_at + row.scales_bytes, offset + row.nbytes
    scales, biases = records[:, scales_at:biases_at], records[:, biases_at:end]
    return RowChunk(row0, records[:, offset:scales_at], scales.view(row.scale_type), biases.view(np.float16))


def read_span(
    reader: FlashReader, file: int, layout: RecordLayout | TileLayout | SliceLayout, first: int, count: int
) -> Bytes:
    """Records first .. first + count of a file, (count, stride). Raises FlashReadError."""
    start = DATA_OFFSET + first * layout.stride
    return reader.read(file, start, count * layout.stride).reshape(count, layout.stride)
