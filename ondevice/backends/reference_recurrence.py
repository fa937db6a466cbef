"""Passes, drafts and replays of the rules of recurrent layers in numpy: what the kernels are compared with.

A rule goes token by token in float64. Each token's state is rounded to float32, as it is stored, so that a
pass may have any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.backends.recurrent import Ahead, States, StateStore
from ondevice.model_config import DeltaSpec, Mamba2Spec

Float64 = NDArray[np.float64]
Spec = TypeVar("Spec", DeltaSpec, Mamba2Spec)
Weights = TypeVar("Weights")
Rule: TypeAlias = Callable[[Float32, Float32, States, States, Spec, Weights], Float32]
"""Outputs of `projected` and `gates` of T tokens behind a state; writes the state behind the last of them."""


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
    """Outputs of the last T tokens of a tree: each with the state behind the token that it follows."""
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
        found = rule(row, ahead.gates[node : node + 1], before, after, spec, weights)
        held.append(after)
        if node >= first:
            out[node - first] = found[0]
    return out


def silu(x: Float64) -> Float64:
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-np.maximum(x, -700.0)))
