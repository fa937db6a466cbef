"""A model's weights as an engine loaded them: opaque to everything but that engine's ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.backends.base import Embedding, FeedForward, Linear, Vector


@dataclass(frozen=True)
class LayerWeights:
    """What one layer multiplies with, as the engine loaded it. The q and k norms exist if `qk_norm`."""

    attention_norm: Vector
    qkv: Linear
    q_norm: Vector | None
    k_norm: Vector | None
    out: Linear
    feed_forward_norm: Vector
    feed_forward: FeedForward


@dataclass(frozen=True)
class ModelWeights:
    """All of a model, as the engine loaded it."""

    embedding: Embedding
    layers: Sequence[LayerWeights]
    final_norm: Vector
    head: Linear
