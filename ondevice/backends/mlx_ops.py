"""The ops that both backends over `mlx.core` arrays share: attention, keys and values, streams, activations.

Activations are float32. Only `to_numpy` leaves MLX's graph, so `mx.grad` reaches through all other ops, and
through keys and values too. MLX is lazy: a pass computes nothing until a result is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from ondevice.backends.base import Float32, HeadNorms, Int32, KVStore, Norm
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.latent import LatentWeights
from ondevice.backends.mlx_states import MlxRecurrentOps
from ondevice.backends.plain_layers import Adapters, PlainWeights
from ondevice.backends.row_sums import MIN_MEAN_SQUARE
from ondevice.backends.stored_rows import table_rows
from ondevice.backends.token_tree import TokenTree
from ondevice.errors import BackendUnavailableError
from ondevice.model_config import (
    CLAMP,
    SWISH_SLOPE,
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LatentSpec,
    ModelConfig,
)
from ondevice.records import dataclass


@dataclass(frozen=True)
class FloatLinear:
    """A float matrix. weight: (N, K); bias: (N,) or None."""

    weight: mx.array
    bias: mx.array | None


class MlxOps(MlxRecurrentOps):
    """The ops that don't depend on how a backend holds its weights."""

    def load_vector(self, values: Float32) -> mx.array:
        return mx.array(values)

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Nothing to do: everything is in memory."""

    def embedding(self, table: Any, tokens: Int32) -> mx.array:
        return mx.array(table_rows(table, tokens))

    def linear(
        self, x: mx.array, weight: Any, norm: Norm | None = None, added: mx.array | None = None
    ) -> mx.array:
        product = self.product(normed(x, norm), weight)
        return product if added is None else added + product

    def product(self, x: mx.array, weight: Any) -> mx.array:
        """x (T, K) @ W^T + bias for a loaded matrix: (T, N) float32."""
        raise NotImplementedError

    def heads_product(self, x: mx.array, weight: Any) -> mx.array:
        """x (H, T, K) @ W_h^T of each head, H blocks of rows of a loaded matrix (N, K): (H, T, N / H)."""
        raise NotImplementedError

    def kv_move(self, kv: KVStore, source: int, target: int) -> None:
        kv.arrays.move(source, target)

    def attend(
        self,
        qkv: mx.array,
        kv: KVStore,
        layer: int,
        position: int,
        cos: Float32,
        sin: Float32,
        spec: AttentionSpec,
        norms: HeadNorms | None = None,
        tree: TokenTree | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        tokens, rope_tables = qkv.shape[0], (mx.array(cos), mx.array(sin))
        heads, keys, width, latent, _ = sizes = kv.layout.heads[layer]
        keys_end = qkv.shape[1] if latent or spec.keys_of is not None else (heads + keys) * width
        parts = qkv[:, :keys_end].reshape(tokens, -1, width)
        if latent:
            rotary = _rotated(parts[:, :, latent:], *rope_tables)
            rotated = mx.concatenate([parts[:, :, :latent], rotary], axis=-1)
            q = rotated[:, :heads]
            kv.arrays.write(layer, rotated[:, heads:], None, position)
        else:
            q, k = mx.split(parts, [heads], axis=1)
            v = qkv[:, keys_end:].reshape(tokens, -1, sizes.value_width)
            q = _rotated(q if norms is None else _normed_heads(q, norms.q, norms.together), *rope_tables)
            if spec.keys_of is None:
                if norms is not None and norms.k is not None:
                    k, v = _normed_heads(k, norms.k, norms.together), normed(v, norms.v)
                kv.arrays.write(layer, _rotated(k, *rope_tables), v, position)
        stored = kv.arrays.read(layer, position + tokens)
        q = q.astype(stored[0].dtype).swapaxes(0, 1)
        if spec.soft_cap:
            if sinks is not None:
                raise BackendUnavailableError(
                    "--backend mlx doesn't run attention sinks beside capped scores; use --backend cpu"
                )
            context = _capped_attention(q, stored, spec, _visible(position, tokens, spec.window, tree))
        else:
            mask = _mask(position, tokens, spec.window, tree)
            head_sinks = None if sinks is None else sinks.astype(q.dtype)
            context = mx.fast.scaled_dot_product_attention(
                *(x[None] for x in (q, *stored)), scale=spec.scale, mask=mask, sinks=head_sinks
            )[0]
        if latent:
            # Values as wide as keys cost less than a copy of their first dimensions.
            context = context[:, :, :latent]
        return context.swapaxes(0, 1).reshape(tokens, -1).astype(mx.float32)

    def latent_rows(self, qkv: mx.array, spec: LatentSpec, weights: LatentWeights) -> mx.array:
        tokens, first = qkv.shape[0], qkv.shape[1] - spec.width
        queries, latent, key = mx.split(qkv, [first, first + spec.rank], axis=1)
        if weights.queries is not None:
            queries = self.linear(queries, weights.queries, weights.query_norm)
        queries = queries.reshape(tokens, -1, spec.query_width)
        met = self.heads_product(queries[:, :, : spec.key_dim].swapaxes(0, 1), weights.keys)
        of_heads = mx.concatenate([met.swapaxes(0, 1), queries[:, :, spec.key_dim :]], axis=2)
        return mx.concatenate([of_heads.reshape(tokens, -1), normed(latent, weights.norm), key], axis=1)

    def linear_heads(self, x: mx.array, weight: Any, heads: int) -> mx.array:
        product = self.heads_product(x.reshape(x.shape[0], heads, -1).swapaxes(0, 1), weight)
        return product.swapaxes(0, 1).reshape(x.shape[0], -1)

    def add_normed(self, x: mx.array, y: mx.array, norm: Norm) -> mx.array:
        return x + normed(y, norm)

    def normed(self, x: mx.array, norm: Norm) -> mx.array:
        return normed(x, norm)

    def gated(self, x: mx.array, y: mx.array, activation: Activation) -> mx.array:
        return activate(x, activation) * y

    def small_linear(self, x: mx.array, weight: mx.array) -> mx.array:
        return x @ weight.T

    def match_rms(self, x: mx.array, other: mx.array) -> mx.array:
        target, mean_square = (mx.mean(mx.square(rows), axis=-1, keepdims=True) for rows in (other, x))
        return x * mx.sqrt(target / mx.maximum(mean_square, MIN_MEAN_SQUARE.item()))

    def soft_cap(self, x: mx.array, cap: float) -> mx.array:
        return cap * mx.tanh(x / cap)

    def prefetch_experts(self, *arguments: Any) -> None:
        """Nothing to do: only `cpu` prefetches experts."""

    def rows(self, x: mx.array, tokens: Sequence[int]) -> mx.array:
        return x[mx.array(list(tokens))]

    def stacked(self, parts: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(list(parts))

    def add_streams(self, x: mx.array, tokens: Sequence[int], embeddings: Sequence[mx.array]) -> mx.array:
        streams = x[mx.array(list(tokens))][:, None] + mx.stack(list(embeddings))
        return mx.concatenate([x, streams.reshape(-1, x.shape[1])])

    def add_low_rank(
        self,
        y: mx.array,
        x: mx.array,
        down: Any,
        up: Any,
        first: int,
        activation: Literal["relu"] | None = None,
        norm: Norm | None = None,
    ) -> mx.array:
        narrow = self.product(normed(x, norm), down)
        narrow = narrow if activation is None else activate(narrow, activation)
        return mx.concatenate([y[:first], y[first:] + self.product(narrow, up)])

    def plain_layers(self, config: ModelConfig, layers: Sequence[PlainWeights], adapters: Adapters) -> None:
        """None: ops run every layer."""

    def to_numpy(self, x: mx.array) -> Float32:
        return np.array(x)


def hidden(gates: mx.array, ups: mx.array | None, spec: FeedForwardSpec) -> mx.array:
    """The down projection's input: activation(gates) * ups, or activation(gates) without ups."""
    activated = activate(gates, spec.activation, spec.threshold, spec.clamp, spec.slope)
    if ups is None:
        return activated
    if spec.activation == "clamped_swish":
        return activated * (mx.clip(ups, -spec.clamp, spec.clamp) + 1.0)
    return activated * (ups if spec.up_activation == "none" else activate(ups, spec.up_activation))


def cut_off(gates: mx.array, deviations: float | None) -> mx.array:
    """Gates (T, F) after the statistical cutoff; unchanged if there is no cutoff."""
    if deviations is None:
        return gates
    mean, deviation = (of(gates, axis=1, keepdims=True) for of in (mx.mean, mx.std))
    return mx.maximum(gates - (mean + deviations * deviation), 0.0)


def activate(
    x: mx.array,
    activation: Activation,
    threshold: float = 0.0,
    clamp: float = CLAMP,
    slope: float = SWISH_SLOPE,
) -> mx.array:
    """The gate's nonlinearity, elementwise. ReLU's gradient at zero is zero.

    threshold: that of fatrelu. clamp, slope: those of clamped_swish.
    """
    match activation:
        case "silu":
            return x * mx.sigmoid(x)
        case "gelu":
            return 0.5 * x * (1.0 + mx.erf(x / math.sqrt(2.0)))
        case "gelu_tanh":
            return 0.5 * x * (1.0 + mx.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
        case "relu":
            return mx.maximum(x, 0.0)
        case "relu2":
            return mx.square(mx.maximum(x, 0.0))
        case "fatrelu":
            return mx.where(x <= threshold, 0.0, x)
        case "clamped_swish":
            x = mx.minimum(x, clamp)
            return x * mx.sigmoid(slope * x)


def normed(x: mx.array, norm: Norm | None) -> mx.array:
    """norm(x), or x without a norm."""
    if norm is None:
        return x
    if norm.centred:
        return mx.fast.layer_norm(x, norm.weight, norm.bias, norm.eps)
    out = mx.fast.rms_norm(x, norm.weight, norm.eps)
    return out if norm.bias is None else out + norm.bias


def _normed_heads(heads: mx.array, norm: Norm, together: bool) -> mx.array:
    """Heads (T, H, Dh) after the norm: each head alone, or with `together` all heads of a token as one
    vector.
    """
    if together:
        return normed(heads.reshape(heads.shape[0], -1), norm).reshape(heads.shape)
    width = heads.shape[2]
    if norm.weight.size == width:
        return normed(heads, norm)
    plain = normed(heads, Norm(mx.ones(width), norm.eps, None, norm.centred))
    out = plain * norm.weight.reshape(-1, width)
    return out if norm.bias is None else out + norm.bias.reshape(-1, width)


def _capped_attention(
    q: mx.array, stored: tuple[mx.array, mx.array], spec: AttentionSpec, visible: mx.array
) -> mx.array:
    """Attention (H, T, Dh) with capped scores, for q (H, T, Dh), keys and values (KVH, n, Dh)."""
    shared = q.shape[0] // stored[0].shape[0]
    keys, values = (mx.repeat(x.astype(mx.float32), shared, axis=0) for x in stored)
    scores = q.astype(mx.float32) @ keys.swapaxes(1, 2) * spec.scale
    scores = spec.soft_cap * mx.tanh(scores / spec.soft_cap)
    return mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1) @ values


def _rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """x (T, H, Dh) rotated by halves with cos and sin (T, Dh / 2)."""
    first, second = mx.split(x, 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return mx.concatenate([first * c - second * s, second * c + first * s], axis=-1)


def _mask(position: int, tokens: int, window: int, tree: TokenTree | None) -> mx.array | str | None:
    """The attention mask of `_visible`, or MLX's name for it."""
    length = position + tokens
    if tree is None and (not window or length <= window):
        return "causal" if tokens > 1 else None
    return _visible(position, tokens, window, tree)


def _visible(position: int, tokens: int, window: int, tree: TokenTree | None) -> mx.array:
    """(T, position + T), True where query t sees a stored place."""
    if tree is not None:
        return mx.array(tree.visible(position, window))
    length = position + tokens
    query, key = mx.arange(position, length)[:, None], mx.arange(length)[None, :]
    causal = key <= query
    return causal & (key > query - window) if window else causal
