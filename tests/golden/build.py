"""Makes the golden bundle, and others like it: random weights from a frozen generator, every byte decided.

`python -m tests.golden.build` writes `tests/golden/bundle-v3`, which is under version control and must not
change: a new format version gets a new folder beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.file_layouts import TensorSpec, resident_tensors
from ondevice.bundle.layout import (
    EMBEDDING,
    PER_LAYER,
    ExpertLayout,
    RecordLayout,
    SliceLayout,
    embedding_layout,
    expert_file_name,
    expert_layout,
    gate_file_name,
    gate_layout,
    neuron_file_name,
    neuron_layout,
    per_layer_layout,
)
from ondevice.bundle.manifest import Provenance, TokenizerInfo
from ondevice.bundle.matrix_layout import TiledMatrix
from ondevice.bundle.tiles import lane_rows, tiles_of_lanes
from ondevice.bundle.writer import BundleWriter
from ondevice.config import QuantConfig
from ondevice.converters.architectures.common import llama_config
from ondevice.model_config import ModelConfig
from tests.support.crc32c import crc32c
from tests.support.planes import in_planes

GOLDEN = Path(__file__).parent / "bundle-v3"

FIELDS: dict[str, Any] = {
    "architecture": "llama",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_context": 128,
    "hidden_act": "relu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_embeddings": True,
}
"""A Llama's keys."""


def golden_config(**changes: Any) -> ModelConfig:
    """The golden bundle's config, with changed keys."""
    return llama_config(**(FIELDS | changes))


CONFIG = golden_config()
QUANT = QuantConfig(4)
NO_TOKENIZER = TokenizerInfo(bos_id=1, eos_ids=(2,), add_bos=True)


@dataclass(frozen=True)
class Recipe:
    """What a random bundle is made of."""

    config: ModelConfig = CONFIG
    quant: QuantConfig = QUANT
    tokenizer: TokenizerInfo = NO_TOKENIZER
    blobs: dict[str, bytes] = field(default_factory=dict)
    seed: int = 20
    fingerprint: str | None = "golden"


PROVENANCE = Provenance(
    source="random weights",
    source_format="none",
    converter_version="1",
    quantisation_error={"attention": 0.0625},
    notes=("made by tests/golden/build.py",),
)


def _random(*key: int) -> np.random.RandomState:
    """RandomState's streams are frozen by numpy's compatibility promise; Generator's are not."""
    return np.random.RandomState(np.array(key, np.uint32))


def records(recipe: Recipe, which: int) -> Iterator[np.ndarray]:
    """Random records of a layer, uint8 (n, stride), 40 at a time, or slices (stride,)."""
    layout = neuron_layout(recipe.config, recipe.quant, which)
    if isinstance(layout, SliceLayout):
        neurons = recipe.config.records[which]
        count = layout.num_records(neurons)
        for index, record in enumerate(_of_matrices(layout.tiles, count, _random(recipe.seed, 1, which + 1))):
            _clear(record, layout.tiles, neurons - index * layout.neurons)
            yield in_planes(record, layout)
        return
    left = recipe.config.records[which]
    random = _random(recipe.seed, 1, which + 1)
    while left:
        count = min(left, 40)
        yield _records(layout, count, random)
        left -= count


def embedding(recipe: Recipe) -> Iterator[np.ndarray]:
    """Random records of the embedding, uint8 (n, stride), 3 at a time: tiles of 16 tokens."""
    layout = embedding_layout(recipe.config, recipe.quant)
    matrix = TiledMatrix(recipe.config.vocab_size, layout.row)
    tiles = _tiles(matrix, _random(recipe.seed, 1, 0)).reshape(matrix.tiles, -1)
    for start in range(0, matrix.tiles, 3):
        chunk = tiles[start : start + 3]
        yield np.pad(chunk, ((0, 0), (0, layout.stride - chunk.shape[1])))


def gates(recipe: Recipe, layer: int) -> Iterator[np.ndarray]:
    """The gate rows of `records(recipe, layer)` as records of their own."""
    layout = gate_layout(recipe.config, recipe.quant)
    used = layout.row_bytes[0]
    for chunk in records(recipe, layer):
        rows = np.zeros((len(chunk), layout.stride), np.uint8)
        rows[:, :used] = chunk[:, :used]
        yield rows


def inputs(recipe: Recipe) -> Iterator[np.ndarray]:
    """Random records of per-layer inputs, uint8 (n, stride)."""
    layout = per_layer_layout(recipe.config, recipe.quant)
    yield _records(layout, recipe.config.vocab_size, _random(recipe.seed, 4))


def experts(recipe: Recipe, layer: int) -> Iterator[np.ndarray]:
    """Random records of experts that are stored as matrices, (stride,) uint8 each."""
    layout, spec = expert_layout(recipe.config, recipe.quant, layer), recipe.config.experts
    assert layout is not None
    assert spec is not None
    yield from _of_matrices(layout, spec.count, _random(recipe.seed, 3, layer))


def _of_matrices(layout: ExpertLayout, count: int, random: np.random.RandomState) -> Iterator[np.ndarray]:
    """`count` random records of matrices, (stride,) uint8 each."""
    for _ in range(count):
        record = np.frombuffer(random.bytes(layout.stride), np.uint8).copy()
        for start, stop in layout.padding:
            record[start:stop] = 0
        for halves in layout.halves:
            size = halves.stop - halves.start
            for place in range(halves.times):
                at = halves.start + halves.step * place
                record[at : at + size] = _halves(random, 1, size // 2)[0]
        for start, stop in layout.floats:
            record[start:stop] = random.standard_normal((stop - start) // 4).astype(np.float32).view(np.uint8)
        yield record


def _tiles(matrix: TiledMatrix, random: np.random.RandomState) -> np.ndarray:
    """Random tiles (nbytes,) uint8 of a matrix, with zeros for the rows that fill the last one."""
    tiles = np.frombuffer(random.bytes(matrix.nbytes), np.uint8).copy()
    halves = matrix.halves
    size = halves.stop - halves.start
    values = _halves(random, halves.times, size // 2)
    for place in range(halves.times):
        at = halves.start + halves.step * place
        tiles[at : at + size] = values[place]
    rows = lane_rows(tiles.reshape(matrix.tiles, -1), matrix.row)[: matrix.rows]
    return tiles_of_lanes(rows, matrix.row).reshape(-1)


def _clear(record: np.ndarray, layout: ExpertLayout, neurons: int) -> None:
    """Zeroes what a slice (stride,) holds of neurons from number `neurons` on: whole blocks of 64."""
    *by_rows, down = layout.matrices
    if neurons >= layout.neurons:
        return
    for offset, matrix in zip(layout.part_offsets, by_rows, strict=False):
        record[offset + neurons * matrix.row.nbytes : offset + matrix.rows_bytes] = 0
    tiles = record[layout.part_offsets[-1] :][: down.rows_bytes]
    blocks = tiles.reshape(-1, down.row.padded_cols // down.block_cols, down.block_bytes)
    blocks[:, neurons // down.block_cols :] = 0


def _records(layout: RecordLayout, count: int, random: np.random.RandomState) -> np.ndarray:
    chunk = np.zeros((count, layout.stride), np.uint8)
    for offset, rows in zip(layout.part_offsets, layout.parts, strict=True):
        for row in rows:
            values = [random.bytes(count * row.codes_bytes)]
            if row.bits == 16:
                values = [random.standard_normal((count, row.padded_cols)).astype("<f2").tobytes()]
            runs = [np.frombuffer(values[0], np.uint8).reshape(count, row.codes_bytes)]
            runs += [_halves(random, count, row.groups) for _ in range(2) if row.bits != 16]
            for run in runs:
                chunk[:, offset : offset + run.shape[1]] = run
                offset += run.shape[1]
    return chunk


def _halves(random: np.random.RandomState, rows: int, groups: int) -> np.ndarray:
    return (random.random_sample((rows, groups)) / 64).astype("<f2").view(np.uint8)


def tensors(recipe: Recipe, first: int = 0) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """Random resident tensors from number `first` on, each in two pieces."""
    specs = resident_tensors(recipe.config, recipe.quant).items()
    for index, (name, spec) in enumerate(specs):
        if index >= first:
            yield name, iter(np.array_split(_tensor(spec, _random(recipe.seed, 2, index)), 2))


def _tensor(spec: TensorSpec, random: np.random.RandomState) -> np.ndarray:
    if spec.matrix is not None:
        return _tiles(spec.matrix, random).view(spec.numpy_dtype).reshape(spec.shape)
    return (random.random_sample(spec.shape) / 64).astype(spec.numpy_dtype)


def fill(writer: BundleWriter, recipe: Recipe) -> None:
    """Writes what `writer` hasn't got yet, the way a converter does."""
    for layer in range(recipe.config.num_layers):
        writer.write_records(neuron_file_name(layer), records(recipe, layer))
        if recipe.config.zeros_gates:
            writer.write_records(gate_file_name(layer), gates(recipe, layer))
        if layer in recipe.config.expert_layers:
            writer.write_records(expert_file_name(layer), experts(recipe, layer))
    writer.write_records(EMBEDDING, embedding(recipe))
    if recipe.config.has_inputs_table:
        writer.write_records(PER_LAYER, inputs(recipe))
    writer.write_resident(tensors(recipe, writer.resident_finished()))
    for name, data in recipe.blobs.items():
        writer.add_blob(name, data)
    writer.finish(recipe.tokenizer, {"temperature": 0.5, "top_k": 40}, PROVENANCE)


if __name__ == "__main__":
    golden = Recipe()
    fill(BundleWriter(GOLDEN, golden.config, golden.quant, crc32c, fingerprint=golden.fingerprint), golden)
