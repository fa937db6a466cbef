"""The gated delta rule and the Mamba-2 mixer in MLX's ops: each token's change and read of a layer's state.

Arithmetic and legends as in `DeltaSpec` and `Mamba2Spec`; n tokens, output width I of a mixer.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ondevice.backends.base import Norm
from ondevice.backends.mlx_sums import convolved, in_lanes, silu, softplus, sums
from ondevice.backends.recurrent import DeltaWeights, MixerWeights
from ondevice.backends.reference_recurrence import SQUARES_EPS
from ondevice.backends.token_tree import Int32
from ondevice.model_config import DeltaSpec, Mamba2Spec


class DeltaRule:
    """`TokenRule` over n tokens. A state is (HV, K, V), and a token's read (HV, 1, V)."""

    def __init__(
        self,
        channels: mx.array,
        gates: mx.array,
        tail: mx.array,
        parents: Int32,
        spec: DeltaSpec,
        weights: DeltaWeights,
    ) -> None:
        count, heads = len(parents), spec.value_heads
        self._norm = weights.norm
        mixed = silu(convolved(tail, channels, parents, weights.conv))
        q, k, v = mx.split(mixed, [spec.key_size, 2 * spec.key_size], axis=1)
        shared = heads // spec.key_heads
        # Neighbouring value heads share a key head.
        q, k = (mx.repeat(_unit(x.reshape(count, -1, spec.key_width)), shared, axis=1) for x in (q, k))
        self._queries = (q * spec.key_width**-0.5)[:, :, None]
        self._rows, self._columns = k[:, :, None], k[..., None]
        self._values = v.reshape(count, heads, 1, -1)
        self._betas, self._decays = (
            x.reshape(count, heads, 1, 1) for x in _betas_and_decays(gates, weights, heads)
        )

    def changed(self, state: mx.array, token: int) -> mx.array:
        state = state * self._decays[token]
        change = (self._values[token] - self._rows[token] @ state) * self._betas[token]
        return state + self._columns[token] * change

    def read(self, state: mx.array, token: int) -> mx.array:
        return self._queries[token] @ state

    def outputs(self, reads: Sequence[mx.array], z: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(mx.stack(reads)[:, :, 0], self._norm.weight, self._norm.eps)
        return normed.reshape(z.shape) * silu(z)


def _betas_and_decays(gates: mx.array, weights: DeltaWeights, heads: int) -> tuple[mx.array, mx.array]:
    """Betas and decays, each (n, HV), computed from their inputs `gates` (n, 2 * HV)."""
    betas = mx.sigmoid(in_lanes(gates[:, :heads]))
    times = softplus(gates[:, heads:] + weights.time_bias)
    decays = mx.exp(in_lanes(weights.decay[None]) * times)
    return betas[:, :heads], decays[:, :heads]


def _unit(x: mx.array) -> mx.array:
    """x (n, H, K) with each vector of K divided by its length."""
    rows = x.reshape(-1, x.shape[2])
    return (rows / mx.sqrt(sums(mx.square(rows)) + SQUARES_EPS)).reshape(x.shape)


class MixerRule:
    """`TokenRule` over n tokens. A state is (G, H / G, N, P), and a token's read (G, H / G, 1, P).

    Groups are a dimension, so that values shared by their heads need no copies.
    """

    def __init__(
        self,
        channels: mx.array,
        steps: mx.array,
        tail: mx.array,
        parents: Int32,
        spec: Mamba2Spec,
        weights: MixerWeights,
    ) -> None:
        count, heads, groups = len(parents), spec.heads, spec.groups
        self._spec, self._norm = spec, weights.norm
        mixed = convolved(tail, channels, parents, weights.conv)
        if weights.conv_bias is not None:
            mixed = mixed + weights.conv_bias
        x, b, c = mx.split(silu(mixed), [spec.value_size, spec.value_size + spec.group_size], axis=1)
        x = x.reshape(count, heads, -1)
        times, decays = _times_and_decays(steps, spec, weights)
        self._skipped = (weights.skip[:, None] * x).reshape(count, -1)
        self._decays = decays.reshape(count, groups, -1, 1, 1)
        self._added = (times[..., None] * x).reshape(count, groups, heads // groups, 1, -1)
        self._columns, self._rows = b.reshape(count, groups, 1, -1, 1), c.reshape(count, groups, 1, 1, -1)

    def changed(self, state: mx.array, token: int) -> mx.array:
        return state * self._decays[token] + self._columns[token] * self._added[token]

    def read(self, state: mx.array, token: int) -> mx.array:
        return self._rows[token] @ state

    def outputs(self, reads: Sequence[mx.array], z: mx.array) -> mx.array:
        spec = self._spec
        y = mx.stack(reads).reshape(z.shape) + self._skipped[-len(reads) :]
        gates = silu(z * spec.gate_factor)
        if spec.norm == "before":
            y = _normed(y, spec, self._norm)
        y = y * gates
        if spec.norm == "after":
            y = _normed(y, spec, self._norm)
        return y * spec.out_factor


def _times_and_decays(steps: mx.array, spec: Mamba2Spec, weights: MixerWeights) -> tuple[mx.array, mx.array]:
    """Time steps and decays, (n, H) each, from the projected steps (n, H)."""
    times = softplus(steps * spec.time_factor + weights.time_bias)
    times = mx.clip(times, spec.least_time, spec.most_time)
    decays = mx.exp(in_lanes(weights.decay[None]) * times)
    return times[:, : spec.heads], decays[:, : spec.heads]


def _normed(y: mx.array, spec: Mamba2Spec, norm: Norm) -> mx.array:
    """y (T, I) normed, with each of the `norm_groups` parts of a row normed separately."""
    parts = y.reshape(-1, spec.value_size // spec.norm_groups)
    return mx.fast.rms_norm(parts, None, norm.eps).reshape(y.shape) * norm.weight
