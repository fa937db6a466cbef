"""The MLX backend with a feed-forward that reports inputs and gates."""

from __future__ import annotations

import mlx.core as mx

from ondevice.backends.base import Norm
from ondevice.backends.mlx import MlxBackend
from ondevice.backends.mlx_ops import normed
from ondevice.converters.training.observed import Observed


class ObservedMlx(Observed, MlxBackend):
    """The MLX backend on MLX's default device, whose feed-forward reports inputs and gates."""

    def __init__(self, neurons: int) -> None:
        """neurons: number of neurons that are streamed at a time, a multiple of 64."""
        super().__init__(segment_neurons=neurons)

    def normed(self, x: mx.array, norm: Norm) -> mx.array:
        return normed(x, norm)
