"""Passes, drafts and replays of recurrent layers in numpy, the oracle of the kernels.

A rule goes token by token in float64. Each token's state is rounded to float32, so that results don't depend
on the number of tokens in a pass. Sums of the short convolution are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.backends.recurrent import Ahead, States, StateStore, ahead_parents
from ondevice.model_config import ConvSpec, DeltaSpec, Mamba2Spec

Float64 = NDArray[np.float64]
Spec = TypeVar("Spec", DeltaSpec, Mamba2Spec)
Weights = TypeVar("Weights")
Rule: TypeAlias = Callable[[Float32, Float32, States, States, Spec, Weights], Float32]
"""Outputs for `projected` and `gates` of T tokens after a state; writes the state after the last token."""


def of_pass(
    rule: Rule[Spec, Weights],
    projected: Float32,
    gates: Float32,
    states: StateStore,
    layer: int,
    spec: Spec,
    weights: Weights,
) -> Float32:
    """`RecurrentOps.gated_delta`, or `mamba2`, by `rule`."""
    state, ahead = states.state(layer), states.ahead(layer)
    if ahead is None:
        return rule(projected, gates, state, states.next_state(layer), spec, weights)
    ahead.keep(projected, gates)
    return _of_tree(rule, ahead, projected, state, spec, weights)


def replay(
    rule: Rule[Spec, Weights], states: StateStore, layer: int, count: int, spec: Spec, weights: Weights
) -> None:
    """`RecurrentOps.replay_delta`, or `replay_mamba2`, by `rule`."""
    channels, gates = states.inputs(layer, count)
    projected = np.pad(channels, ((0, 0), (0, spec.value_size)))
    rule(projected, gates, states.state(layer), states.next_state(layer), spec, weights)


def _of_tree(
    rule: Rule[Spec, Weights],
    ahead: Ahead,
    projected: Float32,
    state: States,
    spec: Spec,
    weights: Weights,
) -> Float32:
    """Outputs of the last T tokens of a tree, each from the state after its parent."""
    held: list[States] = []
    out = np.empty((len(projected), spec.value_size), np.float32)
    first = len(ahead.parents) - len(projected)
    for node, parent in enumerate(ahead.parents):
        row = np.zeros((1, projected.shape[1]), np.float32)
        row[0, : spec.channels] = ahead.channels[node]
        if node >= first:
            row[0, spec.channels :] = projected[node - first, spec.channels :]
        after = np.empty_like(state)
        before = state if parent < 0 else held[parent]
        outputs = rule(row, ahead.gates[node : node + 1], before, after, spec, weights)
        held.append(after)
        if node >= first:
            out[node - first] = outputs[0]
    return out


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
    # The row before each row: in the tail the previous one, for a token its parent.
    before = np.concatenate([np.arange(-1, seen - 1), parents + seen])
    rows, total = np.arange(len(inputs) - count, len(inputs)), np.zeros((count, spec.channels))
    for tap in reversed(range(spec.taps)):
        total += inputs[rows].astype(np.float64) * weights[tap]
        rows = before[rows]
    out: Float32 = (total * c).astype(np.float32)
    return out


def silu(x: Float64) -> Float64:
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-np.maximum(x, -700.0)))
