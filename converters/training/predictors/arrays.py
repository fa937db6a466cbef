"""Array libraries that predictors are fitted with: numpy, or MLX on its default device.

One algorithm runs on both. The heavy products and all gradient steps go through here. Decompositions of thin
matrices, thresholds and data from disk always use numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.training.predictors.layer_predictor import Float32

TrainingBackend: TypeAlias = Literal["cpu", "mlx"]
Array: TypeAlias = Any
"""Array of float32 or booleans, with numpy's operators, `T` and `sum`."""
Elementwise: TypeAlias = Callable[..., tuple[Array, ...]]
"""A function from the arrays that change, and others, to the new values of the former, row by row."""

BLOCK_VALUES = 1 << 17
"""Values of an array that numpy processes at a time, so that intermediate results stay in a core's cache."""


class Arrays(Protocol):
    """An array library: where arrays are, and how they are computed."""

    @property
    def namespace(self) -> Any:
        """The module with `abs`, `einsum`, `exp`, `sqrt` and `where` for these arrays."""
        ...

    def load(self, values: NDArray[Any]) -> Array:
        """An array of float32 or boolean `values`. It may share the memory of `values`. Raises
        MemoryError.
        """
        ...

    def to_numpy(self, array: Array) -> Float32:
        """The values of `array`, after waiting until they are computed. They may share its memory. Raises
        MemoryError.
        """
        ...

    def changed(self, function: Elementwise, changing: Sequence[Array], *others: Array) -> tuple[Array, ...]:
        """The result of `function` for the arrays `changing`, which may be overwritten, and `others`. All
        have equally many rows.
        """
        ...

    def begin(self, *arrays: Array) -> None:
        """Start to compute these arrays while the host goes on."""
        ...

    def wait(self, *arrays: Array) -> None:
        """Wait until these arrays are computed. Raises MemoryError."""
        ...


class NumpyArrays:
    """The `Arrays` of numpy on the CPU: everything is computed at once, and changed in place."""

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
            results = function(*(array[block] for array in (*changing, *others)))
            for array, values in zip(changing, results, strict=True):
                array[block] = values
        return tuple(changing)

    def begin(self, *arrays: Array) -> None:
        """Do nothing: everything is already computed."""

    def wait(self, *arrays: Array) -> None:
        """Do nothing: everything is already computed."""


def arrays_of(backend: TrainingBackend) -> Arrays:
    """The array library for a backend. MLX is imported only for `mlx`; ImportError if it is missing."""
    if backend == "cpu":
        return NumpyArrays()
    from ondevice.converters.training.predictors.mlx_arrays import MlxArrays

    return MlxArrays()
