"""The MLX ops over float32 weights, dequantised when loaded and differentiable. Streams are trained on it.

On MLX's CPU device, logits are within 1e-4 of `reference`'s, relative to the largest; on GPUs that round
products further (TF32) they differ more. Different splits of a prompt need not give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ondevice.backends.base import EmbeddingSource, FeedForwardSource, LinearSource, Norm, Selector
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.mlx_ops import MlxLinear, MlxOps, activate, normed
from ondevice.backends.reference import ReferenceBackend
from ondevice.model_config import Activation


@dataclass(frozen=True)
class MlxFeedForward:
    """gate, up, down: (F, D); row f of `down` is neuron f's column of the down projection."""

    gate: mx.array
    up: mx.array
    down: mx.array


class MlxFloatBackend(MlxOps):
    """`Backend` in MLX, on its default device, with all weights in float32."""

    name = "mlx"

    def __init__(self) -> None:
        self._loader = ReferenceBackend()

    def load_linear(self, source: LinearSource) -> MlxLinear:
        loaded = self._loader.load_linear(source)
        return MlxLinear(mx.array(loaded.weight), None if loaded.bias is None else mx.array(loaded.bias))

    def load_feed_forward(
        self, layer: int, source: FeedForwardSource, selector: Selector | None = None
    ) -> MlxFeedForward:
        # Every neuron is multiplied here: nothing is selected.
        loaded = self._loader.load_feed_forward(layer, source)
        return MlxFeedForward(mx.array(loaded.gate), mx.array(loaded.up), mx.array(loaded.down))

    def load_embedding(self, source: EmbeddingSource) -> EmbeddingSource:
        return source

    def product(self, x: mx.array, weight: MlxLinear) -> mx.array:
        product = x @ weight.weight.T
        return product if weight.bias is None else product + weight.bias

    def prefetch(self, x: mx.array, norm: Norm | None, weight: MlxFeedForward) -> None:
        """Everything is in memory."""

    def feed_forward(
        self,
        x: mx.array,
        weight: MlxFeedForward,
        activation: Activation,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: mx.array | None = None,
    ) -> mx.array:
        x = normed(x, norm)
        product = (activate(x @ weight.gate.T, activation) * (x @ weight.up.T)) @ weight.down
        return product if added is None else added + product
