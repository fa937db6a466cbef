"""One layer's feed-forward block: norm, feed-forward (gated, arXiv 2002.05202, or not), and residual.

The backend and `sparsity` decide where neurons are and which are multiplied.
"""

from __future__ import annotations

from ondevice.backends.base import Array, Backend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.model.residual import joined
from ondevice.model.weights import LayerWeights, MultiStreamLayer
from ondevice.model_config import LayerSpec


def feed_forward(
    backend: Backend,
    spec: LayerSpec,
    weights: LayerWeights,
    x: Array,
    residual: Array,
    batch: ForwardBatch,
    adapters: MultiStreamLayer | None = None,
    adapted: int = 0,
) -> Array:
    """residual + down(activation(gate(norm(x))) * up(norm(x))), (R, D), for x (R, D), as `spec` describes it.

    In a layer with experts, `Backend.mixture` takes the place of the feed-forward. Without a feed-forward the
    result is the residual.

    x: may be overwritten. residual: (R, D); may be x, and may be overwritten. adapters: added to the rows
    from `adapted` on.
    """
    if not spec.has_feed_forward:
        return residual
    norm = weights.feed_forward_norm
    before = None if adapters is None else backend.rows(x, range(adapted, x.shape[0]))
    added = residual if spec.plain_residual else None
    if weights.router is None:
        y = backend.feed_forward(x, weights.feed_forward, spec.feed_forward, batch, norm=norm, added=added)
    else:
        y = backend.mixture(x, weights.feed_forward, weights.router, spec, batch, norm=norm, added=added)
    if adapters is not None:
        low = adapters.feed_forward
        y = backend.add_low_rank(y, before, low.down, low.up, adapted, "relu", norm)
    return joined(backend, spec, residual, y, weights.feed_forward_output_norm)


def prefetch(backend: Backend, spec: LayerSpec, weights: LayerWeights, x: Array) -> None:
    """Let the backend prefetch for a later layer, whose input will be near the current residual x (R, D)."""
    if not spec.has_feed_forward:
        return
    norm = weights.feed_forward_norm
    if weights.router is None:
        backend.prefetch(x, norm, weights.feed_forward)
    else:
        backend.prefetch_experts(x, norm, weights.feed_forward, weights.router, spec)
