"""A model's weights in a backend's form, which is opaque here."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Array, Embedding, FeedForward, HeadNorms, Linear, Norm, Router, Vector
from ondevice.backends.latent import LatentWeights
from ondevice.backends.recurrent import DeltaWeights, MixerWeights
from ondevice.records import dataclass


@dataclass(frozen=True)
class PerLayerBlock:
    """The weights of a layer's last block, for per-layer inputs: gate (W, D), out (D, W), and the norm of its
    output.
    """

    gate: Linear
    out: Linear
    norm: Norm


@dataclass(frozen=True)
class PerLayerInputs:
    """The weights of per-layer inputs, W values for each of L layers.

    table: (V, L * W). projection: (L * W, D). norm: of W values.
    """

    table: Embedding
    projection: Linear
    norm: Norm


@dataclass(frozen=True)
class Laurel:
    """A low-rank block parallel to attention: down (R, D), up (D, R), and the norm of its output."""

    down: Linear
    up: Linear
    norm: Norm


@dataclass(frozen=True)
class AltUpLayer:
    """The float32 weights with which a layer predicts and corrects C residual streams (`altup.py`).

    norm: the norm of the router's input. router: (C, D). predict: (C * C, C). correct: (C, C). scale: (D,).
    """

    norm: Norm
    router: Vector
    predict: Vector
    correct: Vector
    scale: Vector


@dataclass(frozen=True)
class AltUpModel:
    """Matrices (D, D) of all residual streams but the first: at the model's start, and at its end."""

    spread: Sequence[Linear]
    gather: Sequence[Linear]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's loaded weights. A part that the layer doesn't have is None.

    scale: (1,), factor of the layer's output. sinks: (H,), attention-sink logits. gates: the projection that
    gives gated attention's gates, (H * Dh, D), the delta rule's gates, (2 * HV, D), or a mixer's steps, (H,
    D). conv: (taps, C), weights of a short convolution, oldest input first. mixer_in, mixer_out: matrices of
    a mixer parallel to attention, (C + I, D) and (D, I).
    """

    attention_norm: Norm | None
    qkv: Linear
    head_norms: HeadNorms | None
    out: Linear
    attention_output_norm: Norm | None
    feed_forward_norm: Norm | None
    feed_forward: FeedForward
    feed_forward_output_norm: Norm | None
    laurel: Laurel | None = None
    altup: AltUpLayer | None = None
    per_layer: PerLayerBlock | None = None
    scale: Vector | None = None
    sinks: Vector | None = None
    router: Router | None = None
    latent: LatentWeights | None = None
    gates: Linear | None = None
    delta: DeltaWeights | None = None
    conv: Array | None = None
    mixer: MixerWeights | None = None
    mixer_in: Linear | None = None
    mixer_out: Linear | None = None


@dataclass(frozen=True)
class ModelWeights:
    """All loaded weights of a model.

    Args:
        embedding, head: None in a part of a model that lacks them.
        final_norm: the norm of the last layer's output, or None.
        positions: (max_context, D), learned position embeddings, or None.
        project_in, project_out: (D, E) and (E, D), between embeddings of width E and the layers; None where
            embeddings have the layers' width.
    """

    embedding: Embedding
    layers: Sequence[LayerWeights]
    final_norm: Norm | None
    head: Linear
    positions: Array | None = None
    project_in: Linear | None = None
    project_out: Linear | None = None
    per_layer: PerLayerInputs | None = None
    altup: AltUpModel | None = None


@dataclass(frozen=True)
class LowRank:
    """A low-rank adapter. In stream rows, up @ act(down @ x) is added to a product. down: (R, K);
    up: (N, R).
    """

    down: Linear
    up: Linear


@dataclass(frozen=True)
class MultiStreamLayer:
    """The adapters of one stream layer. Only `feed_forward` has an activation (ReLU) between its two
    matrices.
    """

    qkv: LowRank
    out: LowRank
    feed_forward: LowRank


@dataclass(frozen=True)
class MultiStreamWeights:
    """Multi-stream attention (arXiv 2402.11131) in the layers from `first_layer` on.

    embeddings: one (D,) for each stream; empty in a part of a model without the first stream layer.
    first_layer: index in the part. shared: whether the adapters apply to the text's tokens too ("shared
    mode"). count: streams of a token.
    """

    embeddings: tuple[Vector, ...]
    first_layer: int
    layers: tuple[MultiStreamLayer, ...]
    shared: bool
    count: int

    def layer(self, layer: int) -> MultiStreamLayer | None:
        """The adapters of layer `layer`; None if it has none."""
        return self.layers[layer - self.first_layer] if layer >= self.first_layer else None
