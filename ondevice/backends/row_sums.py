"""Ops on float32 rows in numpy. The order of summation is the same on every machine, and doesn't depend on
other rows.

Legend: T tokens, K and N columns and rows of a small matrix.
"""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Float32

MIN_MEAN_SQUARE = np.float32(1e-5)


def row_sums(values: Float32) -> Float32:
    """Sums (T, 1) over the last axis of (T, K), computed by adding the two halves until one column is left.

    Elementwise additions round the same way everywhere. Overwrites `values`.
    """
    width = values.shape[1]
    while width > 1:
        half = -(-width // 2)
        values[:, : width - half] += values[:, half:width]
        width = half
    return values[:, :1].copy()


def small_linear(x: Float32, weight: Float32) -> Float32:
    """x @ weight^T, (T, N), for x (T, K) and a small weight (N, K)."""
    out = np.empty((len(x), len(weight)), dtype=np.float32)
    for n, row in enumerate(weight):
        out[:, n : n + 1] = row_sums(x * row)
    return out


def match_rms(x: Float32, other: Float32) -> Float32:
    """Rows of x (T, D) scaled to the root mean square of those of `other` (T, D)."""
    width = np.float32(x.shape[1])
    target = np.sqrt(row_sums(other * other) / width)
    rms = np.sqrt(np.maximum(row_sums(x * x) / width, MIN_MEAN_SQUARE))
    scaled: Float32 = x * (target / rms)
    return scaled


def cut_off(gates: Float32, deviations: float) -> None:
    """Replace each row of gates (T, F) by max(0, gates - mean - deviations * standard deviation), in
    place.
    """
    count = np.float32(gates.shape[1])
    mean = row_sums(gates.copy()) / count
    from_mean = gates - mean
    from_mean *= from_mean
    threshold = mean + np.sqrt(row_sums(from_mean) / count) * np.float32(deviations)
    gates -= threshold
    np.maximum(gates, 0, out=gates)
