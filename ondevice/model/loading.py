"""From a bundle on flash to the weights an engine has loaded: which bytes are what, in bounded pieces.

The sources read through the flash reader, which checks every byte it returns; nothing here holds a whole
matrix. Reads of the resident file go by whole CRC blocks and each block is read once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ondevice.backends.base import Backend, Bytes, Float32, Int32, Linear, RowChunk, Vector
from ondevice.bundle.layout import CRC_BLOCK_BYTES, DATA_OFFSET, RESIDENT, RecordLayout, RowLayout
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.model.weights import LayerWeights, ModelWeights

RESIDENT_FILE = 0
EMBEDDING_FILE = 1
FIRST_NEURON_FILE = 2
CHUNK_BYTES = 4 << 20
"""Codes of one RowChunk, at most, unless a single row is longer."""
KEPT_BLOCKS = 8
"""CRC blocks remembered while loading: the edges of codes, scales and biases, and the norms between."""


def bundle_files(bundle: Bundle) -> list[CheckedFile]:
    """The files to open a FlashReader with, in the order that the sources' indices mean."""
    neurons = [bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)]
    return [bundle.file(RESIDENT), bundle.embedding_file, *neurons]


def load_weights(bundle: Bundle, reader: FlashReader, backend: Backend) -> ModelWeights:
    """Load a whole model into `backend` from `reader`, opened over `bundle_files(bundle)`.

    Raises FlashReadError when bytes don't match their checksum, BundleError when what they hold can't be
    weights, and what the backend raises when memory runs out.
    """
    resident = ResidentFile(bundle, reader)
    embedding = EmbeddingRecords(bundle, reader)
    layers = [
        _load_layer(bundle, reader, backend, resident, layer) for layer in range(bundle.config.num_layers)
    ]
    final_norm = backend.load_vector(resident.vector("final_norm.weight"))
    tied = bundle.config.tie_embeddings
    head = backend.load_linear(TiedHead(embedding) if tied else StoredLinear(bundle, resident, "head"))
    return ModelWeights(backend.load_embedding(embedding), layers, final_norm, head)


def _load_layer(
    bundle: Bundle, reader: FlashReader, backend: Backend, resident: ResidentFile, layer: int
) -> LayerWeights:
    prefix = f"layers.{layer}"

    def vector(name: str) -> Vector:
        return backend.load_vector(resident.vector(f"{prefix}.{name}.weight"))

    def linear(name: str, has_bias: bool) -> Linear:
        return backend.load_linear(StoredLinear(bundle, resident, f"{prefix}.attention.{name}", has_bias))

    config = bundle.config
    return LayerWeights(
        attention_norm=vector("attention_norm"),
        qkv=linear("qkv", config.attention_bias),
        q_norm=vector("attention.q_norm") if config.qk_norm else None,
        k_norm=vector("attention.k_norm") if config.qk_norm else None,
        out=linear("out", config.attention_output_bias),
        feed_forward_norm=vector("feed_forward_norm"),
        feed_forward=backend.load_feed_forward(layer, NeuronRecords(bundle, reader, layer)),
    )


class ResidentFile:
    """The resident file read block by block: a request's edges come from remembered blocks."""

    def __init__(self, bundle: Bundle, reader: FlashReader) -> None:
        self._bundle = bundle
        self._reader = reader
        self._nbytes = bundle.file(RESIDENT).nbytes
        self._blocks: OrderedDict[int, Bytes] = OrderedDict()

    def vector(self, name: str) -> Float32:
        """The float32 tensor `name`, one-dimensional. Raises BundleError if a value isn't finite."""
        span = self._bundle.tensor_span(name)
        values: Float32 = self.read(span.offset, span.nbytes).view(np.float32)
        if not np.isfinite(values).all():
            raise BundleError(f"{RESIDENT}: {name} holds values that are not finite; convert the model again")
        return values

    def read(self, offset: int, nbytes: int) -> Bytes:
        """(nbytes,) bytes of the file from `offset`."""
        out = np.empty(nbytes, dtype=np.uint8)
        at, end = offset, offset + nbytes
        while at < end:
            whole_end = end - end % CRC_BLOCK_BYTES
            if at % CRC_BLOCK_BYTES == 0 and at < whole_end:
                self._reader.read(RESIDENT_FILE, at, whole_end - at, out[at - offset : whole_end - offset])
                at = whole_end
            else:
                index, skip = divmod(at, CRC_BLOCK_BYTES)
                piece = self._block(index)[skip : skip + end - at]
                out[at - offset : at - offset + len(piece)] = piece
                at += len(piece)
        return out

    def _block(self, index: int) -> Bytes:
        if index not in self._blocks:
            start = index * CRC_BLOCK_BYTES
            count = min(CRC_BLOCK_BYTES, self._nbytes - start)
            self._blocks[index] = self._reader.read(RESIDENT_FILE, start, count, None)
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(index)
        return self._blocks[index]


class StoredLinear:
    """`LinearSource` of a matrix in the resident file."""

    def __init__(self, bundle: Bundle, resident: ResidentFile, name: str, has_bias: bool = False) -> None:
        self._resident = resident
        suffixes = ("codes",) if bundle.quant.bits == 16 else ("codes", "scales", "biases")
        self._spans = [bundle.tensor_span(f"{name}.{suffix}") for suffix in suffixes]
        self.rows: int = self._spans[0].shape[0]
        self.cols = bundle.config.query_size if name.endswith(".out") else bundle.config.hidden_size
        self.bits: Literal[4, 8, 16] = bundle.quant.bits
        self.bias: Float32 | None = resident.vector(f"{name}.bias") if has_bias else None

    def chunks(self) -> Iterator[RowChunk]:
        row = RowLayout(self.cols, self.bits)
        step = max(1, CHUNK_BYTES // row.codes_bytes)
        for row0 in range(0, self.rows, step):
            count = min(step, self.rows - row0)
            pieces = [
                self._resident.read(span.offset + row0 * width, count * width).reshape(count, width)
                for span in self._spans
                for width in (span.nbytes // self.rows,)
            ]
            codes, *affine = pieces
            scales, biases = affine or (codes[:, :0], codes[:, :0])
            yield RowChunk(row0, codes, scales.view(np.float16), biases.view(np.float16))


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

    def span(self, first: int, count: int) -> Bytes:
        """(count, stride) the records first .. first + count."""
        return _read_span(self._reader, self.file, self.layout, first, count)


class TiedHead:
    """`LinearSource` of an output head that shares the embedding's records."""

    bias = None

    def __init__(self, embedding: EmbeddingRecords) -> None:
        self._embedding = embedding
        self.rows = embedding.vocab_size
        self.cols = embedding.hidden_size
        self.bits: Literal[4, 8, 16] = embedding.bits

    def chunks(self) -> Iterator[RowChunk]:
        row = RowLayout(self.cols, self.bits)
        scales_at = row.codes_bytes
        biases_at = scales_at + row.scales_bytes
        step = max(1, CHUNK_BYTES // row.codes_bytes)
        for first in range(0, self.rows, step):
            records = self._embedding.span(first, min(step, self.rows - first))
            scales, biases = (
                np.ascontiguousarray(records[:, at : at + row.scales_bytes]).view(np.float16)
                for at in (scales_at, biases_at)
            )
            yield RowChunk(first, np.ascontiguousarray(records[:, :scales_at]), scales, biases)


def _read_span(reader: FlashReader, file: int, layout: RecordLayout, first: int, count: int) -> Bytes:
    start = DATA_OFFSET + first * layout.stride
    records: Bytes = reader.read(file, start, count * layout.stride, None)
    return records.reshape(count, layout.stride)
