"""Adds a block's output to the residual, with a norm where the layer has one."""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Norm
from ondevice.model_config import LayerSpec


def joined(backend: Backend, spec: LayerSpec, residual: Array, y: Array, norm: Norm | None) -> Array:
    """The residual after a block, (R, D).

    residual: (R, D), before the block; may be overwritten. y: (R, D), the block's output, which already
    includes the residual if `spec.plain_residual`. norm: the norm of the output, or None.
    """
    if norm is None:
        return y
    return backend.normed(y, norm) if spec.plain_residual else backend.add_normed(residual, y, norm)
