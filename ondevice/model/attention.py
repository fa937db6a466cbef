"""One layer's attention block: normed and fused projection, attention, output on top of the residual.

Grouped-query attention (arXiv 2305.13245) with optional query and key norms and a sliding window.
"""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Float32, HeadNorms, Norm
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
    of the T tokens into kv, which has room reserved. x may be overwritten.
    """
    eps, heads = config.rms_norm_eps, None
    if config.qk_norm:
        heads = HeadNorms(weights.q_norm, weights.k_norm, eps)
    qkv = backend.linear(x, weights.qkv, Norm(weights.attention_norm, eps))
    window = config.layer_windows[layer]
    context = backend.attend(qkv, kv, layer, position, cos, sin, heads, window, tree)
    return backend.linear(context, weights.out, added=x)
