"""Rotary position embedding tables (arXiv 2104.09864).

Angles are rounded to float32 as in `transformers`. Cosine and sine are computed only from IEEE additions and
multiplications, so tables have the same bits on every machine and for every split of a prompt. Cosines of
libraries don't.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.model_config import RopeSpec

# pi/2 in three parts of at most 33 bits (fdlibm's split): k * part is exact for every k below 2^20.
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_SIN_TERMS = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(9))
_COS_TERMS = tuple((-1.0) ** n / math.factorial(2 * n) for n in range(9))

AHEAD = 64
"""Most positions of a pass that uses cached tables. A cached table has twice that number."""


WINDOWS = 16
"""Number of cached tables, one for each sequence that may be decoded with others."""


class _Window(NamedTuple):
    """Tables of the positions in `known`."""

    known: range
    cos: Float32
    sin: Float32


class Rope:
    """The tables of one rotary embedding.

    frequencies: (Dh / 2,) float32, radians per position.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self.frequencies = np.array(spec.frequencies, dtype=np.float32)
        self._magnitudes = np.where(self.frequencies > 0, spec.magnitude, 1.0)
        self._windows: list[_Window] = []
        """Oldest first."""

    def run(self, first: int, count: int) -> tuple[Float32, Float32]:
        """Cosine and sine, each (count, Dh / 2), for logical positions first .. first + count - 1."""
        if count > AHEAD:
            return self._computed(np.arange(first, first + count))
        known, cos, sin = self._window(first, first + count - 1)
        start = first - known.start
        return cos[start : start + count], sin[start : start + count]

    def tables(self, positions: NDArray[np.integer]) -> tuple[Float32, Float32]:
        """Cosine and sine, each (T, Dh / 2), for logical positions (T,). The first position must be the
        smallest.
        """
        first, last = int(positions[0]), int(positions.max())
        if last - first >= AHEAD:
            return self._computed(positions)
        known, cos, sin = self._window(first, last)
        rows = positions - known.start
        return cos[rows], sin[rows]

    def _window(self, first: int, last: int) -> _Window:
        """A table that has all positions from `first` to `last`: the cached one if possible, otherwise a new
        one.
        """
        for window in reversed(self._windows):
            if window.known.start <= first <= last < window.known.stop:
                return window
        # Decoding passes use a few positions of each sequence, in ascending order.
        known = range(first, first + 2 * AHEAD)
        added = _Window(known, *self._computed(np.arange(known.start, known.stop)))
        self._windows = [*self._windows[1 - WINDOWS :], added]
        return added

    def _computed(self, positions: NDArray[np.integer]) -> tuple[Float32, Float32]:
        angles = positions.astype(np.float32)[:, None] * self.frequencies
        cos, sin = cos_sin(angles.astype(np.float64))
        cos, sin = cos * self._magnitudes, sin * self._magnitudes
        return cos.astype(np.float32), sin.astype(np.float32)


def cos_sin(angles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine and sine of angles from 0 to 1.6 million radians, exact to 2e-15, computed by exactly rounded
    operations.
    """
    quarters = np.rint(angles * (2.0 / math.pi))
    reduced = angles
    for part in _HALF_PI:
        reduced = reduced - quarters * part
    square = reduced * reduced
    sine = reduced * _polynomial(square, _SIN_TERMS)
    cosine = _polynomial(square, _COS_TERMS)
    quadrant = quarters.astype(np.int64) & 3
    odd = (quadrant & 1) == 1
    cos = np.where(odd, sine, cosine) * np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    sin = np.where(odd, cosine, sine) * np.where(quadrant >= 2, -1.0, 1.0)
    return cos, sin


def _polynomial(x: NDArray[np.float64], terms: tuple[float, ...]) -> NDArray[np.float64]:
    total = np.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        total = total * x + term
    return total
