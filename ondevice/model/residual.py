"""The sum of the residual and a block's output, by the places of the layer's norms."""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Norm
from ondevice.model_config import LayerSpec


def joined(backend: Backend, spec: LayerSpec, residual: Array, y: Array, norm: Norm | None) -> Array:
    """The residual after a block, (R, D).

    residual: (R, D), before the block; may be overwritten. y: (R, D), the block's output, which includes the
    residual if `spec.plain_residual`. norm: of the output, or None.
    """
    if norm is None:
        return y
    return backend.normed(y, norm) if spec.plain_residual else backend.add_normed(residual, y, norm)
