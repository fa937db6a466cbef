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
from ondevice.backends.recurrent import Ahead, DeltaWeights, MixerWeights, States, StateStore, ahead_parents
from ondevice.model_config import ConvSpec, DeltaSpec, Mamba2Spec

Float64 = NDArray[np.float64]
Spec = TypeVar("Spec", DeltaSpec, Mamba2Spec)
Weights = TypeVar("Weights")
Rule: TypeAlias = Callable[[Float32, Float32, States, States, Spec, Weights], Float32]
"""Outputs for `projected` and `gates` of T tokens after a state; writes the state after the last token."""
SQUARES_EPS = 1e-6
"""Added to the sum of squares whose root divides queries and keys."""


def of_pass(
    rule: Rule[Spec, Weights],
    projected: Float32,
    gates: Float32,
    states: StateStore,
    layer: int,
    spec: Spec,
    weights: Weights,
) -> Float32:
    """The output of a pass: `RecurrentOps.gated_delta` or `mamba2`, as `rule` says."""
    state, ahead = states.state(layer), states.ahead(layer)
    if ahead is None:
        return rule(projected, gates, state, states.next_state(layer), spec, weights)
    ahead.keep(projected, gates)
    return _of_tree(rule, ahead, projected, state, spec, weights)


def replay(
    rule: Rule[Spec, Weights], states: StateStore, layer: int, count: int, spec: Spec, weights: Weights
) -> None:
    """`RecurrentOps.replay_delta` or `replay_mamba2`, as `rule` says."""
    channels, gates = states.inputs(layer, count)
    projected = np.pad(channels, ((0, 0), (0, spec.value_size)))
    rule(projected, gates, states.state(layer), states.next_state(layer), spec, weights)


def _of_tree(
    rule: Rule[Spec, Weights], ahead: Ahead, projected: Float32, state: States, spec: Spec, weights: Weights
) -> Float32:
    """Outputs of the last T tokens of a tree, each computed from the state after its parent."""
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
    """The gated short convolution, as in `RecurrentOps.short_conv`."""
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


def gated_delta(
    projected: Float32,
    gates: Float32,
    state: States,
    next_state: States,
    spec: DeltaSpec,
    weights: DeltaWeights,
) -> Float32:
    """(T, HV * V) for projected (T, C + HV * V) and gates (T, 2 * HV), as in `RecurrentOps.gated_delta`."""
    heads, shape = spec.value_heads, (spec.value_heads, spec.key_width, spec.value_width)
    split = heads * spec.key_width * spec.value_width
    held, tail = state[:split].reshape(shape), state[split:].reshape(spec.taps - 1, spec.channels)
    inputs = np.concatenate([tail, projected[:, : spec.channels]])
    out = np.empty((len(projected), spec.value_size), np.float32)
    for token in range(len(projected)):
        window = inputs[token : token + spec.taps].astype(np.float64)
        mixed = silu((window * weights.conv).sum(axis=0))
        q, k, v = np.split(mixed, [spec.key_size, 2 * spec.key_size])
        # Neighbouring value heads share a key head.
        q, k = (
            np.repeat(_unit(x.reshape(-1, spec.key_width)), heads // spec.key_heads, axis=0) for x in (q, k)
        )
        beta = 1.0 / (1.0 + np.exp(-gates[token, :heads].astype(np.float64)))
        time = np.logaddexp(0.0, gates[token, heads:].astype(np.float64) + weights.time_bias)
        decayed = held * np.exp(weights.decay * time)[:, None, None]
        change = (v.reshape(heads, -1) - np.einsum("hk,hkv->hv", k, decayed)) * beta[:, None]
        held = (decayed + k[:, :, None] * change[:, None]).astype(np.float32)
        reads = np.einsum("hk,hkv->hv", q / np.sqrt(spec.key_width), held.astype(np.float64))
        reads /= np.sqrt(np.mean(np.square(reads), axis=1, keepdims=True) + weights.norm.eps)
        z = projected[token, spec.channels :].astype(np.float64)
        out[token] = (reads * weights.norm.weight).reshape(-1) * silu(z)
    next_state[:split] = held.reshape(-1)
    next_state[split:] = inputs[len(projected) :].reshape(-1)
    return out


def _unit(x: Float64) -> Float64:
    """Each row divided by its length."""
    unit: Float64 = x / np.sqrt(np.sum(np.square(x), axis=1, keepdims=True) + SQUARES_EPS)
    return unit


def mamba2(
    projected: Float32,
    steps: Float32,
    state: States,
    next_state: States,
    spec: Mamba2Spec,
    weights: MixerWeights,
) -> Float32:
    """(T, I) for projected (T, C + I) and steps (T, H), as in `RecurrentOps.mamba2`."""
    heads, split = spec.heads, spec.value_size * spec.state_width
    held = state[:split].reshape(heads, spec.state_width, spec.head_width)
    tail = state[split:].reshape(spec.taps - 1, spec.channels)
    inputs = np.concatenate([tail, projected[:, : spec.channels]])
    bias = 0.0 if weights.conv_bias is None else weights.conv_bias.astype(np.float64)
    skip = weights.skip.astype(np.float64)[:, None]
    out = np.empty((len(projected), spec.value_size), np.float32)
    for token in range(len(projected)):
        window = inputs[token : token + spec.taps].astype(np.float64)
        mixed = silu((window * weights.conv).sum(axis=0) + bias)
        x, b, c = np.split(mixed, [spec.value_size, spec.value_size + spec.group_size])
        x = x.reshape(heads, -1)
        # Neighbouring heads share a group.
        b, c = (
            np.repeat(part.reshape(spec.groups, -1), heads // spec.groups, axis=0)[:, :, None]
            for part in (b, c)
        )
        step = steps[token].astype(np.float64) * spec.time_factor + weights.time_bias
        time = np.clip(np.logaddexp(0.0, step), spec.least_time, spec.most_time)[:, None, None]
        decayed = held * np.exp(weights.decay.astype(np.float64)[:, None, None] * time)
        held = (decayed + b * time * x[:, None]).astype(np.float32)
        reads = (c * held).sum(axis=1) + skip * x
        z = projected[token, spec.channels :].astype(np.float64)
        out[token] = _gated(reads.reshape(-1), z, spec, weights)
    next_state[:split] = held.reshape(-1)
    next_state[split:] = inputs[len(projected) :].reshape(-1)
    return out


def _gated(y: Float64, z: Float64, spec: Mamba2Spec, weights: MixerWeights) -> Float64:
    """y (I,) gated by z (I,) and normed."""
    gate = silu(z * spec.gate_factor)
    if spec.norm == "none":
        return y * gate * spec.out_factor
    if spec.norm == "before":
        return _normed(y, spec, weights) * gate * spec.out_factor
    return _normed(y * gate, spec, weights) * spec.out_factor


def _normed(x: Float64, spec: Mamba2Spec, weights: MixerWeights) -> Float64:
    parts = x.reshape(spec.norm_groups, -1)
    parts = parts / np.sqrt(np.mean(np.square(parts), axis=1, keepdims=True) + weights.norm.eps)
    out: Float64 = parts.reshape(-1) * weights.norm.weight
    return out


def silu(x: Float64) -> Float64:
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-np.maximum(x, -700.0)))
