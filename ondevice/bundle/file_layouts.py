"""The layout of each file of a bundle: its tensors or records, its safetensors header, its CRC units.

Pure arithmetic over ModelConfig and QuantConfig; it opens no file. `weights/README.md` is the specification.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal

import numpy as np

from ondevice.bundle.layout import (
    CRC_BLOCK_BYTES,
    DATA_OFFSET,
    EMBEDDING,
    PER_LAYER,
    POSITIONS,
    RECORDS_TENSOR,
    RESIDENT,
    RESIDENT_BLOCK_BYTES,
    ExpertLayout,
    RecordLayout,
    SliceLayout,
    TileLayout,
    embedding_layout,
    embedding_tiles,
    expert_layout,
    gate_layout,
    head_matrix,
    neuron_layout,
    out_matrix,
    per_layer_layout,
    projection_matrices,
)
from ondevice.bundle.matrix_layout import HalfRange, RowLayout, TiledMatrix, padded
from ondevice.bundle.weight_shapes import WeightShape, layer_weight_shapes, model_weight_shapes
from ondevice.config import QuantConfig, RowFormat
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

SafetensorsType = Literal["F32", "F16", "U32", "U8"]
_NUMPY_TYPES: dict[SafetensorsType, str] = {"F32": "<f4", "F16": "<f2", "U32": "<u4", "U8": "u1"}


@dataclass(frozen=True)
class TensorSpec:
    """Type (in safetensors' spelling) and shape of one tensor. matrix: the matrix that it holds as tiles."""

    dtype: SafetensorsType
    shape: tuple[int, ...]
    matrix: TiledMatrix | None = None

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(_NUMPY_TYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        return self.numpy_dtype.itemsize * prod(self.shape)

    @property
    def halves(self) -> tuple[HalfRange, ...]:
        """The tensor's bytes that hold float16 values or scales of MXFP4."""
        if self.matrix is not None:
            return (self.matrix.halves,)
        return (HalfRange(0, self.nbytes),) if self.dtype == "F16" else ()


def tiles_tensor(matrix: TiledMatrix) -> TensorSpec:
    """The safetensors entry of a matrix that is stored as tiles."""
    if matrix.row.bits == 16:
        return TensorSpec("F16", (matrix.padded_rows, matrix.row.padded_cols), matrix)
    return TensorSpec("U8", (matrix.tiles, matrix.tile_bytes), matrix)


def linear_tensors(name: str, rows: int, cols: int, stored: RowFormat) -> dict[str, TensorSpec]:
    """Tensors of the quantized matrix `name`, (rows, cols), stored row by row, as in sidecars."""
    row = RowLayout(cols, *stored)
    if row.bits == 16:
        return {f"{name}.codes": TensorSpec("F16", (rows, row.padded_cols))}
    pairs = TensorSpec("F16", (rows, row.groups))
    codes = TensorSpec("U32", (rows, row.codes_bytes // 4))
    return {f"{name}.codes": codes, f"{name}.scales": pairs, f"{name}.biases": pairs}


def norm_tensors(name: str, config: ModelConfig) -> dict[str, TensorSpec]:
    """Tensors of a norm over the model's width."""
    spec = TensorSpec("F32", (config.hidden_size,))
    return {f"{name}.weight": spec} | ({f"{name}.bias": spec} if config.norm.bias else {})


def resident_tensors(config: ModelConfig, quant: QuantConfig) -> dict[str, TensorSpec]:
    """The exact tensors of the resident file, in the order of their bytes."""
    tensors: dict[str, TensorSpec] = {}
    if config.learned_positions:
        tensors[POSITIONS] = TensorSpec("F32", (config.max_context, config.hidden_size))
    for layer in range(config.num_layers):
        tensors |= _layer_tensors(layer, config, quant)
    tensors |= _weight_tensors("", model_weight_shapes(config), quant)
    if config.final_norm:
        tensors |= norm_tensors("final_norm", config)
    if config.part.heads and not config.tie_embeddings:
        tensors["head"] = tiles_tensor(head_matrix(config, quant))
    if config.head_bias:
        tensors["head.bias"] = TensorSpec("F32", (config.vocab_size,))
    return tensors


def resident_matrices(config: ModelConfig, quant: QuantConfig) -> tuple[TiledMatrix, ...]:
    """The matrices that every token uses, without neurons: those of the resident file, and a tied head."""
    specs = resident_tensors(config, quant).values()
    tied = (head_matrix(config, quant),) if config.part.heads and config.tie_embeddings else ()
    return (*(spec.matrix for spec in specs if spec.matrix is not None), *tied)


def _layer_tensors(layer: int, config: ModelConfig, quant: QuantConfig) -> dict[str, TensorSpec]:
    hidden, spec, prefix = config.hidden_size, config.layers[layer], f"layers.{layer}"
    attention = f"{prefix}.attention"

    def vector(name: str, size: int) -> dict[str, TensorSpec]:
        return {name: TensorSpec("F32", (size,))} if size else {}

    def norm(name: str, exists: bool) -> dict[str, TensorSpec]:
        return norm_tensors(f"{prefix}.{name}", config) if exists else {}

    tensors = norm("attention_norm", spec.norms_input)
    for part, matrix in projection_matrices(config, quant, layer).items():
        tensors[f"{attention}.{part}"] = tiles_tensor(matrix)
    tensors |= vector(f"{attention}.qkv.bias", config.qkv_rows(spec) * spec.attention.bias)
    for which, size in zip("qk", config.head_norm_sizes(spec), strict=True):
        tensors |= vector(f"{attention}.{which}_norm.weight", size)
        tensors |= vector(f"{attention}.{which}_norm.bias", size * spec.attention.head_norm_bias)
    tensors[f"{attention}.out"] = tiles_tensor(out_matrix(config, quant, layer))
    tensors |= vector(f"{attention}.out.bias", hidden * spec.attention.output_bias)
    tensors |= norm("attention_output_norm", spec.norms_output)
    tensors |= norm("feed_forward_norm", spec.norms_input and spec.has_feed_forward)
    tensors |= vector(f"{prefix}.feed_forward.gate.bias", config.neurons(spec) * spec.feed_forward.bias)
    tensors |= vector(f"{prefix}.feed_forward.down.bias", hidden * spec.feed_forward.output_bias)
    tensors |= norm("feed_forward_output_norm", spec.norms_output and spec.has_feed_forward)
    return tensors | _weight_tensors(f"{prefix}.", layer_weight_shapes(config, spec), quant)


def _weight_tensors(prefix: str, weights: Iterable[WeightShape], quant: QuantConfig) -> dict[str, TensorSpec]:
    tensors: dict[str, TensorSpec] = {}
    for weight in weights:
        matrix = weight.tiled(quant)
        spec = TensorSpec("F32", weight.shape) if matrix is None else tiles_tensor(matrix)
        tensors[f"{prefix}{weight.name}"] = spec
    return tensors


def resident_header(tensors: Mapping[str, TensorSpec]) -> bytes:
    """The resident file up to its data: the safetensors length and header, space-padded to `DATA_OFFSET`s."""
    entries = {}
    offset = 0
    for name, spec in tensors.items():
        entries[name] = _header_entry(spec.dtype, spec.shape, offset, spec.nbytes)
        offset += spec.nbytes
    return _header(entries)


def record_header(num_records: int, stride: int) -> bytes:
    """The first `DATA_OFFSET` bytes of a record file."""
    return _header({RECORDS_TENSOR: _header_entry("U8", (num_records, stride), 0, num_records * stride)})


def _header_entry(dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}


def _header(entries: Mapping[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    length = padded(8 + len(text), DATA_OFFSET) - 8
    return length.to_bytes(8, "little") + text.ljust(length, b" ")


@dataclass(frozen=True)
class FileLayout:
    """The properties of a file that follow from model and format: its size, its header and its CRC units.

    nbytes: size of the file, or None if only the manifest knows it (tokenizer files). record: None unless the
    file holds records. halves: ranges of float16 values in every record, or in a file without records.
    floats: likewise of float32 values, [start, stop).
    """

    nbytes: int | None
    header: bytes
    crc_start: int
    crc_units: tuple[int, ...]
    record: RecordLayout | TileLayout | ExpertLayout | SliceLayout | None = None
    halves: tuple[HalfRange, ...] = ()
    floats: tuple[tuple[int, int], ...] = ()

    @property
    def halves_period(self) -> int:
        """Bytes after which `halves` repeat, from `crc_start` on; 0 if they describe the entire file."""
        return 0 if self.record is None else self.record.stride

    def crc_count(self, nbytes: int) -> int:
        """Number of CRC entries of the file if its size is `nbytes`."""
        cycles, rest = divmod(nbytes - self.crc_start, sum(self.crc_units))
        return cycles * len(self.crc_units) + (rest > 0)


def tensors_layout(tensors: Mapping[str, TensorSpec], block_bytes: int = CRC_BLOCK_BYTES) -> FileLayout:
    """Layout of a safetensors file with these tensors, and a CRC for every `block_bytes`."""
    header = resident_header(tensors)
    halves, floats = [], []
    offset = len(header)
    for spec in tensors.values():
        halves += [part.shifted(offset) for part in spec.halves]
        if spec.dtype == "F32":
            floats.append((offset, offset + spec.nbytes))
        offset += spec.nbytes
    return FileLayout(offset, header, 0, (block_bytes,), halves=tuple(halves), floats=tuple(floats))


def file_layout(name: str, config: ModelConfig, quant: QuantConfig) -> FileLayout:
    """Layout of the file `name` of a bundle (any but the manifest and the checksum table)."""
    if name == RESIDENT:
        return tensors_layout(resident_tensors(config, quant), RESIDENT_BLOCK_BYTES)
    if name == EMBEDDING:
        return _record_file(embedding_tiles(config), embedding_layout(config, quant))
    if name == PER_LAYER:
        return _record_file(config.vocab_size, per_layer_layout(config, quant))
    if name.startswith("neurons-"):
        layer = _layer_of(name)
        neurons = neuron_layout(config, quant, layer)
        return _record_file(neurons.num_records(config.records[layer]), neurons)
    if name.startswith("gates-"):
        return _record_file(config.records[_layer_of(name)], gate_layout(config, quant))
    if name.startswith("experts-"):
        layer = _layer_of(name)
        layout, spec = expert_layout(config, quant, layer), config.layers[layer].experts
        assert layout is not None
        assert spec is not None
        return _record_file(spec.count, layout)
    return FileLayout(None, b"", 0, (CRC_BLOCK_BYTES,))


def _layer_of(name: str) -> int:
    """The layer that the file `name` of neurons, gates or experts belongs to."""
    return int(name.partition("-")[2].removesuffix(".safetensors"))


def _record_file(
    num_records: int, record: RecordLayout | TileLayout | ExpertLayout | SliceLayout
) -> FileLayout:
    header = record_header(num_records, record.stride)
    nbytes = DATA_OFFSET + num_records * record.stride
    floats = record.floats if isinstance(record, ExpertLayout) else ()
    return FileLayout(nbytes, header, DATA_OFFSET, record.part_bytes, record, record.halves, floats)
