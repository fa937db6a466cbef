"""Latent attention (`LatentSpec`): its weights as a backend loaded them, and the ops on them.

What attends is `Backend.attend`. Legend as in `base.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from ondevice.model_config import LatentSpec

Array: TypeAlias = Any
Linear: TypeAlias = Any
Norm: TypeAlias = Any
"""A backend's arrays and loaded matrices, and norms, as in `base.py`."""


class LatentWeights(NamedTuple):
    """The weights of latent attention beside its projections, of H heads.

    norm: of the latent. keys: (H * rank, key_dim), each head's K_h transposed. values: (H * value_dim, rank),
    each head's V_h. queries, query_norm: (H * query_width, query_rank), and the norm of its input; None
    where queries are made of the layer's input.
    """

    norm: Norm
    keys: Linear
    values: Linear
    queries: Linear | None = None
    query_norm: Norm | None = None


class LatentOps(Protocol):
    """The ops of latent attention, which are a backend's."""

    def latent_rows(self, qkv: Array, spec: LatentSpec, weights: LatentWeights) -> Array:
        """Queries of latents, and latents, as `attend` takes them: (T, (H + 1) * width), unturned.

        That is, of every head, [K_h^T query | the part that turns], and then [norm(latent) | key part].

        qkv: (T, ...) a layer's fused projection: queries, or what they are made of, and then a latent and a
        key part.
        """
        ...

    def linear_heads(self, x: Array, weight: Linear, heads: int) -> Array:
        """Each head's own product, (T, N), for x (T, H * K): the rows [h * N / H, (h + 1) * N / H) of the
        matrix (N, K) multiply the values [h * K, (h + 1) * K). N / H is a multiple of 16.
        """
        ...
