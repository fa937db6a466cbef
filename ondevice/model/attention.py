"""One layer's attention block: normed and fused projection, attention, output on top of the residual.

Grouped-query attention (arXiv 2305.13245) with optional query and key norms and a sliding window.
"""

from __future__ import annotations

from typing import NamedTuple

from ondevice.backends.base import Array, Backend, Float32, HeadNorms, Norm
from ondevice.backends.token_tree import TokenTree
from ondevice.config import ModelConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.weights import LayerWeights, StreamLayer


class Place(NamedTuple):
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

    adapters: are added for the tokens from `adapted` on. x may be overwritten.
    """
    eps, heads = config.rms_norm_eps, None
    if config.qk_norm:
        heads = HeadNorms(weights.q_norm, weights.k_norm, eps)
    norm = Norm(weights.attention_norm, eps)
    qkv = backend.linear(x, weights.qkv, norm)
    if adapters is not None:
        low = adapters.qkv
        qkv = backend.add_low_rank(qkv, x[adapted:], low.down, low.up, adapted, norm=norm)
    context = backend.attend(
        qkv, place.kv, place.layer, place.position, place.cos, place.sin, heads, place.window, place.tree
    )
    x = backend.linear(context, weights.out, added=x)
    if adapters is not None:
        x = backend.add_low_rank(x, context[adapted:], adapters.out.down, adapters.out.up, adapted)
    return x
