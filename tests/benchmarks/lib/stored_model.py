"""A small bundle's rows in memory, and a bundle written from rows that are quantised already.

Nothing here knows what the rows are for. Legend: D hidden size, F neurons of a layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ondevice.backends.base import Float32
from ondevice.bundle.about import ABOUT
from ondevice.bundle.layout import (
    EMBEDDING,
    RESIDENT,
    RecordLayout,
    embedding_layout,
    gate_file_name,
    gate_layout,
    neuron_file_name,
    neuron_layout,
)
from ondevice.bundle.manifest import Manifest, Provenance
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout, TiledMatrix
from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import StoredMatrix
from ondevice.bundle.writer import BundleWriter
from ondevice.config import GROUP_SIZE, QuantConfig
from ondevice.converters.architectures.common import score_scale
from ondevice.converters.architectures.rotary import base_of, rope_spec
from ondevice.converters.bundling import pack_records
from ondevice.converters.quantize import QuantizedRows, dequantize, quantize
from ondevice.kernels import _native
from ondevice.model_config import ModelConfig
from ondevice.units import usable_cores
from tests.support.stored_matrices import embedding_matrix, resident_matrix

Q4 = QuantConfig(4)
Neurons: TypeAlias = tuple[QuantizedRows, QuantizedRows, QuantizedRows]
"""A layer's gate, up and down rows, F each."""


@dataclass(frozen=True)
class AttentionRows:
    """One layer's attention and norms."""

    attention_norm: Float32
    qkv: QuantizedRows
    out: QuantizedRows
    feed_forward_norm: Float32


@dataclass(frozen=True)
class StoredModel:
    """All weights of a bundle, as it stores them. Its head is tied to the embedding."""

    bundle: Bundle
    attention: tuple[AttentionRows, ...]
    neurons: tuple[Neurons, ...]
    embedding: QuantizedRows
    final_norm: Float32

    @property
    def config(self) -> ModelConfig:
        return self.bundle.config


def read_model(folder: Path) -> StoredModel:
    """The rows of the bundle in `folder`, whose embeddings are tied. Raises BundleError for slices."""
    bundle = Bundle.open(folder)
    config, resident = bundle.config, load_file(folder / RESIDENT)
    spec = config.layers[0].attention
    if not config.tie_embeddings or spec.bias or spec.head_norm != "none" or not base_of(config.ropes[0]):
        raise ValueError(f"{folder} isn't a plain Llama model with tied embeddings")
    attention, neurons = [], []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        attention.append(
            AttentionRows(
                resident[f"{prefix}.attention_norm.weight"],
                _joined([of_bundle(bundle, f"{prefix}.attention.{part}") for part in "qkv"]),
                of_bundle(bundle, f"{prefix}.attention.out"),
                resident[f"{prefix}.feed_forward_norm.weight"],
            )
        )
        gate, up, down = unpacked(folder / neuron_file_name(layer), bundle.record_layout)
        neurons.append((gate, up, down))
    embedding = quantized_rows(embedding_matrix(bundle))
    return StoredModel(bundle, tuple(attention), tuple(neurons), embedding, resident["final_norm.weight"])


def of_bundle(bundle: Bundle, name: str) -> QuantizedRows:
    """The matrix of the resident tensor `name`."""
    return quantized_rows(resident_matrix(bundle, name))


def quantized_rows(matrix: StoredMatrix) -> QuantizedRows:
    return QuantizedRows(matrix.codes, matrix.scales.view(np.float16), matrix.biases)


def _joined(pieces: Sequence[QuantizedRows]) -> QuantizedRows:
    """The rows of all pieces, one piece after the other."""
    return QuantizedRows(
        np.concatenate([rows.codes for rows in pieces]),
        np.concatenate([rows.scales for rows in pieces]),
        np.concatenate([rows.biases for rows in pieces]),
    )


def matrix_of(tensors: Mapping[str, NDArray[np.generic]], name: str) -> QuantizedRows:
    """The matrix `name` of a sidecar's tensors."""
    codes, scales, biases = (tensors[f"{name}.{part}"] for part in ("codes", "scales", "biases"))
    return QuantizedRows(codes.view(np.uint8), scales.view(np.float16), biases.view(np.float16))


def unpacked(path: Path, layout: RecordLayout) -> list[QuantizedRows]:
    """The rows of a record file, in the order of the layout's parts."""
    records, found = load_file(path)["records"], []
    for part, start in zip(layout.parts, layout.part_offsets, strict=True):
        offset = start
        for row in part:
            found.append(_row(records[:, offset : offset + row.nbytes], row))
            offset += row.nbytes
    return found


def _row(stored: NDArray[np.uint8], row: RowLayout) -> QuantizedRows:
    first, second = row.codes_bytes, row.codes_bytes + row.scales_bytes
    codes, scales, biases = (np.ascontiguousarray(a) for a in np.split(stored, [first, second], axis=1))
    return QuantizedRows(codes, scales.view(np.float16), biases.view(np.float16))


def small_in_q4(source: Path, head_dim: int, folder: Path) -> StoredModel:
    """Write the bundle `source` to `folder` in q4 and with wider heads, and return its rows.

    A head of `head_dim` has the source's rotary pairs at those of its own that turn at the same frequency;
    its other rows are zero. Scores are divided by the root of the head's width, so q is scaled by the root of
    the ratio of widths before it is rounded. Another model with heads of this width can then hold the rows
    as they are.
    """
    small = read_model(source)
    config, bits, runner = small.config, small.bundle.quant.bits, _native.Runner(usable_cores())
    scale = score_scale(head_dim)
    layers = (replace(layer, attention=replace(layer.attention, scale=scale)) for layer in config.layers)
    ropes = (rope_spec(base_of(config.ropes[0]), head_dim),)
    wide = replace(config, head_dim=head_dim, ropes=ropes, layers=tuple(layers))

    def rounded(rows: QuantizedRows) -> QuantizedRows:
        return quantize(runner, dequantize(rows, bits, config.hidden_size), Q4.bits, "weights")

    attention = []
    for rows in small.attention:
        qkv = widened_qkv(dequantize(rows.qkv, bits, config.hidden_size), config, head_dim)
        out = widened_context(dequantize(rows.out, bits, config.query_size), config, head_dim)
        q4_qkv, q4_out = (quantize(runner, m, Q4.bits, "attention") for m in (qkv, out))
        attention.append(AttentionRows(rows.attention_norm, q4_qkv, q4_out, rows.feed_forward_norm))
    neurons = [(rounded(gate), rounded(up), rounded(down)) for gate, up, down in small.neurons]
    embedding = rounded(small.embedding)
    write_bundle(
        folder,
        small.bundle,
        wide,
        attention=iter(attention),
        neurons=neurons.__getitem__,
        embedding=[embedding],
        final_norm=small.final_norm,
        notes=(f"heads of {head_dim}, for an embedding in a larger shape",),
    )
    return read_model(folder)


def pair_places(head_dim: int, wide: int) -> NDArray[np.int64]:
    """Where a head's rows are in one of `wide` rows: pairs of halves at the frequencies that they have.

    Pair i of a head of d turns by theta^(-2i/d) a position, as pair i * wide / d of the wide head does.
    """
    if wide % head_dim:
        raise ValueError(f"a head of {wide} has no pairs at the frequencies of one of {head_dim}")
    pairs = np.arange(head_dim // 2) * (wide // head_dim)
    return np.concatenate([pairs, pairs + wide // 2])


def widened_qkv(matrix: Float32, config: ModelConfig, wide: int) -> Float32:
    """Rows of q, k and v, those of all heads, as rows of heads of `wide`. q has its scores' scale."""
    places = pair_places(config.head_dim, wide)
    heads = matrix.reshape(-1, config.head_dim, matrix.shape[1]).copy()
    heads[: config.num_heads] *= np.float32((wide / config.head_dim) ** 0.5)
    found = np.zeros((len(heads), wide, matrix.shape[1]), np.float32)
    found[:, places] = heads
    return found.reshape(-1, matrix.shape[1])


def widened_context(matrix: Float32, config: ModelConfig, wide: int) -> Float32:
    """Columns that meet the heads' contexts, as columns of heads of `wide`."""
    heads = matrix.reshape(len(matrix), -1, config.head_dim)
    found = np.zeros((len(matrix), heads.shape[1], wide), np.float32)
    found[:, :, pair_places(config.head_dim, wide)] = heads
    return found.reshape(len(matrix), -1)


def write_bundle(
    folder: Path,
    source: Bundle,
    config: ModelConfig,
    *,
    attention: Iterator[AttentionRows],
    neurons: Callable[[int], Neurons],
    embedding: Iterable[QuantizedRows],
    final_norm: Float32,
    head: Iterable[QuantizedRows] = (),
    notes: tuple[str, ...] = (),
) -> Manifest:
    """Write a q4 bundle layer by layer, with the tokenizer and the chat template of `source`.

    Args:
        folder: the new folder.
        source: the bundle that the text's parts come from.
        config: the new model.
        attention: every layer's attention.
        neurons: a layer's neurons; asked for once a layer, in order.
        embedding: the table, in pieces of ascending ids.
        final_norm: the last norm's weights.
        head: the head, in pieces; without `tie_embeddings` only.
        notes: what `bundle.json` says of where the weights come from.
    """
    writer = BundleWriter(folder, config, Q4, _native.crc32c)
    records, gates = neuron_layout(config, Q4, 0), gate_layout(config, Q4)
    assert isinstance(records, RecordLayout)
    for layer in range(config.num_layers):
        rows = neurons(layer)
        writer.write_records(neuron_file_name(layer), [pack_records(rows, records)])
        if config.zeros_gates:
            writer.write_records(gate_file_name(layer), [pack_records(rows[:1], gates)])
    table = embedding_layout(config, Q4)
    tiles = (_tiles(rows, table.row) for rows in _in_sixteens(embedding))
    writer.write_records(EMBEDDING, (np.pad(it, ((0, 0), (0, table.stride - it.shape[1]))) for it in tiles))
    writer.write_resident(_resident(config, attention, final_norm, head))
    for name in source.manifest.tokenizer.files:
        writer.add_blob(name, source.read_small(name))
    provenance = Provenance(source.manifest.provenance.source, "embedded", "0", notes=notes)
    found = writer.finish(source.manifest.tokenizer, source.manifest.generation, provenance)
    (folder / ABOUT).write_text("\n".join(notes) + "\n")
    return found


def _resident(
    config: ModelConfig,
    attention: Iterator[AttentionRows],
    final_norm: Float32,
    head: Iterable[QuantizedRows],
) -> Iterator[tuple[str, Iterable[NDArray[np.generic]]]]:
    row = RowLayout(config.hidden_size, Q4.bits)
    for layer, rows in enumerate(attention):
        prefix, first = f"layers.{layer}", 0
        yield f"{prefix}.attention_norm.weight", [rows.attention_norm]
        for part, count in config.projection_sizes(config.layers[layer]).items():
            yield f"{prefix}.attention.{part}", [_tiles(_some(rows.qkv, first, count), row)]
            first += count
        context = RowLayout(config.query_size, Q4.bits)
        yield f"{prefix}.attention.out", [_tiles(rows.out, context)]
        yield f"{prefix}.feed_forward_norm.weight", [rows.feed_forward_norm]
    yield "final_norm.weight", [final_norm]
    if not config.tie_embeddings:
        yield "head", (_tiles(rows, row) for rows in _in_sixteens(head))


def _some(rows: QuantizedRows, first: int, count: int) -> QuantizedRows:
    own = slice(first, first + count)
    return QuantizedRows(rows.codes[own], rows.scales[own], rows.biases[own])


def _in_sixteens(pieces: Iterable[QuantizedRows]) -> Iterator[QuantizedRows]:
    """The same rows in pieces that fill whole tiles, but for the last."""
    left: QuantizedRows | None = None
    for piece in pieces:
        rows = piece if left is None else _joined([left, piece])
        whole = len(rows.codes) // TILE_ROWS * TILE_ROWS
        if whole:
            yield _some(rows, 0, whole)
        left = _some(rows, whole, len(rows.codes) - whole)
    if left is not None and len(left.codes):
        yield left


def _tiles(rows: QuantizedRows, row: RowLayout) -> NDArray[np.uint8]:
    """The tiles (n, bytes of 16 rows) of rows."""
    matrix = TiledMatrix(len(rows.codes), row)
    out, halves = np.empty(matrix.nbytes, np.uint8), (rows.scales, rows.biases)
    scales, biases = (np.ascontiguousarray(part).view(np.uint8) for part in halves)
    codes = np.ascontiguousarray(rows.codes)
    _native.tile_rows(_native.Runner(1), row.stored, codes, scales, biases, out)
    return out.reshape(matrix.tiles, -1)


def place_groups(
    rows: QuantizedRows, bits: int, groups: int, places: NDArray[np.int64], random: np.random.Generator
) -> QuantizedRows:
    """`rows` in rows of `groups` groups, their own groups at `places`.

    The other groups have codes like any other, and no function: their scales and biases are zero.
    """
    count, group_bytes = len(rows.codes), GROUP_SIZE * bits // 8
    codes = random_codes(random, count, groups * group_bytes).reshape(count, groups, group_bytes)
    scales, biases = (np.zeros((count, groups), np.float16) for _ in range(2))
    codes[:, places] = rows.codes.reshape(count, -1, group_bytes)
    scales[:, places], biases[:, places] = rows.scales, rows.biases
    return QuantizedRows(codes.reshape(count, -1), scales, biases)


def taken(rows: QuantizedRows, ids: NDArray[np.int64]) -> QuantizedRows:
    """The rows `ids`."""
    return QuantizedRows(rows.codes[ids], rows.scales[ids], rows.biases[ids])


def random_codes(random: np.random.Generator, rows: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes (rows, nbytes)."""
    return np.frombuffer(random.bytes(rows * nbytes), np.uint8).reshape(rows, nbytes).copy()
