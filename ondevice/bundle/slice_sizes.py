"""How many neurons of a dense feed-forward are stored together, as `weights/README.md` has it."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

SLICE_BYTES = 2 << 20
"""Bytes that a slice has at about most: from 1 MiB on, flash is at its full rate."""
SLICE_UNIT = 256
"""Neurons that a slice has a multiple of: the columns of every format's scales divide them."""
SLICES_PER_LAYER = 8
"""Slices that a small layer is cut into, so that a budget can hold some of them."""


@lru_cache
def slice_units(units: tuple[int, ...], unit_bytes: int) -> int:
    """Units of neurons in a slice: near SLICE_BYTES, with as little padding over all layers as can be.

    units: of each layer's neurons, at least one. unit_bytes: bytes of a slice of one unit.
    """
    aim = max(1, min(SLICE_BYTES // unit_bytes, max(units) // SLICES_PER_LAYER))
    layers = Counter(units)

    def cost(size: int) -> tuple[int, int, int]:
        """Units with their padding, then how far from the aim."""
        stored = sum(-(-count // size) * size * times for count, times in layers.items())
        return stored, abs(size - aim), size

    return min(range(max(1, aim // 2), 2 * aim + 1), key=cost)
