"""Bundles as running models and as plain weights, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

import ondevice.runtime.engine
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend
from ondevice.backends.stored_rows import values_of
from ondevice.budget.mlx_memory import MlxMemory
from ondevice.budget.sizes import buffer_shape, expert_shape, segment_shape
from ondevice.bundle.codes import E2M1
from ondevice.bundle.layout import (
    EMBEDDING,
    RESIDENT,
    SliceLayout,
    neuron_file_name,
)
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import joined_slices, untiled
from ondevice.callbacks import IsCancelled
from ondevice.config import RuntimeConfig
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import ModelConfig
from ondevice.runtime.neuron_memory import segment_pool
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.speculation.policy import TreePolicy

BackendName = Literal["reference", "cpu", "mlx"]


@contextmanager
def running(folder: Path | Bundle, backend: BackendName = "reference") -> Iterator[Transformer]:
    """The bundle's model, everything resident; on `mlx` one without experts."""
    bundle = folder if isinstance(folder, Bundle) else Bundle.open(folder)
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        if backend == "reference":
            reference = ReferenceBackend()
            yield Transformer(bundle.config, reference, load_weights(bundle, reader, reference))
            return
        segments, buffers = (
            segment_shape(bundle.config, bundle.quant),
            buffer_shape(bundle.config, bundle.quant),
        )
        if backend == "mlx":
            from ondevice.backends.mlx import MlxBackend

            memory = MlxMemory(bundle.config, bundle.quant, RuntimeConfig(backend="mlx", sparsity="dense"))
            mlx = MlxBackend(segment_neurons=memory.ranges.neurons)
            loaded = load_weights(bundle, reader, mlx)
            whole = segment_pool(mlx, reader, memory.ranges, memory.buffers)
            whole.resize(memory.ranges.quota(memory.ranges.total))
            yield Transformer(bundle.config, mlx, loaded)
            whole.close()
            return
        cpu = CpuBackend(
            make_runner(threads=1), segment_neurons=segments.neurons, piece_neurons=buffers.neurons
        )
        weights = load_weights(bundle, reader, cpu)
        if bundle.config.experts is not None:
            fetcher = expert_fetcher(bundle, reader, cpu)
            yield Transformer(bundle.config, cpu, weights)
            fetcher.close()
            return
        pool = segment_pool(cpu, reader, segments, buffers)
        pool.resize(segments.quota(segments.total))
        yield Transformer(bundle.config, cpu, weights)
        pool.close()


def expert_fetcher(
    bundle: Bundle,
    reader: FlashReader,
    backend: CpuBackend,
    slots: int | None = None,
) -> ExpertFetcher:
    """Experts for a backend that has loaded a bundle: all in memory, or in `slots` slots, one a segment."""
    config, experts = bundle.config, bundle.config.experts
    assert experts is not None
    shape = expert_shape(config, bundle.quant, experts)
    specs = [layer.experts for layer in config.layers]
    fetcher = ExpertFetcher(
        backend.feed_forwards,
        reader,
        specs,
        shape.slot_bytes,
        1,
        shape.reserve,
        of_model=experts,
    )
    total = experts.count * sum(spec is not None for spec in specs)
    fetcher.resize([slots or total + shape.reserve])
    return fetcher


def all_logits(model: Transformer, tokens: list[int], kv_bits: Literal[32, 16, 8] = 16) -> np.ndarray:
    """(T, V) logits of one sequence in one pass."""
    layout = KVLayout(model.config, kv_bits)
    return every_logits(model, tokens, SequenceState(layout, arrays=model.backend.new_arrays(layout)))


def every_logits(
    model: Transformer, tokens: list[int], kv: SequenceState, cancelled: IsCancelled | None = None
) -> np.ndarray:
    """(T, V) logits of the tokens that follow what kv holds, from one pass, put together from pieces."""
    return np.concatenate(list(model.every_logits(ForwardBatch(tokens), kv, 3, cancelled)))


def random_tokens(config: ModelConfig, count: int, seed: int = 7) -> list[int]:
    """Ids of the model's vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, config.vocab_size, count)]


def error(mine: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference, as a part of the largest value."""
    return float(np.abs(mine - theirs).max() / np.abs(theirs).max())


def bundle_weights(folder: Path) -> dict[str, np.ndarray]:
    """The float weights that a bundle stands for, under Hugging Face's names; read without our readers."""
    return dict(each_weight(folder))


def each_weight(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each of `bundle_weights` with its name, layer by layer, so that large models needn't be in memory."""
    bundle = Bundle.open(folder)
    config, quant = bundle.config, bundle.quant
    resident = load_file(folder / RESIDENT)
    hidden = config.hidden_size
    embedding = TiledMatrix(config.vocab_size, RowLayout(hidden, *quant.of("embedding")))
    yield "model.norm.weight", resident["final_norm.weight"]
    table = load_file(folder / EMBEDDING)["records"]
    yield "model.embed_tokens.weight", _of_tiles(table[:, : embedding.tile_bytes], embedding)
    if not config.tie_embeddings:
        head = TiledMatrix(config.vocab_size, RowLayout(hidden, *quant.of("head")))
        yield "lm_head.weight", _of_tiles(resident["head"], head)
    for i, spec in enumerate(config.layers):
        layer, attention = f"model.layers.{i}", f"layers.{i}.attention"
        first = 0
        for name, count in config.projection_sizes(spec).items():
            rows = slice(first, first + count)
            part = TiledMatrix(count, RowLayout(hidden, *quant.of("qkv", i, name)))
            yield f"{layer}.self_attn.{name}_proj.weight", _of_tiles(resident[f"{attention}.{name}"], part)
            if spec.attention.bias:
                yield f"{layer}.self_attn.{name}_proj.bias", resident[f"{attention}.qkv.bias"][rows]
            first += count
        out = TiledMatrix(hidden, RowLayout(config.out_cols(spec), *quant.of("out", i)))
        yield f"{layer}.self_attn.o_proj.weight", _of_tiles(resident[f"{attention}.out"], out)
        if spec.attention.output_bias:
            yield f"{layer}.self_attn.o_proj.bias", resident[f"{attention}.out.bias"]
        if spec.attention.head_norm != "none":
            yield f"{layer}.self_attn.q_norm.weight", resident[f"{attention}.q_norm.weight"]
            yield f"{layer}.self_attn.k_norm.weight", resident[f"{attention}.k_norm.weight"]
        yield f"{layer}.input_layernorm.weight", resident[f"layers.{i}.attention_norm.weight"]
        yield f"{layer}.post_attention_layernorm.weight", resident[f"layers.{i}.feed_forward_norm.weight"]
        records = load_file(folder / neuron_file_name(i))["records"]
        layout = bundle.neuron_layouts[i]
        if isinstance(layout, SliceLayout):
            for name, matrix in _sliced(records, layout, config.widths[i]).items():
                yield f"{layer}.mlp.{name}_proj.weight", matrix
            continue
        second = layout.part_offsets[1]
        row, down = RowLayout(hidden, *quant.of("feed_forward")), RowLayout(hidden, quant.bits)
        for name, start, own in (("gate", 0, row), ("up", second, row), ("down", second + row.nbytes, down)):
            matrix = _rows(records[:, start : start + own.nbytes], own)
            yield f"{layer}.mlp.{name}_proj.weight", matrix.T if name == "down" else matrix


def _sliced(records: np.ndarray, layout: SliceLayout, neurons: int) -> dict[str, np.ndarray]:
    """Gate and up (F, D) and down (D, F) of a layer's slices (n, stride)."""
    parts: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
    tiles = layout.tiles
    for record in joined_slices(records, layout):
        for name, offset, matrix in zip(parts, tiles.part_offsets, tiles.matrices, strict=True):
            parts[name].append(_of_tiles(record[offset : offset + matrix.nbytes], matrix))
    down = np.concatenate(parts["down"], axis=1)[:, :neurons]
    return {name: np.concatenate(parts[name])[:neurons] for name in ("gate", "up")} | {"down": down}


def _of_tiles(tiles: np.ndarray, matrix: TiledMatrix) -> np.ndarray:
    """(rows, cols) float32 of a matrix's tiles; at 16 bits of its rows."""
    found = untiled(np.ascontiguousarray(tiles).view(np.uint8).reshape(-1), matrix)
    if matrix.row.stored.tiles_only:
        return values_of(found, matrix.row)
    pieces = [np.ascontiguousarray(piece).view(np.uint8) for piece in found[:3]]
    return _rows(np.concatenate(pieces, axis=1), matrix.row)


def _rows(stored: np.ndarray, row: RowLayout) -> np.ndarray:
    """(n, row.nbytes) [codes | scales | biases] -> (n, cols) float32."""
    if row.bits == 16:
        return np.ascontiguousarray(stored).view(np.float16)[:, : row.cols].astype(np.float32)
    codes, affine = stored[:, : row.codes_bytes], np.ascontiguousarray(stored[:, row.codes_bytes :])
    places = np.unpackbits(codes, axis=1, bitorder="little").reshape(len(codes), row.padded_cols, row.bits)
    codes = np.packbits(places, axis=2, bitorder="little")[:, :, 0]
    if row.mxfp4:
        values = E2M1[codes].reshape(*affine.shape, 32) * np.ldexp(1.0, affine.astype(int) - 127)[:, :, None]
        return values.reshape(len(codes), -1)[:, : row.cols].astype(np.float32)
    halves, size = affine.view(np.float16).astype(np.float32), row.group_size
    scales = halves[:, : row.padded_cols // size]
    biases = np.float32(-(1 << (row.bits - 1))) * scales if row.implied_bias else halves[:, scales.shape[1] :]
    values = np.repeat(scales, size, axis=1) * codes + np.repeat(biases, size, axis=1)
    return values[:, : row.cols].astype(np.float32)


def always_draft(patch: pytest.MonkeyPatch, sizes: Iterable[int]) -> None:
    """Drafts in every pass, as large as `sizes` say one after another, whatever they are worth."""
    next_size = cycle(sizes).__next__
    patch.setattr(ondevice.runtime.engine, "MIN_PASS_SECONDS", 0.0)
    patch.setattr(TreePolicy, "begin", lambda policy: next_size())
    patch.setattr(TreePolicy, "throttle", lambda policy: False)
    for question in ("is_worth_adding", "is_worth_asking", "is_worth_computing"):
        patch.setattr(TreePolicy, question, lambda policy, nodes, chance: True)
    # Nor do drafters stop learning.
    patch.setattr(TreePolicy, "is_backing_off", False)
    patch.setattr(TreePolicy, "is_throttling", False)
