"""One layer's feed-forward block: norm, gated feed-forward (arXiv 2002.05202), residual.

Where the neurons live and which of them are multiplied is the backend's and `sparsity`'s affair.
"""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Norm
from ondevice.config import ModelConfig
from ondevice.model.weights import LayerWeights, MultiStreamLayer


def feed_forward(
    backend: Backend,
    config: ModelConfig,
    weights: LayerWeights,
    x: Array,
    num_exact_rows: int | None = None,
    adapters: MultiStreamLayer | None = None,
    adapted: int = 0,
) -> Array:
    """x: (T, D). Returns x + down(activation(gate(norm x)) * up(norm x)), (T, D); may overwrite x.

    Tokens from `num_exact_rows` on make do with the neurons that are at hand. adapters: are added for those
    from `adapted` on.
    """
    norm = Norm(weights.feed_forward_norm, config.rms_norm_eps)
    before = None if adapters is None else backend.rows(x, range(adapted, x.shape[0]))
    x = backend.feed_forward(
        x, weights.feed_forward, config.hidden_act, norm=norm, added=x, num_exact_rows=num_exact_rows
    )
    if adapters is not None:
        low = adapters.feed_forward
        x = backend.add_low_rank(x, before, low.down, low.up, adapted, "relu", norm)
    return x


def prefetch(backend: Backend, config: ModelConfig, weights: LayerWeights, x: Array) -> None:
    """Tell the backend what the block of a later layer will be given, about: x (T, D) is the stream now."""
    backend.prefetch(x, Norm(weights.feed_forward_norm, config.rms_norm_eps), weights.feed_forward)
