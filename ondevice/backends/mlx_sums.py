"""Sums and exponentials over MLX arrays whose bits don't depend on how many rows there are."""

from __future__ import annotations

import mlx.core as mx

from ondevice.bundle.layout import padded

LANES = 16
"""What rows are padded to: a processor's exponential may differ where a vector ends."""


def in_lanes(x: mx.array, fill: float = 0.0) -> mx.array:
    """x (T, n), and `fill` behind each row up to whole lanes."""
    more = padded(x.shape[1], LANES) - x.shape[1]
    return mx.pad(x, [(0, 0), (0, more)], constant_values=fill) if more else x


def sums(values: mx.array) -> mx.array:
    """Sums over the last axis of (T, n), (T, 1), in one order, as `row_sums.row_sums` has it."""
    width = values.shape[1]
    while width > 1:
        half = -(-width // 2)
        summed = values[:, : width - half] + values[:, half:width]
        odd = 2 * half > width
        values = mx.concatenate([summed, values[:, width - half : half]], axis=1) if odd else summed
        width = half
    return values
