"""A Mamba-2 mixer in numpy, the oracle of the kernels. See `reference_recurrence.py`."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Float32
from ondevice.backends.recurrent import MixerWeights, States
from ondevice.backends.reference_recurrence import Float64, silu
from ondevice.model_config import Mamba2Spec


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
