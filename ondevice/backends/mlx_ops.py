"""The ops that both backends over `mlx.core` arrays share: attention, keys and values, streams, activations.

Activations are float32. Only `to_numpy` leaves MLX's graph, so `mx.grad` reaches through all other ops, and
through keys and values too. MLX is lazy: a pass computes nothing until a result is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from ondevice.backends.base import Float32, HeadNorms, Int32, KVStore, Norm
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import read_rows
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import RowLayout
from ondevice.config import Activation


@dataclass(frozen=True)
class MlxLinear:
    """A float matrix. weight: (N, K); bias: (N,) or None."""

    weight: mx.array
    bias: mx.array | None


class MlxOps:
    """The ops that don't depend on how a backend holds its weights."""

    def load_vector(self, values: Float32) -> mx.array:
        return mx.array(values)

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Nothing to do: everything is in memory."""

    def embedding(self, table: Any, tokens: Int32) -> mx.array:
        return mx.array(read_rows(table.read(tokens), 0, RowLayout(table.hidden_size, table.bits)))

    def linear(
        self, x: mx.array, weight: Any, norm: Norm | None = None, added: mx.array | None = None
    ) -> mx.array:
        product = self.product(normed(x, norm), weight)
        return product if added is None else added + product

    def product(self, x: mx.array, weight: Any) -> mx.array:
        """x (T, K) @ W^T + bias for a loaded matrix: (T, N) float32."""
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
        norms: HeadNorms | None = None,
        window: int = 0,
        tree: TokenTree | None = None,
    ) -> mx.array:
        config, tokens = kv.layout.config, qkv.shape[0]
        heads, width = config.num_heads, config.head_dim
        q, k, v = mx.split(qkv.reshape(tokens, -1, width), [heads, heads + config.num_kv_heads], axis=1)
        if norms is not None:
            q, k = mx.fast.rms_norm(q, norms.q, norms.eps), mx.fast.rms_norm(k, norms.k, norms.eps)
        turns = mx.array(cos), mx.array(sin)
        q, k = _turned(q, *turns), _turned(k, *turns)
        kv.arrays.write(layer, k, v, position)
        stored = kv.arrays.read(layer, position + tokens)
        q = q.astype(stored[0].dtype).swapaxes(0, 1)
        context = mx.fast.scaled_dot_product_attention(
            *(x[None] for x in (q, *stored)),
            scale=1.0 / math.sqrt(width),
            mask=_mask(position, tokens, window, tree),
        )
        return context[0].swapaxes(0, 1).reshape(tokens, heads * width).astype(mx.float32)

    def rows(self, x: mx.array, tokens: Sequence[int]) -> mx.array:
        return x[mx.array(list(tokens))]

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

    def to_numpy(self, x: mx.array) -> Float32:
        return np.array(x)


def activate(x: mx.array, activation: Activation) -> mx.array:
    """The gate's nonlinearity, elementwise. ReLU's gradient at zero is zero."""
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


def normed(x: mx.array, norm: Norm | None) -> mx.array:
    return x if norm is None else mx.fast.rms_norm(x, norm.weight, norm.eps)


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """x (T, H, Dh) rotated by halves with cos and sin (T, Dh / 2)."""
    first, second = mx.split(x, 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return mx.concatenate([first * c - second * s, second * c + first * s], axis=-1)


def _mask(position: int, tokens: int, window: int, tree: TokenTree | None) -> mx.array | str | None:
    """The attention mask: (T, position + T), True where query t sees a stored place; or MLX's name for it."""
    if tree is not None:
        return mx.array(tree.visible(position, window))
    length = position + tokens
    if not window or length <= window:
        return "causal" if tokens > 1 else None
    query, key = mx.arange(position, length)[:, None], mx.arange(length)[None, :]
    return (key <= query) & (key > query - window)
