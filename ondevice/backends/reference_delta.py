"""The gated delta rule in numpy, the oracle of the kernels. See `reference_recurrence.py`."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Float32
from ondevice.backends.recurrent import DeltaWeights, States
from ondevice.backends.reference_recurrence import Float64, silu
from ondevice.model_config import DeltaSpec

SQUARES_EPS = 1e-6
"""Added to the sum of squares whose root divides queries and keys."""


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
