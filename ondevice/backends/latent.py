"""Latent attention (`LatentSpec`): the loaded weights, and the ops around `Backend.attend`.

Legend as in `base.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from ondevice.model_config import LatentSpec

Array: TypeAlias = Any
Linear: TypeAlias = Any
Norm: TypeAlias = Any
"""A backend's arrays and loaded matrices, and norms, as in `base.py`."""


class LatentWeights(NamedTuple):
    """The weights of latent attention, without its projections, for H heads.

    norm: of the latent. keys: (H * rank, key_dim), each head's K_h transposed. values: (H * value_dim, rank),
    each head's V_h. queries, query_norm: (H * query_width, query_rank), and the norm of its input; None
    where queries come from the layer's input.
    """

    norm: Norm
    keys: Linear
    values: Linear
    queries: Linear | None = None
    query_norm: Norm | None = None


class LatentOps(Protocol):
    """The ops of latent attention."""

    def latent_rows(self, qkv: Array, spec: LatentSpec, weights: LatentWeights) -> Array:
        """Latent queries and latents as `attend` takes them, before rotation: (T, (H + 1) * width).

        A row is [K_h^T query | rotary part] for every head h, then [norm(latent) | rotary key part].

        qkv: (T, ...), a layer's fused projection: the queries or their low-rank input, then the latent and
        the rotary key part.
        """

    def linear_heads(self, x: Array, weight: Linear, heads: int) -> Array:
        """(T, N) for x (T, H * K), head by head: rows [h * N / H, (h + 1) * N / H) of the matrix (N, K)
        multiply the values [h * K, (h + 1) * K). N / H is a multiple of 16.
        """
