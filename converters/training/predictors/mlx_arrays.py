"""MLX arrays for fitting predictors. MLX is lazy: it computes only what is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ondevice.backends.mlx_memory import allocation, begin, known
from ondevice.converters.training.predictors.arrays import Elementwise
from ondevice.converters.training.predictors.layer_predictor import Float32


class MlxArrays:
    """`Arrays` on MLX's default device."""

    namespace = mx

    def __init__(self) -> None:
        """Free the memory that earlier work left in MLX's cache."""
        mx.clear_cache()

    def load(self, values: NDArray[Any]) -> mx.array:
        with allocation():
            return mx.array(values)

    def to_numpy(self, array: mx.array) -> Float32:
        with allocation():
            return np.array(array)

    def changed(
        self, function: Elementwise, changing: Sequence[mx.array], *others: mx.array
    ) -> tuple[mx.array, ...]:
        return function(*changing, *others)

    def begin(self, *arrays: mx.array) -> None:
        begin(*arrays)

    def wait(self, *arrays: mx.array) -> None:
        known(*arrays)
