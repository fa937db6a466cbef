"""Reads a checkpoint once, block by block, in the order in which a bundle's files are written.

Legend: D hidden size, n rows in a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

import numpy as np

from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.layout import (
    EMBEDDING,
    PER_LAYER,
    POSITIONS,
    RECORDS_TENSOR,
    RESIDENT,
    expert_file_name,
    gate_file_name,
    neuron_file_name,
    slice_neurons,
)
from ondevice.bundle.matrix_layout import TiledMatrix
from ondevice.bundle.weight_shapes import layer_weight_shapes, model_weight_shapes
from ondevice.config import MatrixKind, QuantConfig, RowFormat
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.base import Checkpoint, SourceTensor, not_finite
from ondevice.converters.quantize import (
    EncodedColumns,
    RoundedRows,
    SourceCodes,
    Weights,
    in_columns,
    to_float32,
)

BLOCK_BYTES = 4 << 20
"""Bytes of one matrix's values that are read, quantised and written at a time."""
DOWN_BLOCK_BYTES = 96 << 20
"""Bytes of a down projection held at a time, encoded or as values. Reading columns is cheap only in large
numbers."""

Wanted = Callable[[str, str], bool]
"""A function from a bundle file and a resident tensor (or `records`) to whether it is to be read."""
NOT_ROUNDED: Mapping[str, RoundedRows] = {}
EXPERT_KINDS: Mapping[str, MatrixKind] = {"gate": "experts", "up": "experts", "down": "experts_down"}
"""The kind of each of an expert's matrices."""
NAMES_OF_KINDS: Mapping[MatrixKind | None, str] = {
    "qkv": "attention",
    "out": "attention_output",
    "head": "head",
    None: "other",
}
"""Names of resident matrices' kinds in notes."""
_PROJECTION = re.compile(r"layers\.\d+\.attention\.(q|k|v|kv|z|x|b|c)")
"""Names of the parts of a layer's fused projection, as in `ModelConfig.projection_sizes`."""


@dataclass(frozen=True)
class Block:
    """Rows that belong together: rows of one matrix, or the gate, up (if there is one) and down rows
    (transposed) of some neurons.

    file: the bundle file that they are written to. tensor: the resident tensor, or `records`. sources: the
    checkpoint's name of each of `rows`. kinds: the kind of each matrix: attention, attention_output, down,
    embedding, expert_down, expert_gate, expert_up, gate, head, other, per_layer or up. formats: how each
    matrix is stored. rows: for each matrix, values (n, columns) in the stored type, or the checkpoint's codes
    of n rows, or n rows that are already rounded, or n columns that are still encoded; a vector is (n,)
    float32. nbytes: number of checkpoint bytes that the rows take. last: whether this is the tensor's last
    block.
    """

    file: str
    tensor: str
    sources: tuple[str, ...]
    kinds: tuple[str, ...]
    formats: tuple[RowFormat, ...]
    rows: tuple[Weights | SourceCodes | RoundedRows | EncodedColumns, ...]
    nbytes: int
    last: bool = True


def read_blocks(
    checkpoint: Checkpoint,
    wanted: Wanted,
    quant: QuantConfig,
    rounded: Mapping[str, RoundedRows] = NOT_ROUNDED,
) -> Generator[Block, None, None]:
    """Yields all blocks in the order of files: embedding and per-layer rows; layer by layer resident tensors,
    neurons, gates and experts; then all others.

    quant: how the bundle stores weights. The checkpoint's codes are used if they fit. rounded: matrices that
    are already rounded, by name. A down projection's rows are neurons, unless feed-forwards are stored in
    slices.
    """
    layers = checkpoint.config.num_layers
    if wanted(EMBEDDING, RECORDS_TENSOR):
        embedding, stored = checkpoint.tensors[names.EMBEDDING], quant.of("embedding")
        yield from _matrix(EMBEDDING, RECORDS_TENSOR, "embedding", embedding, stored, rounded)
    if checkpoint.config.per_layer_width and wanted(PER_LAYER, RECORDS_TENSOR):
        rows = checkpoint.tensors[names.PER_LAYER]
        yield from _matrix(PER_LAYER, RECORDS_TENSOR, "per_layer", rows, quant.plain, rounded)
    specs = resident_tensors(checkpoint.config, quant)
    resident = groupby(resident_sources(checkpoint), lambda entry: layer_of(RESIDENT, entry[0], layers))
    for layer, tensors in resident:
        for tensor, sources in tensors:
            if wanted(RESIDENT, tensor):
                yield from _resident(tensor, sources, specs[tensor].matrix, rounded)
        if layer < layers:
            yield from _layer_records(checkpoint, layer, wanted, quant, rounded)


def layer_of(file: str, tensor: str, layers: int) -> int:
    """The layer with which a record file or a resident tensor is written; `layers` for those written after
    all layers.
    """
    if tensor == POSITIONS:
        return 0
    match = re.search(r"(?:^layers\.|-)(\d+)\.", tensor if file == RESIDENT else file)
    return int(match[1]) if match else layers


def _layer_records(
    checkpoint: Checkpoint,
    layer: int,
    wanted: Wanted,
    quant: QuantConfig,
    rounded: Mapping[str, RoundedRows],
) -> Iterator[Block]:
    """Yields the blocks of a layer's neurons, of its gates if they have a file, and of its experts if there
    are any.
    """
    records = checkpoint.config.records[layer]
    if records and wanted(neuron_file_name(layer), RECORDS_TENSOR):
        of_layer = _slices if checkpoint.config.is_sliced else _neurons
        yield from of_layer(checkpoint, layer, quant, rounded)
    if records and checkpoint.config.zeros_gates and wanted(gate_file_name(layer), RECORDS_TENSOR):
        gate = checkpoint.tensors[names.LayerNames(layer).gate]
        stored = quant.of("feed_forward")
        yield from _matrix(gate_file_name(layer), RECORDS_TENSOR, "gate", gate, stored, rounded)
    if layer in checkpoint.config.expert_layers and wanted(expert_file_name(layer), RECORDS_TENSOR):
        yield from _experts(checkpoint, layer, quant)


def _resident(
    tensor: str,
    sources: Sequence[SourceTensor],
    matrix: TiledMatrix | None,
    rounded: Mapping[str, RoundedRows],
) -> Iterator[Block]:
    """Yields the blocks of a resident tensor. matrix: the matrix that it holds as tiles; None for float32
    values.
    """
    if matrix is not None:
        (source,), kind = sources, NAMES_OF_KINDS[matrix_kind(tensor)]
        yield from _matrix(RESIDENT, tensor, kind, source, matrix.row.stored, rounded)
    elif len(sources[0].shape) == 2:
        yield from _values(tensor, sources[0])
    else:
        vector = np.concatenate([source.vector() for source in sources])
        nbytes = sum(source.nbytes for source in sources)
        yield Block(RESIDENT, tensor, tuple(source.name for source in sources), (), (), (vector,), nbytes)


def matrix_kind(tensor: str) -> MatrixKind | None:
    """The kind of a resident matrix, by its tensor's name; None for kinds that only few models have."""
    if _PROJECTION.fullmatch(tensor):
        return "qkv"
    kinds: dict[str, MatrixKind] = {"head": "head", "attention.out": "out"}
    return kinds.get(".".join(tensor.split(".")[2:]) or tensor)


def resident_sources(checkpoint: Checkpoint) -> Iterator[tuple[str, list[SourceTensor]]]:
    """Yields every resident tensor with the checkpoint tensors that it is made from, in order; a matrix is
    made from one.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    if config.learned_positions:
        yield POSITIONS, [tensors[names.POSITIONS]]
    for layer, spec in enumerate(config.layers):
        name, prefix = names.LayerNames(layer), f"layers.{layer}"
        if spec.norms_input:
            yield from _norm(checkpoint, layer, "attention_norm")
        parts = config.projection_sizes(spec)
        for which in parts:
            yield f"{prefix}.attention.{which}", [tensors[name.projection(which)]]
        if spec.attention.bias:
            yield f"{prefix}.attention.qkv.bias", [tensors[name.projection_bias(which)] for which in parts]
        for which, size in zip("qk", config.head_norm_sizes(spec), strict=True):
            if size:
                yield f"{prefix}.attention.{which}_norm.weight", [tensors[name.head_norm(which)]]
                if spec.attention.head_norm_bias:
                    yield f"{prefix}.attention.{which}_norm.bias", [tensors[name.head_norm_bias(which)]]
        yield f"{prefix}.attention.out", [tensors[name.projection("o")]]
        if spec.attention.output_bias:
            yield f"{prefix}.attention.out.bias", [tensors[name.projection_bias("o")]]
        if spec.norms_output:
            yield from _norm(checkpoint, layer, "attention_output_norm")
        if spec.norms_input and spec.has_feed_forward:
            yield from _norm(checkpoint, layer, "feed_forward_norm")
        if spec.feed_forward.bias:
            yield f"{prefix}.feed_forward.gate.bias", [tensors[name.gate_bias]]
        if spec.feed_forward.output_bias:
            yield f"{prefix}.feed_forward.down.bias", [tensors[name.down_bias]]
        if spec.norms_output and spec.has_feed_forward:
            yield from _norm(checkpoint, layer, "feed_forward_output_norm")
        for weight in layer_weight_shapes(config, spec):
            yield f"{prefix}.{weight.name}", [tensors[name.weight(weight.name)]]
    for weight in model_weight_shapes(config):
        yield weight.name, [tensors[names.model_weight(weight.name)]]
    if config.final_norm:
        yield "final_norm.weight", [tensors[names.FINAL_NORM]]
    if config.final_norm and config.norm.bias:
        yield "final_norm.bias", [tensors[names.FINAL_NORM_BIAS]]
    if not config.tie_embeddings:
        yield "head", [tensors[names.HEAD]]
    if config.head_bias:
        yield "head.bias", [tensors[names.HEAD_BIAS]]


def _norm(
    checkpoint: Checkpoint, layer: int, which: names.NormName
) -> Iterator[tuple[str, list[SourceTensor]]]:
    name, tensors = names.LayerNames(layer), checkpoint.tensors
    yield f"layers.{layer}.{which}.weight", [tensors[name.norm(which)]]
    if checkpoint.config.norm.bias:
        yield f"layers.{layer}.{which}.bias", [tensors[name.norm_bias(which)]]


def held_matrix_bytes(checkpoint: Checkpoint, quant: QuantConfig) -> int:
    """The bytes of the largest down projection that is read in several blocks of columns; 0 if
    there is none.
    """
    layers = (layer for layer, records in enumerate(checkpoint.config.records) if records)
    downs = {layer: checkpoint.tensors[names.LayerNames(layer).down] for layer in layers}
    if checkpoint.config.is_sliced:
        # Codes are read once, as rows are.
        rounded = (
            it for it, down in downs.items() if down.quantized_rows(0, 0, quant.of("down", it)) is None
        )
        downs = {layer: downs[layer] for layer in rounded}
    sizes = (down.nbytes if _columns_bytes(down, quant) > DOWN_BLOCK_BYTES else 0 for down in downs.values())
    return max(sizes, default=0)


def _columns_bytes(down: SourceTensor, quant: QuantConfig) -> int:
    """The bytes of all columns in memory, either encoded or as values."""
    return down.values_nbytes if down.encoded_columns(0, 0, quant.plain) is None else down.nbytes


def _neurons(
    checkpoint: Checkpoint, layer: int, quant: QuantConfig, rounded: Mapping[str, RoundedRows]
) -> Iterator[Block]:
    matrices = names.LayerNames(layer).neurons(checkpoint.config.layers[layer])
    *by_rows, down = (checkpoint.tensors[name] for name in matrices)
    sources = (*(source.name for source in by_rows), down.name)
    stored = quant.of("feed_forward")
    kinds = ("gate", "up", "down") if len(by_rows) == 2 else ("gate", "down")
    neurons = down.shape[1]
    step = _rows_per_block(by_rows[0])
    held = max(1, DOWN_BLOCK_BYTES * neurons // (_columns_bytes(down, quant) * step)) * step
    for first in range(0, neurons, held):
        end = min(first + held, neurons)
        columns: Weights | EncodedColumns | None = None
        if down.name not in rounded:
            columns = down.encoded_columns(first, end, quant.plain)
            columns = down.columns(first, end) if columns is None else columns
        for start in range(first, end, step):
            stop = min(start + step, end)
            rows: tuple[Weights | SourceCodes | RoundedRows | EncodedColumns, ...] = tuple(
                _rows(source, start, stop, stored, rounded) for source in by_rows
            )
            if columns is None:
                rows += (rounded[down.name].taken(slice(start, stop)),)
            elif isinstance(columns, np.ndarray):
                rows += (columns[:, start - first : stop - first].T,)
            else:
                rows += (columns.taken(start - first, stop - first),)
            nbytes = sum(_share(source, start, stop, neurons) for source in (*by_rows, down))
            yield Block(
                neuron_file_name(layer),
                RECORDS_TENSOR,
                sources,
                kinds,
                (*(stored for _ in by_rows), quant.plain),
                rows,
                nbytes,
                stop == neurons,
            )


def _slices(
    checkpoint: Checkpoint, layer: int, quant: QuantConfig, rounded: Mapping[str, RoundedRows]
) -> Iterator[Block]:
    """Yields the blocks of a layer's slices, matrix by matrix: rows of gate and up, and columns of down."""
    sources = [
        checkpoint.tensors[name] for name in names.LayerNames(layer).neurons(checkpoint.config.layers[layer])
    ]
    *by_rows, down = sources
    kinds = ("gate", "up") if len(by_rows) == 2 else ("gate",)
    size, neurons = slice_neurons(checkpoint.config, quant), down.shape[1]
    formats = quant.of("feed_forward", layer), quant.of("down", layer)
    columns = _slices_of_columns(down, size, formats[1], rounded)
    for first, of_down in zip(range(0, neurons, size), columns, strict=True):
        stop = min(first + size, neurons)
        of_rows = [_rows(it, first, stop, formats[0], rounded) for it in by_rows]
        matrices = zip(
            sources,
            (*kinds, "down"),
            (*(formats[0] for _ in of_rows), formats[1]),
            (*of_rows, of_down),
            strict=True,
        )
        for source, kind, stored, rows in matrices:
            share, last = _share(source, first, stop, neurons), source is down and stop == neurons
            yield Block(
                neuron_file_name(layer),
                RECORDS_TENSOR,
                (source.name,),
                (kind,),
                (stored,),
                (rows,),
                share,
                last,
            )


def _slices_of_columns(
    down: SourceTensor, size: int, stored: RowFormat, rounded: Mapping[str, RoundedRows]
) -> Iterator[Weights | SourceCodes | RoundedRows]:
    """Yields the columns of a down projection, `size` at a time.

    If it is quantised, all codes are in memory at once; otherwise as many columns as fit into
    DOWN_BLOCK_BYTES.
    """
    outputs, neurons = down.shape
    held, known = neurons, rounded.get(down.name) or down.quantized_rows(0, outputs, stored)
    if known is None:
        held = max(1, DOWN_BLOCK_BYTES * neurons // (down.values_nbytes * size)) * size
    for first in range(0, neurons, held):
        end = min(first + held, neurons)
        columns = down.columns(first, end) if known is None else known
        for start in range(0, end - first, size):
            yield in_columns(columns, start, min(start + size, end - first), stored)


def _experts(checkpoint: Checkpoint, layer: int, quant: QuantConfig) -> Iterator[Block]:
    """Yields the blocks of a layer's experts, matrix by matrix, each followed by the biases of its products,
    if any.
    """
    name, spec, tensors = names.LayerNames(layer), checkpoint.config.layers[layer], checkpoint.tensors
    assert spec.experts is not None
    file, last = expert_file_name(layer), spec.experts.count - 1
    for expert in range(spec.experts.count):
        for which in names.expert_matrices(spec):
            source, stored = tensors[name.expert(expert, which)], quant.of(EXPERT_KINDS[which], layer)
            ends = (expert, which) == (last, "down")
            for block in _matrix(file, RECORDS_TENSOR, f"expert_{which}", source, stored, NOT_ROUNDED):
                yield replace(block, last=ends and block.last and not spec.experts.bias)
            if spec.experts.bias:
                bias = tensors[name.expert_bias(expert, which)]
                values = bias.vector()
                yield Block(file, RECORDS_TENSOR, (bias.name,), (), (), (values,), bias.nbytes, ends)


def _matrix(
    file: str,
    tensor: str,
    kind: str,
    source: SourceTensor,
    stored: RowFormat,
    rounded: Mapping[str, RoundedRows],
) -> Iterator[Block]:
    """Yields the rows of a matrix in blocks, each a multiple of 16 rows except the last."""
    count, step = source.shape[0], _rows_per_block(source)
    for start in range(0, count, step):
        stop = min(start + step, count)
        nbytes = _share(source, start, stop, count)
        rows = _rows(source, start, stop, stored, rounded)
        yield Block(file, tensor, (source.name,), (kind,), (stored,), (rows,), nbytes, stop == count)


def _values(tensor: str, source: SourceTensor) -> Iterator[Block]:
    """Yields the rows of a matrix that stays unchanged, such as learned positions. Each block is one vector.

    Raises CheckpointError if a value isn't finite.
    """
    count, step = source.shape[0], _rows_per_block(source)
    for start in range(0, count, step):
        stop = min(start + step, count)
        values = to_float32(source.rows(start, stop)).reshape(-1)
        if not np.isfinite(values).all():
            raise not_finite(source)
        nbytes = _share(source, start, stop, count)
        yield Block(RESIDENT, tensor, (source.name,), (), (), (values,), nbytes, stop == count)


def _rows(
    source: SourceTensor, start: int, stop: int, stored: RowFormat, rounded: Mapping[str, RoundedRows]
) -> Weights | SourceCodes | RoundedRows:
    if source.name in rounded:
        return rounded[source.name].taken(slice(start, stop))
    codes = source.quantized_rows(start, stop, stored)
    return source.rows(start, stop) if codes is None else codes


def _share(source: SourceTensor, start: int, stop: int, count: int) -> int:
    """The checkpoint bytes that count for rows or columns [start, stop) out of `count`. Shares add up to the
    total.
    """
    return source.nbytes * stop // count - source.nbytes * start // count


def _rows_per_block(source: SourceTensor) -> int:
    """Number of rows that are read at a time: full units, and a multiple of 16, which the kernels quantise
    together.
    """
    unit = lcm(16, source.row_unit)
    return max(unit, BLOCK_BYTES * source.shape[0] // source.values_nbytes // unit * unit)
