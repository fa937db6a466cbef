"""One layer's attention block: norm, fused projection, rotary embedding, cache, attention, output, residual.

Grouped-query attention (arXiv 2305.13245) with optional query and key norms and a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.backends.base import Array, Backend, Float32
from ondevice.backends.token_tree import TokenTree
from ondevice.config import ModelConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.weights import LayerWeights, StreamLayer


@dataclass(frozen=True)
class Place:
    """Where T tokens stand: behind `position` tokens stored in kv, which has room reserved for them.

    window: of the layer; cos, sin: (T, Dh / 2); tree: how they follow each other, if they don't just follow.
    """

    kv: KVCache
    layer: int
    position: int
    window: int
    cos: Float32
    sin: Float32
    tree: TokenTree | None


def attention(
    backend: Backend,
    config: ModelConfig,
    weights: LayerWeights,
    x: Array,
    place: Place,
    adapters: StreamLayer | None = None,
    adapted: int = 0,
) -> Array:
    """x: (T, D). Returns x + attention, (T, D). Writes the layer's keys and values of the T tokens.

    adapters: are added for the tokens from `adapted` on.
    """
    tokens = x.shape[0]
    normed = backend.rms_norm(x, weights.attention_norm, config.rms_norm_eps)
    qkv = backend.linear(normed, weights.qkv)
    if adapters is not None:
        qkv = backend.add_low_rank(qkv, normed, adapters.qkv.down, adapters.qkv.up, adapted)
    keys_at = config.query_size
    values_at = keys_at + config.kv_size
    q = qkv[:, :keys_at].reshape(tokens, config.num_heads, config.head_dim)
    k = qkv[:, keys_at:values_at].reshape(tokens, config.num_kv_heads, config.head_dim)
    v = qkv[:, values_at:].reshape(tokens, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = backend.rms_norm(q, weights.q_norm, config.rms_norm_eps)
        k = backend.rms_norm(k, weights.k_norm, config.rms_norm_eps)
    q = backend.rope(q, place.cos, place.sin)
    k = backend.rope(k, place.cos, place.sin)
    backend.kv_write(place.kv, place.layer, k, v, place.position)
    context = backend.attention(q, place.kv, place.layer, place.position, place.window, place.tree)
    mixed = backend.linear(context, weights.out)
    if adapters is not None:
        mixed = backend.add_low_rank(mixed, context, adapters.out.down, adapters.out.up, adapted)
    return backend.add(x, mixed)
