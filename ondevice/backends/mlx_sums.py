"""Sums and exponentials over MLX arrays whose bits don't depend on the number of rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ondevice.backends.token_tree import Int32
from ondevice.bundle.matrix_layout import padded

LANES = 16
"""Multiple that rows are padded to: a processor's exponential may differ at the end of a vector."""


def in_lanes(x: mx.array, fill: float = 0.0) -> mx.array:
    """x (T, n), padded with `fill` to a multiple of LANES."""
    more = padded(x.shape[1], LANES) - x.shape[1]
    return mx.pad(x, [(0, 0), (0, more)], constant_values=fill) if more else x


def sums(values: mx.array) -> mx.array:
    """Sums (T, 1) over the last axis of (T, n), in the order of `row_sums.row_sums`."""
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
    """log(1 + exp(x)) for x (n, C). The result is padded with zeros to a multiple of LANES."""
    return mx.logaddexp(in_lanes(x), mx.zeros(1))


def convolved(tail: mx.array, channels: mx.array, parents: Int32, weights: mx.array) -> mx.array:
    """The causal convolution, (n, C), of channels (n, C) after a tail (taps - 1, C).

    weights: (taps, C), oldest input first. parents: (n,), the token that each follows.
    """
    seen, inputs = tail.shape[0], mx.concatenate([tail, channels])
    # The row before each row: in the tail the previous one, for a token its parent.
    before = np.concatenate([np.arange(-1, seen - 1), parents + seen])
    rows = [np.arange(seen, seen + len(parents))]
    for _ in range(seen):
        rows.append(before[rows[-1]])
    total = None
    for tap, sources in enumerate(reversed(rows)):
        product = inputs[mx.array(sources)] * weights[tap]
        total = product if total is None else total + product
    assert total is not None
    return total
