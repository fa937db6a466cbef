"""One layer's attention block: norm and fused qkv projection, attention, output projection, residual.

Grouped-query attention (arXiv 2305.13245) with optional query and key norms and a sliding window.
"""

from __future__ import annotations

from typing import NamedTuple

from ondevice.backends.base import Array, Backend, Float32, HeadNorms, Norm
from ondevice.backends.token_tree import TokenTree
from ondevice.config import ModelConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.weights import LayerWeights, MultiStreamLayer


class Rows(NamedTuple):
    """Positions of a batch's R rows: behind `position` tokens in kv, which has room for them.

    tree: how the rows follow each other; None: each follows the one before. cos, sin: (R, Dh / 2), the rotary
    tables of the rows' positions. adapted: first row to which adapters are added.
    """

    kv: KVCache
    position: int
    tree: TokenTree | None
    cos: Float32
    sin: Float32
    adapted: int


def attention(
    backend: Backend,
    config: ModelConfig,
    weights: LayerWeights,
    layer: int,
    x: Array,
    rows: Rows,
    adapters: MultiStreamLayer | None = None,
) -> Array:
    """x + attention(norm(x)), (R, D), for x (R, D); may overwrite x. Stores the rows' keys and values."""
    kv, position, tree, cos, sin, adapted = rows
    eps, heads = config.rms_norm_eps, None
    if config.qk_norm:
        heads = HeadNorms(weights.q_norm, weights.k_norm, eps)
    norm = Norm(weights.attention_norm, eps)
    qkv = backend.linear(x, weights.qkv, norm)
    if adapters is not None:
        low = adapters.qkv
        qkv = backend.add_low_rank(qkv, x[adapted:], low.down, low.up, adapted, norm=norm)
    context = backend.attend(qkv, kv, layer, position, cos, sin, heads, config.layer_windows[layer], tree)
    x = backend.linear(context, weights.out, added=x)
    if adapters is not None:
        x = backend.add_low_rank(x, context[adapted:], adapters.out.down, adapters.out.up, adapted)
    return x
