"""A model's weights as a backend loaded them: opaque to everything but that backend's ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.backends.base import Embedding, FeedForward, Linear, Vector


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights, as the backend loaded them. The q and k norms exist if `qk_norm`."""

    attention_norm: Vector
    qkv: Linear
    q_norm: Vector | None
    k_norm: Vector | None
    out: Linear
    feed_forward_norm: Vector
    feed_forward: FeedForward


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model, as the backend loaded them."""

    embedding: Embedding
    layers: Sequence[LayerWeights]
    final_norm: Vector
    head: Linear


@dataclass(frozen=True)
class LowRank:
    """An adapter, added to a product for rows of streams: up @ act(down @ x). down (R, K), up (N, R)."""

    down: Linear
    up: Linear


@dataclass(frozen=True)
class MultiStreamLayer:
    """One stream layer's adapters. Only feed_forward's has an activation between its matrices, ReLU."""

    qkv: LowRank
    out: LowRank
    feed_forward: LowRank


@dataclass(frozen=True)
class MultiStreamWeights:
    """Multi-stream attention (arXiv 2402.11131) in the layers from `first_layer` on.

    embeddings: one (D,) for each stream. pruning: estimates logits from what enters the stream layers.
    shared: the adapters apply to the text's own tokens too ("shared mode").
    """

    embeddings: tuple[Vector, ...]
    first_layer: int
    layers: tuple[MultiStreamLayer, ...]
    pruning: LowRank | None
    shared: bool

    @property
    def count(self) -> int:
        """Streams of a token."""
        return len(self.embeddings)

    def layer(self, layer: int) -> MultiStreamLayer | None:
        """The adapters of a model's layer, if it has any."""
        return self.layers[layer - self.first_layer] if layer >= self.first_layer else None
