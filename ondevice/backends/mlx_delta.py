"""The gated delta rule in MLX's ops: how each token changes a layer's state, and what it reads from it.

See `DeltaSpec`; legend as in `recurrent.py`; n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ondevice.backends.mlx_sums import convolved, in_lanes, silu, softplus, sums
from ondevice.backends.recurrent import DeltaWeights
from ondevice.backends.reference_delta import SQUARES_EPS
from ondevice.backends.token_tree import Int32
from ondevice.model_config import DeltaSpec


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
    """Betas and decays, (n, HV) each, of gates (n, 2 * HV)."""
    betas = mx.sigmoid(in_lanes(gates[:, :heads]))
    times = softplus(gates[:, heads:] + weights.time_bias)
    decays = mx.exp(in_lanes(weights.decay[None]) * times)
    return betas[:, :heads], decays[:, :heads]


def _unit(x: mx.array) -> mx.array:
    """Each of x (n, H, K) divided by its length."""
    rows = x.reshape(-1, x.shape[2])
    return (rows / mx.sqrt(sums(mx.square(rows)) + SQUARES_EPS)).reshape(x.shape)
