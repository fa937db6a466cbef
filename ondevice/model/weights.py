"""A model's weights as a backend loaded them; only that backend's ops know their form."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Array, Embedding, FeedForward, HeadNorms, Linear, Norm, Router, Vector
from ondevice.backends.latent import LatentWeights
from ondevice.backends.recurrent import DeltaWeights, MixerWeights
from ondevice.records import dataclass


@dataclass(frozen=True)
class PerLayerBlock:
    """The block of per-layer inputs that ends a layer: gate (W, D), out (D, W), the norm of its output."""

    gate: Linear
    out: Linear
    norm: Norm


@dataclass(frozen=True)
class PerLayerInputs:
    """Makes per-layer inputs, W values for each of L layers.

    table: a token's rows of all layers, (V, L * W). projection: (L * W, D). norm: of W values.
    """

    table: Embedding
    projection: Linear
    norm: Norm


@dataclass(frozen=True)
class Laurel:
    """A low-rank block of rank R beside attention: down (R, D), up (D, R), and the norm of its output."""

    down: Linear
    up: Linear
    norm: Norm


@dataclass(frozen=True)
class CopiesOfLayer:
    """How a layer predicts and corrects C copies of the residual: float32, and scale (D,).

    norm: of the router's input. router: (C, D). predict: (C * C, C). correct: (C, C).
    """

    norm: Norm
    router: Vector
    predict: Vector
    correct: Vector
    scale: Vector


@dataclass(frozen=True)
class CopiesOfModel:
    """Matrices (D, D) of all copies of the residual but the first: at the model's begin, and at its end."""

    spread: Sequence[Linear]
    gather: Sequence[Linear]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights, as the backend loaded them. A part that the layer doesn't have is None.

    scale: (1,), factor of the residual that leaves the layer. sinks: (H,), scores of attention sinks. gates:
    the matrix of gated attention's gates, (H * Dh, D), of the delta rule's, (2 * HV, D), or of a mixer's
    steps, one of each of its heads. conv: (taps, C), a short convolution's, oldest input first.
    mixer_in, mixer_out: matrices of a mixer beside attention, (C + I, D) and (D, I).
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
    copies: CopiesOfLayer | None = None
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
    """All weights of a model, as the backend loaded them.

    Args:
        embedding, head: None in a part of a model that lacks them.
        final_norm: of the last layer's output; None if that isn't normed.
        positions: (max_context, D), what each position adds to the embedding; None if they add nothing.
        project_in, project_out: (D, E) and (E, D), between embeddings E wide and the layers; None where
            embeddings are D wide.
    """

    embedding: Embedding
    layers: Sequence[LayerWeights]
    final_norm: Norm | None
    head: Linear
    positions: Array | None = None
    project_in: Linear | None = None
    project_out: Linear | None = None
    per_layer: PerLayerInputs | None = None
    copies: CopiesOfModel | None = None


@dataclass(frozen=True)
class LowRank:
    """An adapter: up @ act(down @ x), added to a product in rows of streams. down: (R, K); up: (N, R)."""

    down: Linear
    up: Linear


@dataclass(frozen=True)
class MultiStreamLayer:
    """One stream layer's adapters. Only `feed_forward` has an activation (ReLU) between its matrices."""

    qkv: LowRank
    out: LowRank
    feed_forward: LowRank


@dataclass(frozen=True)
class MultiStreamWeights:
    """Multi-stream attention (arXiv 2402.11131) in the layers from `first_layer` on.

    embeddings: one (D,) for each stream; none in a part of a model into which streams come from earlier
    layers, or which only has such. first_layer: of the part's own, or behind them. shared: whether the
    adapters apply to the text's own tokens too ("shared mode"). count: streams of a token.
    """

    embeddings: tuple[Vector, ...]
    first_layer: int
    layers: tuple[MultiStreamLayer, ...]
    shared: bool
    count: int

    def layer(self, layer: int) -> MultiStreamLayer | None:
        """The adapters of layer `layer`; None if it has none."""
        return self.layers[layer - self.first_layer] if layer >= self.first_layer else None
