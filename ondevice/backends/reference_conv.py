"""The gated short convolution in numpy: what the kernels are compared with. Sums are float64."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Float32
from ondevice.backends.recurrent import StateStore, ahead_parents
from ondevice.model_config import ConvSpec


def short_conv(
    projected: Float32, states: StateStore, layer: int, spec: ConvSpec, weights: Float32
) -> Float32:
    """`RecurrentOps.short_conv`."""
    b, c, x = np.split(projected, 3, axis=1)
    products, count, seen = b * x, len(projected), spec.taps - 1
    tail = states.state(layer).reshape(seen, spec.channels)
    ahead = states.ahead(layer)
    if ahead is None:
        inputs, parents = np.concatenate([tail, products]), ahead_parents(0, count, None)
        states.next_state(layer)[:] = inputs[count:].reshape(-1)
    else:
        ahead.channels[-count:] = products
        inputs, parents = np.concatenate([tail, ahead.channels]), ahead.parents
    # The row before each: those of the tail follow each other, and tokens follow their parents.
    before = np.concatenate([np.arange(-1, seen - 1), parents + seen])
    rows, found = np.arange(len(inputs) - count, len(inputs)), np.zeros((count, spec.channels))
    for tap in reversed(range(spec.taps)):
        found += inputs[rows].astype(np.float64) * weights[tap]
        rows = before[rows]
    out: Float32 = (found * c).astype(np.float32)
    return out
