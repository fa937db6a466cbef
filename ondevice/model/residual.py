"""How a block's output joins the residual, by where the layer's norms stand."""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Norm
from ondevice.model_config import LayerSpec


def joined(backend: Backend, spec: LayerSpec, residual: Array, y: Array, norm: Norm | None) -> Array:
    """The residual behind a block, (R, D).

    Args:
        backend: computes norms.
        spec: says where they stand.
        residual: (R, D), before the block; may be overwritten.
        y: (R, D), the block's output, with the residual in it already if `spec.joins_plainly`.
        norm: the one behind the block, if there is one.
    """
    if norm is None:
        return y
    return backend.normed(y, norm) if spec.joins_plainly else backend.add_normed(residual, y, norm)
