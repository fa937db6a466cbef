"""One layer's feed-forward block: norm, gated feed-forward (arXiv 2002.05202), residual.

The backend and `sparsity` decide where neurons are and which of them are multiplied.
"""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Norm
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.config import ModelConfig
from ondevice.model.weights import LayerWeights, MultiStreamLayer


def feed_forward(
    backend: Backend,
    config: ModelConfig,
    weights: LayerWeights,
    x: Array,
    batch: ForwardBatch,
    adapters: MultiStreamLayer | None = None,
    adapted: int = 0,
) -> Array:
    """x + down(activation(gate(norm(x))) * up(norm(x))), (R, D), for x (R, D); may overwrite x.

    x: the rows of `batch`. adapters: added to the rows from `adapted` on.
    """
    norm = Norm(weights.feed_forward_norm, config.rms_norm_eps)
    before = None if adapters is None else backend.rows(x, range(adapted, x.shape[0]))
    x = backend.feed_forward(x, weights.feed_forward, config.hidden_act, batch, norm=norm, added=x)
    if adapters is not None:
        low = adapters.feed_forward
        x = backend.add_low_rank(x, before, low.down, low.up, adapted, "relu", norm)
    return x


def prefetch(backend: Backend, config: ModelConfig, weights: LayerWeights, x: Array) -> None:
    """Let the backend prefetch for a later layer, whose input will be near x (R, D), the residual now."""
    backend.prefetch(x, Norm(weights.feed_forward_norm, config.rms_norm_eps), weights.feed_forward)
