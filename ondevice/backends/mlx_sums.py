"""Sums and exponentials over MLX arrays whose bits don't depend on how many rows there are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ondevice.backends.token_tree import Int32
from ondevice.bundle.matrix_layout import padded

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


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x) for x (n, C)."""
    wide = in_lanes(x)
    return (wide * mx.sigmoid(wide))[:, : x.shape[1]]


def softplus(x: mx.array) -> mx.array:
    """log(1 + exp(x)) for x (n, C), and of what lies behind it up to whole lanes."""
    return mx.logaddexp(in_lanes(x), mx.zeros(1))


def convolved(tail: mx.array, channels: mx.array, parents: Int32, weights: mx.array) -> mx.array:
    """The causal convolution, (n, C), of channels (n, C) behind a tail (taps - 1, C), its oldest tap first.

    weights: (taps, C). parents: (n,), the token that each follows.
    """
    seen, inputs = tail.shape[0], mx.concatenate([tail, channels])
    # The row before each: those of the tail follow each other, and tokens follow their parents.
    before = np.concatenate([np.arange(-1, seen - 1), parents + seen])
    rows = [np.arange(seen, seen + len(parents))]
    for _ in range(seen):
        rows.append(before[rows[-1]])
    found = None
    for tap, own in enumerate(reversed(rows)):
        product = inputs[mx.array(own)] * weights[tap]
        found = product if found is None else found + product
    assert found is not None
    return found
