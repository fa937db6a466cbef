"""Reads a checkpoint once, block by block, in the order in which a bundle's files are written.

Legend: D hidden size, n rows in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ondevice.bundle.layout import EMBEDDING, RECORDS_TENSOR, RESIDENT, gate_file_name, neuron_file_name
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.base import Checkpoint, SourceTensor
from ondevice.converters.quantize import Weights

BLOCK_BYTES = 4 << 20
"""Checkpoint bytes of one matrix that are read, quantised and written at a time."""
DOWN_BLOCK_BYTES = 96 << 20
"""Checkpoint bytes of a down projection held at a time; reading columns is cheap only for many at once."""


@dataclass(frozen=True)
class Block:
    """Rows that belong together: rows of one matrix, or gate, up and down (transposed) of the same neurons.

    file: the bundle file that they go to. tensor: the resident tensor, without `.codes`, or `records`.
    sources: the checkpoint's names of `rows`. rows: each (n, columns) in the stored type; a vector is (n,)
    float32. last: true for the last block of the tensor.
    """

    file: str
    tensor: str
    sources: tuple[str, ...]
    rows: tuple[Weights, ...]
    last: bool = True

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows)


def read_blocks(checkpoint: Checkpoint, wanted: Callable[[str, str], bool]) -> Generator[Block, None, None]:
    """Neurons and their gates by layer, then the embedding, then the resident tensors.

    wanted: gets a bundle file and a resident tensor (or `records`), and returns true if it is to be read.
    """
    for layer in range(checkpoint.config.num_layers):
        if wanted(neuron_file_name(layer), RECORDS_TENSOR):
            yield from _neurons(checkpoint, layer)
        if checkpoint.config.zeros_gates and wanted(gate_file_name(layer), RECORDS_TENSOR):
            gate = checkpoint.tensors[names.LayerNames(layer).gate]
            yield from _matrix(gate_file_name(layer), RECORDS_TENSOR, [gate])
    if wanted(EMBEDDING, RECORDS_TENSOR):
        yield from _matrix(EMBEDDING, RECORDS_TENSOR, [checkpoint.tensors[names.EMBEDDING]])
    for tensor, sources in resident_sources(checkpoint):
        if not wanted(RESIDENT, tensor):
            continue
        if len(sources[0].shape) == 1:
            vector = np.concatenate([source.vector() for source in sources])
            yield Block(RESIDENT, tensor, tuple(source.name for source in sources), (vector,))
        else:
            yield from _matrix(RESIDENT, tensor, sources)


def resident_sources(checkpoint: Checkpoint) -> Iterator[tuple[str, list[SourceTensor]]]:
    """Every resident tensor (a matrix without `.codes`), and the checkpoint tensors it joins, in order."""
    config, tensors = checkpoint.config, checkpoint.tensors
    for layer in range(config.num_layers):
        name, prefix = names.LayerNames(layer), f"layers.{layer}"
        yield f"{prefix}.attention_norm.weight", [tensors[name.attention_norm]]
        yield f"{prefix}.attention.qkv", [tensors[name.projection(which)] for which in "qkv"]
        if config.attention_bias:
            yield f"{prefix}.attention.qkv.bias", [tensors[name.projection_bias(which)] for which in "qkv"]
        if config.qk_norm:
            for which in "qk":
                yield f"{prefix}.attention.{which}_norm.weight", [tensors[name.head_norm(which)]]
        yield f"{prefix}.attention.out", [tensors[name.projection("o")]]
        if config.attention_output_bias:
            yield f"{prefix}.attention.out.bias", [tensors[name.projection_bias("o")]]
        yield f"{prefix}.feed_forward_norm.weight", [tensors[name.feed_forward_norm]]
    yield "final_norm.weight", [tensors[names.FINAL_NORM]]
    if not config.tie_embeddings:
        yield "head", [tensors[names.HEAD]]


def held_matrix_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the largest down projection that is read in several blocks of columns; 0 if none is."""
    layers = range(checkpoint.config.num_layers)
    sizes = [checkpoint.tensors[names.LayerNames(layer).down].nbytes for layer in layers]
    return max(size if size > DOWN_BLOCK_BYTES else 0 for size in sizes)


def _neurons(checkpoint: Checkpoint, layer: int) -> Iterator[Block]:
    name = names.LayerNames(layer)
    gate, up, down = (checkpoint.tensors[source] for source in (name.gate, name.up, name.down))
    sources = (gate.name, up.name, down.name)
    neurons = gate.shape[0]
    step = _rows_per_block(gate)
    held = max(1, DOWN_BLOCK_BYTES * neurons // (down.nbytes * step)) * step
    for first in range(0, neurons, held):
        columns = down.columns(first, min(first + held, neurons))
        for start in range(first, first + columns.shape[1], step):
            stop = min(start + step, neurons)
            down_rows = columns[:, start - first : stop - first].T
            rows = (gate.rows(start, stop), up.rows(start, stop), down_rows)
            yield Block(neuron_file_name(layer), RECORDS_TENSOR, sources, rows, stop == neurons)


def _matrix(file: str, tensor: str, sources: Sequence[SourceTensor]) -> Iterator[Block]:
    for source in sources:
        step = _rows_per_block(source)
        for start in range(0, source.shape[0], step):
            stop = min(start + step, source.shape[0])
            last = source is sources[-1] and stop == source.shape[0]
            yield Block(file, tensor, (source.name,), (source.rows(start, stop),), last)


def _rows_per_block(source: SourceTensor) -> int:
    """Rows read at a time: a multiple of 16, the rows that the kernels quantise together."""
    return max(16, BLOCK_BYTES * source.shape[0] // source.nbytes // 16 * 16)
