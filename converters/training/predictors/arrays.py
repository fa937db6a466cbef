"""What predictors are fitted with: numpy, or MLX on its default device; one algorithm over both.

The heavy products and all gradient steps go through here; decompositions of thin matrices, thresholds and
what comes from disk are numpy's everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.training.predictors.layer_predictor import Float32

TrainingBackend: TypeAlias = Literal["cpu", "mlx"]
Array: TypeAlias = Any
"""float32 or booleans, with numpy's operators, `T` and `sum`."""
Elementwise: TypeAlias = Callable[..., tuple[Array, ...]]
"""As many arrays as change, of these and of others, row by row."""

BLOCK_VALUES = 1 << 17
"""Values of an array that numpy goes over together: what lies between stays in a core's cache."""


class Arrays(Protocol):
    """Where arrays lie, and how they are computed."""

    @property
    def namespace(self) -> Any:
        """What has `abs`, `einsum`, `exp`, `sqrt` and `where` for them."""
        ...

    def load(self, values: NDArray[Any]) -> Array:
        """float32 or booleans as such an array, which may be `values` itself. Raises MemoryError."""
        ...

    def to_numpy(self, array: Array) -> Float32:
        """Its values, once they are known; they may be `array` itself. Raises MemoryError."""
        ...

    def changed(self, function: Elementwise, changing: Sequence[Array], *others: Array) -> tuple[Array, ...]:
        """What `function` makes of `changing`, which may be overwritten, and `others`; equal rows all."""
        ...

    def begin(self, *arrays: Array) -> None:
        """Have these computed while the host goes on."""
        ...

    def wait(self, *arrays: Array) -> None:
        """Until these are known. Raises MemoryError."""
        ...


class NumpyArrays:
    """`Arrays` on the CPU: everything is known at once, and changed in place."""

    namespace = np

    def load(self, values: NDArray[Any]) -> Array:
        return values

    def to_numpy(self, array: Array) -> Float32:
        return array  # type: ignore[no-any-return]

    def changed(self, function: Elementwise, changing: Sequence[Array], *others: Array) -> tuple[Array, ...]:
        first = changing[0]
        rows = max(1, BLOCK_VALUES * len(first) // first.size)
        for start in range(0, len(first), rows):
            block = slice(start, start + rows)
            found = function(*(array[block] for array in (*changing, *others)))
            for array, values in zip(changing, found, strict=True):
                array[block] = values
        return tuple(changing)

    def begin(self, *arrays: Array) -> None:
        """Nothing is left to compute."""

    def wait(self, *arrays: Array) -> None:
        """Nothing is left to wait for."""


def arrays_of(backend: TrainingBackend) -> Arrays:
    """What a backend fits with. MLX is imported for `mlx` alone; ImportError without it."""
    if backend == "cpu":
        return NumpyArrays()
    from ondevice.converters.training.predictors.mlx_arrays import MlxArrays

    return MlxArrays()
