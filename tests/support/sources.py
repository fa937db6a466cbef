"""Weights that never saw a disk: backend sources over arrays, and whole random models made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ondevice.backends.base import Backend, Biases, Bytes, Float32, HeadNorms, Int32, Norm, RowChunk
from ondevice.backends.cpu import make_runner
from ondevice.backends.cpu_neurons import native_form
from ondevice.backends.expert_records import ExpertRecords
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import NeuronSource
from ondevice.backends.tiled_source import TileChunk
from ondevice.bundle.codes import E2M1, pack, unpack, values_of_table, values_of_two_levels
from ondevice.bundle.layout import (
    RecordLayout,
    SliceLayout,
    TileLayout,
    embedding_layout,
    neuron_layout,
)
from ondevice.bundle.matrix_layout import TILE_ROWS, RowLayout, TiledMatrix
from ondevice.bundle.weight_shapes import model_weight_shapes
from ondevice.config import Bits, MatrixKind, QuantConfig, RowFormat
from ondevice.converters.architectures.common import llama_config
from ondevice.kernels import _native
from ondevice.model.loading import head_norms as loaded_head_norms
from ondevice.model.transformer import Transformer
from ondevice.model.weights import LayerWeights, ModelWeights
from ondevice.model_config import Activation, FeedForwardSpec, LayerSpec, ModelConfig, NormSpec, RopeSpec


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, grouped queries, and no size that is a multiple of 64."""
    values: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 10,
        "intermediate_size": 72,
        "vocab_size": 50,
        "max_context": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return llama_config(**(values | changes))


def every_block() -> ModelConfig:
    """Layers of every kind of a plain model: each place of norms, all kinds of head norms, windows, caps,
    ropes, parallel; neurons in other numbers; learned positions, narrow embeddings, a head with a bias."""
    plain = tiny_config(intermediate_size=136, attention_bias=True, attention_output_bias=True)
    spec = plain.layers[0]
    turning, attention = plain.ropes[0].frequencies, replace(spec.attention, head_norm="layer")
    wide = replace(spec.feed_forward, neurons=330)
    layers = (
        replace(spec, norms="both", attention=replace(attention, soft_cap=0.7, window=11, scale=0.5)),
        replace(spec, norms="after", attention=replace(spec.attention, head_norm="projection", rope=1)),
        # What enters isn't normed here: with scores as small as behind a norm, no key takes all.
        replace(spec, norms="residual", attention=replace(spec.attention, scale=0.02), feed_forward=wide),
        replace(spec, parallel=True, attention=replace(spec.attention, head_norm="head", rope=2)),
    )
    return replace(
        plain,
        norm=NormSpec("layer", 1e-5, bias=True),
        ropes=(*plain.ropes, RopeSpec((0.0,) * len(turning)), RopeSpec((*turning[:3], 0.0, 0.0), 1.2)),
        layers=layers,
        embedding_multiplier=1.5,
        logit_soft_cap=2.0,
        embedding_width=24,
        learned_positions=True,
        head_bias=True,
    )


FEED_FORWARDS = {
    "ungated": FeedForwardSpec("relu", gated=False, bias=True, output_bias=True),
    "ungated-gelu": FeedForwardSpec("gelu", gated=False, bias=True),
    "ungated-relu2": FeedForwardSpec("relu2", gated=False),
    "fatrelu": FeedForwardSpec("fatrelu", threshold=0.25, output_bias=True),
    "drelu": FeedForwardSpec("relu", up_activation="relu"),
    "clamped": FeedForwardSpec("clamped_swish", clamp=0.75, slope=1.5),
}
"""Feed-forwards that `every_block` doesn't have; a model's layers have equal ones."""


def form(activation: Activation, **options: Any) -> tuple[int, float, bool, float, float]:
    """What the kernels take for a feed-forward's arithmetic. options: fields of FeedForwardSpec."""
    return native_form(FeedForwardSpec(activation, **options))


def with_feed_forward(config: ModelConfig, spec: FeedForwardSpec) -> ModelConfig:
    """`config` with another feed-forward in every layer."""
    return replace(config, layers=tuple(replace(layer, feed_forward=spec) for layer in config.layers))


def record_layout(config: ModelConfig, quant: QuantConfig) -> RecordLayout:
    """Records of single gated neurons, as a model with ReLU has them."""
    layout = neuron_layout(with_feed_forward(config, FeedForwardSpec("relu")), quant, 0)
    assert isinstance(layout, RecordLayout)
    return layout


def with_sinks(config: ModelConfig) -> ModelConfig:
    """`config` with attention sinks in every layer."""
    layers = (replace(layer, attention=replace(layer.attention, sinks=True)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def quantise_rows(weight: Float32, stored: Bits | RowFormat) -> tuple[Bytes, np.ndarray, np.ndarray, Float32]:
    """weight (n, K) -> codes, scales, biases as a bundle stores them, and the values they stand for.

    In a format of tiles alone they are made up, whatever the weight.
    """
    rows, cols = weight.shape
    layout = RowLayout(cols, *(stored if isinstance(stored, RowFormat) else RowFormat(stored)))
    if layout.mxfp4:
        return _quantise_mxfp4(weight, layout)
    if layout.stored.tiles_only:
        return made_up_rows(rows, layout)
    bits = layout.bits
    wide = np.zeros((rows, layout.padded_cols), dtype=np.float32)
    wide[:, :cols] = weight
    if bits == 16:
        half = wide.astype(np.float16)
        nothing = np.zeros((rows, 0), dtype=np.float16)
        return half.view(np.uint8), nothing, nothing, half.astype(np.float32)[:, :cols]
    groups = wide.reshape(rows, layout.groups, layout.group_size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    biases = low.astype(np.float16)
    if layout.implied_bias:
        zero = layout.stored.zero
        scales = (np.abs(groups).max(axis=2) / (zero - 1)).astype(np.float16)
        biases = (-zero * scales.astype(np.float32)).astype(np.float16)
    step = np.where(scales == 0, 1, scales).astype(np.float32)[:, :, None]
    q = np.clip(np.rint((groups - biases.astype(np.float32)[:, :, None]) / step), 0, 2**bits - 1)
    exact = scales.astype(np.float32)[:, :, None] * q + biases.astype(np.float32)[:, :, None]
    places = q.astype(np.uint8).reshape(rows, -1, 1) >> np.arange(bits, dtype=np.uint8) & 1
    codes = np.packbits(places.reshape(rows, -1), axis=1, bitorder="little")
    biases = biases[:, :0] if layout.implied_bias else biases
    return codes, scales, biases, exact.astype(np.float32).reshape(rows, -1)[:, :cols]


def _quantise_mxfp4(weight: Float32, layout: RowLayout) -> tuple[Bytes, np.ndarray, np.ndarray, Float32]:
    """quantise_rows by powers of two with which the largest weight of a group is below 8."""
    rows, cols = weight.shape
    wide = np.zeros((rows, layout.padded_cols), dtype=np.float32)
    wide[:, :cols] = weight
    groups = wide.reshape(rows, layout.groups, 32)
    scales = np.frexp(np.abs(groups).max(axis=2))[1] + np.int32(127 - 3)
    units = np.ldexp(groups, 127 - scales[:, :, None])
    q = np.abs(units[..., None] - E2M1).argmin(axis=3).astype(np.uint8)
    exact = np.ldexp(E2M1[q], scales[:, :, None] - 127)
    q = q.reshape(rows, -1)
    nothing = np.zeros((rows, 0), dtype=np.float16)
    return pack(q, 4), scales.astype(np.uint8), nothing, exact.reshape(rows, -1)[:, :cols]


def made_up_rows(rows: int, layout: RowLayout) -> tuple[Bytes, np.ndarray, np.ndarray, Float32]:
    """quantise_rows of random codes and integers, with values of the order of 1 and of either sign."""
    rng, stored = np.random.default_rng(rows * 10_000 + layout.cols + layout.bits), layout.stored
    codes = rng.integers(0, 256, (rows, layout.codes_bytes), dtype=np.uint8)
    nothing = np.zeros((rows, 0), dtype=np.float16)
    if not stored.two_levels:
        scales = (rng.uniform(-1, 1, (rows, layout.groups)) / 64).astype(np.float16)
        return codes, scales, nothing, values_of_table(unpack(codes, 4), scales, stored)[:, : layout.cols]
    count = layout.padded_cols // 256
    headers = rng.integers(0, 256, (rows, count, stored.header_bytes), dtype=np.uint8)
    largest = {2: 15, 3: 64, 4: 500, 5: 1000, 6: 2000}[layout.bits]
    upper = rng.uniform(-1, 1, (rows, count, stored.upper_bytes // 2)) / largest
    headers[:, :, : stored.upper_bytes] = upper.astype(np.float16).view(np.uint8)
    headers = headers.reshape(rows, -1)
    return codes, headers, nothing, values_of_two_levels(unpack(codes, layout.bits), headers, stored)


def records(layout: RecordLayout, parts: list[list[Float32]]) -> Bytes:
    """One record per row of the given matrices, part by part: (n, stride)."""
    rows = len(parts[0][0])
    out = np.zeros((rows, layout.stride), dtype=np.uint8)
    for offset, row_layouts, matrices in zip(layout.part_offsets, layout.parts, parts, strict=True):
        at = offset
        for row, matrix in zip(row_layouts, matrices, strict=True):
            codes, scales, biases, _ = quantise_rows(matrix, row.stored)
            stored = np.concatenate([codes, scales.view(np.uint8), biases.view(np.uint8)], axis=1)
            out[:, at : at + row.nbytes] = stored
            at += row.nbytes
    return out


@dataclass(frozen=True)
class ArrayLinear:
    """`LinearSource` over a float matrix (N, K)."""

    weight: Float32
    bits: Bits | RowFormat
    bias: Float32 | None = None
    step: int = 7

    @property
    def stored(self) -> RowFormat:
        return self.bits if isinstance(self.bits, RowFormat) else RowFormat(self.bits)

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def cols(self) -> int:
        return self.weight.shape[1]

    def chunks(self) -> Iterator[RowChunk]:
        codes, scales, biases, _ = quantise_rows(self.weight, self.stored)
        for row0 in range(0, self.rows, self.step):
            rows = slice(row0, row0 + self.step)
            yield RowChunk(row0, codes[rows], scales[rows], biases[rows])


@dataclass(frozen=True)
class ArrayTiles:
    """`TiledSource` over a float matrix (N, K), `step` tiles at a time."""

    weight: Float32
    bits: Bits | RowFormat
    step: int = 3

    @property
    def matrix(self) -> TiledMatrix:
        stored = self.bits if isinstance(self.bits, RowFormat) else RowFormat(self.bits)
        return TiledMatrix(self.weight.shape[0], RowLayout(self.weight.shape[1], *stored))

    def chunks(self) -> Iterator[TileChunk]:
        tiles = tiles_of(self.weight, self.matrix)
        for first in range(0, len(tiles), self.step):
            yield TileChunk(first, tiles[first : first + self.step])


def tiles_of(weight: Float32, matrix: TiledMatrix) -> Bytes:
    """The tiles (n, tile_bytes) of quantised weights (N, K)."""
    rows = [
        np.ascontiguousarray(part).view(np.uint8) for part in quantise_rows(weight, matrix.row.stored)[:3]
    ]
    out = np.empty(matrix.nbytes, dtype=np.uint8)
    _native.tile_rows(make_runner(1), matrix.row.stored, rows[0], rows[1], rows[2], out)
    return out.reshape(matrix.tiles, -1)


@dataclass(frozen=True)
class ArrayFeedForward:
    """`FeedForwardSource` over gate, up (None: ungated) and (transposed) down, each (F, D)."""

    gate: Float32
    up: Float32 | None
    down: Float32
    layout: RecordLayout | SliceLayout
    file: int = 0
    experts: ExpertRecords | None = None

    @property
    def num_neurons(self) -> int:
        return self.gate.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.gate.shape[1]

    def read(self, first: int, count: int) -> Bytes:
        if isinstance(self.layout, SliceLayout):
            starts = range(first, first + count, self.layout.neurons)
            return np.stack([self._slice(start, self.layout) for start in starts])
        rows = slice(first, first + count)
        second = [matrix[rows] for matrix in (self.up, self.down) if matrix is not None]
        return records(self.layout, [[self.gate[rows]], second])

    def _slice(self, first: int, layout: SliceLayout) -> Bytes:
        """(stride,) the slice from neuron `first` on, with zeros behind the layer's last neuron."""
        # It imports this module.
        from tests.support.expert_records import expert_record
        from tests.support.planes import in_planes

        size = layout.neurons
        matrices = [
            matrix[first : first + size] for matrix in (self.gate, self.up, self.down) if matrix is not None
        ]
        *by_rows, down = (np.pad(matrix, ((0, size - len(matrix)), (0, 0))) for matrix in matrices)
        matrices = [*by_rows, np.ascontiguousarray(down.T)]
        return in_planes(expert_record(make_runner(1), layout.tiles, matrices, []), layout)

    def check_gates(self, first: int, records: Bytes) -> None:
        """There is one copy of them."""


@dataclass(frozen=True)
class ArrayEmbedding:
    """`EmbeddingSource` over a float table (V, D)."""

    table: Float32
    layout: TileLayout
    file: int = 0

    @property
    def vocab_size(self) -> int:
        return self.table.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.table.shape[1]

    @cached_property
    def records(self) -> Bytes:
        """All of the table, (n, stride)."""
        tiles = tiles_of(self.table, TiledMatrix(self.vocab_size, self.layout.row))
        return np.pad(tiles, ((0, 0), (0, self.layout.stride - tiles.shape[1])))

    def read(self, tokens: Int32) -> Bytes:
        return self.records[tokens // TILE_ROWS]


@dataclass
class RandomWeights:
    """Float weights of a model; the matrices as (N, K), `down` transposed to (F, D)."""

    config: ModelConfig
    seed: int = 0
    vectors: dict[str, Float32] = field(default_factory=dict)
    matrices: dict[str, Float32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, generator = self.config, np.random.default_rng(self.seed)

        def matrix(name: str, rows: int, cols: int, fan_in: int) -> None:
            values = generator.standard_normal((rows, cols)) / np.sqrt(fan_in)
            self.matrices[name] = values.astype(np.float32)

        def vector(name: str, size: int, mean: float) -> None:
            self.vectors[name] = (mean + 0.1 * generator.standard_normal(size)).astype(np.float32)

        width = config.hidden_size
        matrix("embedding", config.vocab_size, config.embedding_size, 1)
        matrix("head", config.vocab_size, config.embedding_size, config.embedding_size)
        for weight in model_weight_shapes(config):
            matrix(weight.name, *weight.shape, weight.shape[1])
        vector("final_norm", width, 1.0)
        vector("final_norm.bias", width, 0.0)
        for i, neurons in enumerate(config.widths):
            vector(f"{i}.attention_norm", width, 1.0)
            vector(f"{i}.feed_forward_norm", width, 1.0)
            vector(f"{i}.attention_output_norm", width, 1.0)
            vector(f"{i}.feed_forward_output_norm", width, 1.0)
            for norm in ("attention", "attention_output", "feed_forward", "feed_forward_output"):
                vector(f"{i}.{norm}_norm.bias", width, 0.0)
            vector(f"{i}.q_norm", config.head_dim, 1.0)
            vector(f"{i}.k_norm", config.head_dim, 1.0)
            vector(f"{i}.qkv.bias", config.qkv_size, 0.0)
            vector(f"{i}.out.bias", width, 0.0)
            vector(f"{i}.gate.bias", neurons, 0.0)
            vector(f"{i}.down.bias", width, 0.0)
            matrix(f"{i}.qkv", config.qkv_size, width, width)
            matrix(f"{i}.out", width, config.query_size, config.query_size)
            matrix(f"{i}.gate", neurons, width, width)
            matrix(f"{i}.up", neurons, width, width)
            matrix(f"{i}.down", neurons, width, neurons)
        if config.learned_positions:
            matrix("positions", config.max_context, width, 1)
        vector("head.bias", config.vocab_size, 0.0)
        for i in range(config.num_layers):
            vector(f"{i}.sinks", config.num_heads, 1.0)

    def load(self, backend: Backend, stored: Bits | QuantConfig = 16) -> Transformer:
        """The model, loaded into `backend`."""
        config, quant = self.config, stored if isinstance(stored, QuantConfig) else QuantConfig(stored)

        def linear(name: str, kind: MatrixKind, has_bias: bool = False) -> Any:
            bias = self.vectors[f"{name}.bias"] if has_bias else None
            return backend.load_tiles([ArrayTiles(self.matrices[name], quant.of(kind))], bias)

        def projections(layer: int, spec: LayerSpec) -> Any:
            """The parts of the layer's fused projection."""
            ends = np.cumsum([*config.projection_sizes(spec).values()])[:-1]
            rows = np.split(self.matrices[f"{layer}.qkv"], ends)
            parts = zip(config.projection_sizes(spec), rows, strict=True)
            sections = [ArrayTiles(own, quant.of("qkv", layer, part)) for part, own in parts]
            bias = self.vectors[f"{layer}.qkv.bias"] if spec.attention.bias else None
            return backend.load_tiles(sections, bias)

        def norm(name: str, exists: bool = True) -> Any:
            if not exists:
                return None
            bias = backend.load_vector(self.vectors[f"{name}.bias"]) if config.norm.bias else None
            weight = backend.load_vector(self.vectors[name])
            return Norm(weight, config.norm.eps, bias, config.norm.kind == "layer")

        def feed_forward(layer: int, spec: FeedForwardSpec) -> Any:
            names = [name for name in ("gate", "up", "down") if spec.gated or name != "up"]
            matrices = {name: self.matrices[f"{layer}.{name}"] for name in names}
            layout = neuron_layout(config, quant, 0)
            source = ArrayFeedForward(**({"up": None} | matrices), layout=layout)
            biases = (
                backend.load_vector(self.vectors[f"{layer}.{name}.bias"]) if exists else None
                for name, exists in (("gate", spec.bias), ("down", spec.output_bias))
            )
            return backend.load_feed_forward(layer, source, None, Biases(*biases))

        def sinks(layer: int, spec: LayerSpec) -> Any:
            return backend.load_vector(self.vectors[f"{layer}.sinks"]) if spec.attention.sinks else None

        def head_norms(layer: int, spec: LayerSpec) -> HeadNorms | None:
            if spec.attention.head_norm == "none":
                return None
            kind, loaded = spec.attention.head_norm, {}
            for which, size in zip("qk", config.head_norm_sizes(spec), strict=True):
                weight = np.resize(self.vectors[f"{layer}.{which}_norm"], size)
                loaded[f"{which}_norm"] = backend.load_vector(weight)
                if kind == "layer":
                    # Every head's are different, so that one read for another shows.
                    ramp = np.linspace(-1, 1, size, dtype=np.float32)
                    loaded[f"{which}_norm"] = backend.load_vector(weight + ramp)
                    loaded[f"{which}_norm_bias"] = backend.load_vector(ramp)
            return loaded_head_norms(spec.attention, config.norm.eps, loaded)

        table = ArrayEmbedding(self.matrices["embedding"], embedding_layout(config, quant))
        layers = [
            LayerWeights(
                attention_norm=norm(f"{i}.attention_norm", spec.norms_input),
                qkv=projections(i, spec),
                head_norms=head_norms(i, spec),
                out=linear(f"{i}.out", "out", spec.attention.output_bias),
                attention_output_norm=norm(f"{i}.attention_output_norm", spec.norms_output),
                feed_forward_norm=norm(f"{i}.feed_forward_norm", spec.norms_input),
                feed_forward_output_norm=norm(f"{i}.feed_forward_output_norm", spec.norms_output),
                feed_forward=feed_forward(i, spec.feed_forward),
                sinks=sinks(i, spec),
            )
            for i, spec in enumerate(config.layers)
        ]
        head = linear("head", "head", config.head_bias)
        positions = None
        if config.learned_positions:
            loaded = backend.load_vector(self.matrices["positions"].reshape(-1))
            positions = loaded.reshape(self.matrices["positions"].shape)
        final_norm = norm("final_norm", config.final_norm)
        others = [
            backend.load_tiles([ArrayTiles(self.matrices[weight.name], quant.plain)])
            for weight in model_weight_shapes(config)
        ]
        embedding = backend.load_embedding(table)
        weights = ModelWeights(embedding, layers, final_norm, head, positions, *others)
        return Transformer(config, backend, weights)


class RecordSource(NeuronSource):
    """Streams one layer's neurons behind its resident ones, a block at a time, without a flash reader."""

    def __init__(self, layer: FeedForwardLayer) -> None:
        self._layer = layer
        self.streams = 0
        """Layers that were streamed."""

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterable[Bytes]:
        if batch.resident_only:
            return ()
        self.streams += 1
        source, first = self._layer.source, self._layer.resident_neurons
        return (
            source.read(at, min(64, source.num_neurons - at)) for at in range(first, source.num_neurons, 64)
        )
