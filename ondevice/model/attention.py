"""One layer's attention block: norm, fused projection, rotary embedding, cache, attention, output, residual.

Grouped-query attention (arXiv 2305.13245) with optional query and key norms and a sliding window.
"""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Float32
from ondevice.backends.token_tree import TokenTree
from ondevice.config import ModelConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.weights import LayerWeights


def attention(
    backend: Backend,
    config: ModelConfig,
    weights: LayerWeights,
    x: Array,
    kv: KVCache,
    layer: int,
    position: int,
    cos: Float32,
    sin: Float32,
    tree: TokenTree | None = None,
) -> Array:
    """x: (T, D) behind `position` stored tokens; cos, sin: (T, Dh / 2). Returns x + attention, (T, D).

    tree: how the T tokens follow each other, if they don't just follow. Writes this layer's keys and values
    of the T tokens into kv, which has room reserved.
    """
    tokens = x.shape[0]
    normed = backend.rms_norm(x, weights.attention_norm, config.rms_norm_eps)
    qkv = backend.linear(normed, weights.qkv)
    keys_at = config.query_size
    values_at = keys_at + config.kv_size
    q = qkv[:, :keys_at].reshape(tokens, config.num_heads, config.head_dim)
    k = qkv[:, keys_at:values_at].reshape(tokens, config.num_kv_heads, config.head_dim)
    v = qkv[:, values_at:].reshape(tokens, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = backend.rms_norm(q, weights.q_norm, config.rms_norm_eps)
        k = backend.rms_norm(k, weights.k_norm, config.rms_norm_eps)
    q = backend.rope(q, cos, sin)
    k = backend.rope(k, cos, sin)
    backend.kv_write(kv, layer, k, v, position)
    context = backend.attention(q, kv, layer, position, config.layer_windows[layer], tree)
    return backend.add(x, backend.linear(context, weights.out))
