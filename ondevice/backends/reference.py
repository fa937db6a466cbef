"""The oracle for other backends: float activations, dequantised weights, plain numpy.

Logits are within 1e-4 of `transformers` in float32. Different splits of a prompt need not give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.backends import reference_recurrence as recurrence
from ondevice.backends.base import (
    KEY_LANES,
    NO_BIASES,
    Biases,
    Bytes,
    EmbeddingSource,
    FeedForwardSource,
    Float32,
    HeadNorms,
    Int32,
    KVStore,
    LinearSource,
    Norm,
    Router,
    Selector,
)
from ondevice.backends.expert_records import ExpertRecords
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.backends.latent import LatentWeights
from ondevice.backends.plain_layers import Adapters, PlainWeights
from ondevice.backends.recurrent import replay_conv
from ondevice.backends.routing import route, sigmoid
from ondevice.backends.row_sums import MIN_MEAN_SQUARE
from ondevice.backends.stored_rows import RowsOfTiles, dequantize_rows, read_rows, table_rows, values_of
from ondevice.backends.tiled_source import TiledSource
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import ExpertLayout, SliceLayout
from ondevice.bundle.tiles import joined_slices, untiled
from ondevice.kernels import _native
from ondevice.model_config import (
    CLAMP,
    SWISH_SLOPE,
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelConfig,
)
from ondevice.records import dataclass

RECORDS_PER_READ = 1024
_KV_TYPES = {32: np.float32, 16: np.float16, 8: np.int8}
_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True)
class ReferenceLinear:
    """A float matrix. weight: (N, K); bias: (N,) or None."""

    weight: Float32
    bias: Float32 | None


@dataclass(frozen=True)
class ReferenceFeedForward:
    """gate, up, down: (F, D); row f of `down` is neuron f's column of the down projection.

    up: None in an ungated feed-forward. up_bias: (F,), only in experts. experts: the layer's experts that
    are stored as matrices, in order.
    """

    gate: Float32
    up: Float32 | None
    down: Float32
    biases: Biases = NO_BIASES
    up_bias: Float32 | None = None
    experts: tuple[ReferenceFeedForward, ...] = ()

    def some(self, first: int, count: int) -> ReferenceFeedForward:
        """Neurons first .. first + count, without biases."""
        neurons = slice(first, first + count)
        up = None if self.up is None else self.up[neurons]
        return ReferenceFeedForward(self.gate[neurons], up, self.down[neurons])


class ReferenceBackend:
    """`BudgetedBackend` in numpy, which holds all weights. Arrays are float32 numpy arrays."""

    name = "reference"
    target = "numpy"
    feed_forwards: tuple[FeedForwardLayer, ...] = ()
    synchronisations = 0
    synchronised_seconds = 0.0

    def allocate_block(self, nbytes: int) -> Bytes:
        return _native.allocate(nbytes)

    def new_arrays(self, layout: KVLayout) -> None:
        """None: this backend keeps keys and values in the cache's blocks."""

    def hold_embedding(self, resident: bool) -> None:
        """Nothing to do: rows of the table always come from flash."""

    def keep_to(self, budget_bytes: int) -> None:
        """Nothing to do: all weights are in memory, whatever the budget."""

    def trim(self) -> None:
        """Nothing to do: there is no scratch memory."""

    def close(self) -> None:
        """Nothing to do: weights are freed with their last reference."""

    def load_vector(self, values: Float32) -> Float32:
        return np.array(values, dtype=np.float32)

    def load_linear(self, source: LinearSource) -> ReferenceLinear:
        weight = np.empty((source.rows, source.cols), dtype=np.float32)
        for row0, codes, scales, biases in source.chunks():
            rows = dequantize_rows(codes, scales, biases, source.stored, source.cols)
            weight[row0 : row0 + len(rows)] = rows
        bias = None if source.bias is None else np.array(source.bias, dtype=np.float32)
        return ReferenceLinear(weight, bias)

    def load_tiles(self, sections: Sequence[TiledSource], bias: Float32 | None = None) -> ReferenceLinear:
        weights = [self.load_linear(RowsOfTiles(section)).weight for section in sections]
        return ReferenceLinear(weights[0] if len(weights) == 1 else np.concatenate(weights), bias)

    def load_feed_forward(
        self,
        layer: int,
        source: FeedForwardSource,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: ReferenceLinear | None = None,
        dense: int | None = None,
    ) -> ReferenceFeedForward:
        layout = source.layout
        if isinstance(layout, SliceLayout):
            return _read_slices(source, layout, biases)
        shape, offsets = (source.num_neurons, source.hidden_size), layout.row_offsets
        rows = [np.empty(shape, dtype=np.float32) for _ in offsets]
        for first in range(0, source.num_neurons, RECORDS_PER_READ):
            count = min(RECORDS_PER_READ, source.num_neurons - first)
            records = source.read(first, count)
            for target, offset, row in zip(rows, offsets, layout.rows, strict=True):
                target[first : first + count] = read_rows(records, offset, row)
        gate, *up, down = rows
        experts = _read_experts(source.experts)
        return ReferenceFeedForward(gate, up[0] if up else None, down, biases, None, experts)

    def load_embedding(
        self, source: EmbeddingSource, offloaded: bool = False, head: ReferenceLinear | None = None
    ) -> EmbeddingSource:
        return source

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Nothing to do: everything is in memory."""

    def embedding(self, table: EmbeddingSource, tokens: Int32) -> Float32:
        return table_rows(table, tokens)

    def normed(self, x: Float32, norm: Norm | None) -> Float32:
        """norm(x), or x without a norm."""
        if norm is None:
            return x
        wide = x.astype(np.float64)
        if norm.centred:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        mean_square = np.mean(np.square(wide), axis=-1, keepdims=True)
        out: Float32 = (wide / np.sqrt(mean_square + norm.eps)).astype(np.float32) * norm.weight
        return out if norm.bias is None else out + norm.bias

    def normed_heads(self, heads: Float32, norm: Norm, together: bool) -> Float32:
        """Heads (T, H, Dh) after the norm: each head alone, or with `together` all heads of a token as one
        vector.
        """
        if together:
            return self.normed(heads.reshape(len(heads), -1), norm).reshape(heads.shape)
        weight = norm.weight.reshape(-1, heads.shape[2])
        bias = None if norm.bias is None else norm.bias.reshape(weight.shape)
        return self.normed(heads, norm._replace(weight=weight, bias=bias))

    def add_normed(self, x: Float32, y: Float32, norm: Norm) -> Float32:
        return x + self.normed(y, norm)

    def gated(self, x: Float32, y: Float32, activation: Activation) -> Float32:
        return activate(x, activation) * y

    def small_linear(self, x: Float32, weight: Float32) -> Float32:
        product: Float32 = x @ weight.T
        return product

    def match_rms(self, x: Float32, other: Float32) -> Float32:
        target, mean_square = (np.mean(np.square(rows), axis=-1, keepdims=True) for rows in (other, x))
        scaled: Float32 = x * np.sqrt(target / np.maximum(mean_square, MIN_MEAN_SQUARE))
        return scaled

    def soft_cap(self, x: Float32, cap: float) -> Float32:
        capped: Float32 = np.float32(cap) * np.tanh(x / np.float32(cap))
        return capped

    def linear(
        self, x: Float32, weight: ReferenceLinear, norm: Norm | None = None, added: Float32 | None = None
    ) -> Float32:
        product: Float32 = self.normed(x, norm) @ weight.weight.T
        if weight.bias is not None:
            product += weight.bias
        return product if added is None else added + product

    def rope(self, x: Float32, cos: Float32, sin: Float32) -> Float32:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        cos, sin = cos[:, None], sin[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def kv_write(self, kv: KVStore, layer: int, k: Float32, v: Float32, position: int) -> None:
        for token in range(len(k)):
            block, slot = divmod(position + token, BLOCK_TOKENS)
            for head in range(k.shape[1]):
                keys, values = _head_views(kv, block, layer, head)
                keys.write(slot, k[token, head])
                values.write(slot, v[token, head])

    def kv_move(self, kv: KVStore, source: int, target: int) -> None:
        for layer, sizes in enumerate(kv.layout.heads):
            for head in range(sizes.keys):
                for stored, copy in zip(
                    _head_views(kv, source // BLOCK_TOKENS, layer, head),
                    _head_views(kv, target // BLOCK_TOKENS, layer, head),
                    strict=True,
                ):
                    copy.copy_from(target % BLOCK_TOKENS, stored, source % BLOCK_TOKENS)

    def attend(
        self,
        qkv: Float32,
        kv: KVStore,
        layer: int,
        position: int,
        cos: Float32,
        sin: Float32,
        spec: AttentionSpec,
        norms: HeadNorms | None = None,
        tree: TokenTree | None = None,
        sinks: Float32 | None = None,
    ) -> Float32:
        heads, kv_heads, width, latent, _ = sizes = kv.layout.heads[layer]
        keys_end = qkv.shape[1] if latent or spec.keys_of is not None else (heads + kv_heads) * width
        parts = qkv[:, :keys_end].reshape(len(qkv), -1, width)
        if latent:
            rotated = self.rope(parts[:, :, latent:], cos, sin)
            self.kv_write(kv, layer, parts[:, heads:, :latent], rotated[:, heads:], position)
            q = np.concatenate([parts[:, :heads, :latent], rotated[:, :heads]], axis=2)
            return self.attention(q, kv, layer, position, spec, tree, sinks)
        q, k = np.split(parts, [heads], axis=1)
        v = qkv[:, keys_end:].reshape(len(qkv), -1, sizes.value_width)
        if norms is not None:
            q = self.normed_heads(q, norms.q, norms.together)
        if spec.keys_of is not None:
            return self.attention(self.rope(q, cos, sin), kv, layer, position, spec, tree, sinks)
        if norms is not None and norms.k is not None:
            k = self.normed_heads(k, norms.k, norms.together)
            v = self.normed(v, norms.v)
        self.kv_write(kv, layer, self.rope(k, cos, sin), v, position)
        return self.attention(self.rope(q, cos, sin), kv, layer, position, spec, tree, sinks)

    def attention(
        self,
        q: Float32,
        kv: KVStore,
        layer: int,
        position: int,
        spec: AttentionSpec,
        tree: TokenTree | None = None,
        sinks: Float32 | None = None,
    ) -> Float32:
        tokens, heads, _ = q.shape
        width, window = kv.layout.heads[layer].value_width, spec.window
        keys, values = _stored(kv, layer, position + tokens)
        queries_per_head = heads // len(keys)
        visible = _visible(position, tokens, window) if tree is None else tree.visible(position, window)
        out = np.empty((tokens, heads, width), np.float32)
        for head in range(heads):
            k, v = keys[head // queries_per_head], values[head // queries_per_head]
            scores = q[:, head] @ k.T * np.float32(spec.scale)
            scores = self.soft_cap(scores, spec.soft_cap) if spec.soft_cap else scores
            scores = np.where(visible, scores, -np.inf)
            if sinks is not None:
                scores = np.concatenate([scores, np.full((tokens, 1), sinks[head])], axis=1)
                v = np.concatenate([v, np.zeros((1, width), np.float32)])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v
        return out.reshape(tokens, heads * width)

    def latent_rows(self, qkv: Float32, spec: LatentSpec, weights: LatentWeights) -> Float32:
        first = qkv.shape[1] - spec.width
        queries, latent, key = np.split(qkv, [first, first + spec.rank], axis=1)
        if weights.queries is not None:
            queries = self.linear(queries, weights.queries, weights.query_norm)
        queries = queries.reshape(len(qkv), -1, spec.query_width)
        heads = queries.shape[1]
        met = self.linear_heads(queries[:, :, : spec.key_dim].reshape(len(qkv), -1), weights.keys, heads)
        met = met.reshape(len(qkv), heads, spec.rank)
        of_heads = np.concatenate([met, queries[:, :, spec.key_dim :]], axis=2).reshape(len(qkv), -1)
        return np.concatenate([of_heads, self.normed(latent, weights.norm), key], axis=1)

    def linear_heads(self, x: Float32, weight: ReferenceLinear, heads: int) -> Float32:
        parts = np.split(x, heads, axis=1)
        matrices = np.split(weight.weight, heads)
        return np.concatenate([part @ matrix.T for part, matrix in zip(parts, matrices, strict=True)], axis=1)

    gated_delta = staticmethod(partial(recurrence.of_pass, recurrence.gated_delta))
    replay_delta = staticmethod(partial(recurrence.replay, recurrence.gated_delta))
    short_conv = staticmethod(recurrence.short_conv)
    mamba2 = staticmethod(partial(recurrence.of_pass, recurrence.mamba2))
    replay_mamba2 = staticmethod(partial(recurrence.replay, recurrence.mamba2))
    replay_conv = staticmethod(replay_conv)

    def sigmoid_gated(self, x: Float32, gates: Float32) -> Float32:
        return x * sigmoid(gates)

    def prefetch(self, x: Float32, norm: Norm | None, weight: ReferenceFeedForward) -> None:
        """Nothing to do: everything is in memory."""

    def prefetch_experts(
        self, x: Float32, norm: Norm | None, weight: ReferenceFeedForward, router: Router, spec: LayerSpec
    ) -> None:
        """Nothing to do: everything is in memory."""

    def feed_forward(
        self,
        x: Float32,
        weight: ReferenceFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        x = self.normed(x, norm)
        product: Float32 = hidden(x, weight, spec) @ weight.down
        if weight.biases.output is not None:
            product += weight.biases.output
        return product if added is None else added + product

    def mixture(
        self,
        x: Float32,
        weight: ReferenceFeedForward,
        router: Router,
        spec: LayerSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        experts, apart, residual = spec.experts, router.apart, x
        assert experts is not None
        x = self.normed(x, norm)
        first = len(weight.gate) - (0 if weight.experts else experts.num_neurons)
        total = np.zeros_like(x)
        if first:
            dense = weight.some(0, first)
            total += hidden(x, dense, spec.feed_forward) @ dense.down
            if router.shared_gate is not None:
                total *= sigmoid(self.linear(x, router.shared_gate))
        dense_output = total
        if apart is not None:
            dense_output, total = self.normed(total, apart.dense_output), np.zeros_like(x)
            x = self.normed(residual, apart.experts)
        logits = self.linear(x if apart is None else self.normed(residual, apart.router), router.matrix)
        routing = route(logits, experts, router.choice_bias, None if apart is None else apart.scales)
        for expert in routing.experts.tolist():
            rows, weights = routing.rows_of(expert)
            if weight.experts:
                neurons = weight.experts[expert]
            else:
                neurons = weight.some(first + expert * experts.neurons, experts.neurons)
            out: Float32 = hidden(x[rows], neurons, spec.feed_forward) @ neurons.down
            total[rows] += weights * (out if neurons.biases.output is None else out + neurons.biases.output)
        if apart is not None:
            total = dense_output + self.normed(total, apart.output)
        return total if added is None else added + total

    def rows(self, x: Float32, tokens: Sequence[int]) -> Float32:
        return x[list(tokens)]

    def stacked(self, parts: Sequence[Float32]) -> Float32:
        return np.concatenate(parts)

    def add_streams(self, x: Float32, tokens: Sequence[int], embeddings: Sequence[Float32]) -> Float32:
        streams = [(x[token] + embedding)[None] for token in tokens for embedding in embeddings]
        return np.concatenate([x, *streams])

    def add_low_rank(
        self,
        y: Float32,
        x: Float32,
        down: ReferenceLinear,
        up: ReferenceLinear,
        first: int,
        activation: Literal["relu"] | None = None,
        norm: Norm | None = None,
    ) -> Float32:
        narrow = self.normed(x, norm) @ down.weight.T
        narrow = narrow if activation is None else activate(narrow, activation)
        return np.concatenate([y[:first], y[first:] + narrow @ up.weight.T])

    def plain_layers(self, config: ModelConfig, layers: Sequence[PlainWeights], adapters: Adapters) -> None:
        """None: ops run every layer."""

    def to_numpy(self, x: Float32) -> Float32:
        return x


def hidden(x: Float32, weight: ReferenceFeedForward, spec: FeedForwardSpec) -> Float32:
    """The down projection's input, (T, F): activation(gate(x)) * up(x), without up(x) in an ungated
    feed-forward.
    """
    gates: Float32 = x @ weight.gate.T
    if weight.biases.gates is not None:
        gates += weight.biases.gates
    if spec.cutoff is not None:
        mean, deviation = gates.mean(axis=1, keepdims=True), gates.std(axis=1, keepdims=True)
        gates = np.maximum(gates - (mean + deviation * np.float32(spec.cutoff)), np.float32(0))
    activated = activate(gates, spec.activation, spec.threshold, spec.clamp, spec.slope)
    if weight.up is not None:
        ups: Float32 = x @ weight.up.T
        if weight.up_bias is not None:
            ups += weight.up_bias
        activated *= activated_ups(ups, spec)
    return activated


def activated_ups(ups: Float32, spec: FeedForwardSpec) -> Float32:
    """The values (T, F) that activated gates are multiplied by."""
    if spec.activation == "clamped_swish":
        return np.clip(ups, np.float32(-spec.clamp), np.float32(spec.clamp)) + np.float32(1)
    return ups if spec.up_activation == "none" else activate(ups, spec.up_activation)


def _read_slices(source: FeedForwardSource, layout: SliceLayout, biases: Biases) -> ReferenceFeedForward:
    """All neurons of a layer stored in slices."""
    count, none = source.num_neurons, np.empty((0, source.hidden_size), np.float32)
    read = [
        _expert(joined_slices(source.read(at, layout.neurons), layout)[0], layout.tiles)
        for at in range(0, count, layout.neurons)
    ]
    gate, down = (np.concatenate([none, *(getattr(it, k) for it in read)])[:count] for k in ("gate", "down"))
    up = np.concatenate([none, *(it.up for it in read if it.up is not None)])[:count]
    return ReferenceFeedForward(gate, up if len(up) == len(gate) else None, down, biases)


def _read_experts(records: ExpertRecords | None) -> tuple[ReferenceFeedForward, ...]:
    """A layer's experts stored as matrices; empty if they are runs of neurons."""
    if records is None or records.layout is None:
        return ()
    return tuple(_expert(records.read(expert), records.layout) for expert in range(records.count))


def _expert(record: Bytes, layout: ExpertLayout) -> ReferenceFeedForward:
    """The expert in a record (stride,)."""
    matrices, biases = [], []
    for offset, matrix in zip(layout.part_offsets, layout.matrices, strict=True):
        stored = untiled(record[offset : offset + matrix.nbytes], matrix)
        matrices.append(values_of(stored, matrix.row))
        biases.append(stored.added)
    gate, *up, down = matrices
    both, up_bias = Biases(biases[0], biases[-1]), biases[1] if up else None
    return ReferenceFeedForward(gate, up[0] if up else None, np.ascontiguousarray(down.T), both, up_bias)


def activate(
    x: Float32,
    activation: Activation,
    threshold: float = 0.0,
    clamp: float = CLAMP,
    slope: float = SWISH_SLOPE,
) -> Float32:
    """The gate's nonlinearity, elementwise, in float64 and rounded once.

    threshold: that of fatrelu. clamp, slope: those of clamped_swish.
    """
    wide = x.astype(np.float64)
    match activation:
        case "silu":
            wide = wide / (1.0 + np.exp(np.clip(-wide, None, 700.0)))
        case "gelu":
            wide = 0.5 * wide * (1.0 + _erf(wide / math.sqrt(2.0)))
        case "gelu_tanh":
            wide = 0.5 * wide * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)))
        case "relu":
            wide = np.maximum(wide, 0.0)
        case "relu2":
            wide = np.square(np.maximum(wide, 0.0))
        case "fatrelu":
            wide = np.where(wide <= threshold, 0.0, wide)
        case "clamped_swish":
            wide = np.minimum(wide, clamp)
            wide = wide / (1.0 + np.exp(np.clip(-slope * wide, None, 700.0)))
    return wide.astype(np.float32)


@dataclass(frozen=True)
class _HeadView:
    """Views of one block's keys or values of one (layer, head): codes (4, 16, Dh), scales (64,) or None."""

    codes: NDArray[np.float16] | NDArray[np.int8]
    scales: Float32 | None

    def write(self, slot: int, x: Float32) -> None:
        if self.scales is None:
            self.codes[divmod(slot, KEY_LANES)] = x
            return
        largest = np.abs(x).max()
        self.scales[slot] = largest / np.float32(127)
        self.codes[divmod(slot, KEY_LANES)] = np.rint(x * (np.float32(127) / largest)) if largest > 0 else 0

    def copy_from(self, slot: int, other: _HeadView, source: int) -> None:
        self.codes[divmod(slot, KEY_LANES)] = other.codes[divmod(source, KEY_LANES)]
        if self.scales is not None and other.scales is not None:
            self.scales[slot] = other.scales[source]

    def read(self) -> Float32:
        values = self.codes.astype(np.float32).reshape(BLOCK_TOKENS, -1)
        return values if self.scales is None else values * self.scales[:, None]


def _head_views(kv: KVStore, block: int, layer: int, head: int) -> tuple[_HeadView, _HeadView]:
    """A head's keys and values in a block. In latent attention: latents, and rotary parts of keys."""
    layout = kv.layout
    start = layout.head_offset(layer, head)
    dtype = _KV_TYPES[layout.kv_bits]
    if latent := layout.heads[layer].latent:
        end = start + layout.codes_bytes(layer)
        codes = kv.blocks[block][start:end].view(dtype)
        codes = codes.reshape(BLOCK_TOKENS // KEY_LANES, -1, KEY_LANES).swapaxes(1, 2)
        scales = kv.blocks[block][end : start + layout.head_bytes(layer)].view(np.float32)
        two = np.split(scales, 2) if layout.kv_bits == 8 else [None, None]
        return _HeadView(codes[..., :latent], two[0]), _HeadView(codes[..., latent:], two[1])
    views, sizes, parts, at = [], layout.heads[layer], BLOCK_TOKENS // KEY_LANES, start
    for width in (sizes.width, sizes.value_width):
        end = at + BLOCK_TOKENS * width * layout.kv_bits // 8
        codes = kv.blocks[block][at:end].view(dtype)
        # Keys lie dimension by dimension for 16 slots at a time, values slot by slot.
        if at == start:
            codes = codes.reshape(parts, width, KEY_LANES).swapaxes(1, 2)
        else:
            codes = codes.reshape(parts, KEY_LANES, width)
        at = end + layout.scales_bytes
        scales = kv.blocks[block][end:at].view(np.float32)
        views.append(_HeadView(codes, scales if layout.kv_bits == 8 else None))
    return views[0], views[1]


def _stored(kv: KVStore, layer: int, length: int) -> tuple[list[Float32], list[Float32]]:
    """The keys and the values that every head has stored at positions 0 .. length - 1, dequantised: (length,
    Dh) each.
    """
    keys, values = [], []
    for head in range(kv.layout.heads[layer].keys):
        views = [_head_views(kv, block, layer, head) for block in range(kv.layout.blocks(length))]
        k, v = (np.concatenate([it.read() for it in part])[:length] for part in zip(*views, strict=True))
        latent = kv.layout.heads[layer].latent
        keys.append(np.concatenate([k, v], axis=1) if latent else k)
        values.append(k if latent else v)
    return keys, values


def _visible(position: int, tokens: int, window: int) -> NDArray[np.bool_]:
    """(T, position + T), True where query t sees key p: p <= position + t, within the window."""
    query = np.arange(position, position + tokens)[:, None]
    key = np.arange(position + tokens)[None, :]
    causal: NDArray[np.bool_] = key <= query
    return causal & (key > query - window) if window else causal
