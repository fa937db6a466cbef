"""The MLX ops over float32 weights, dequantised when loaded and differentiable, for training streams.

On MLX's CPU device, logits are within 1e-4 of `reference`'s, relative to the largest; on GPUs that round
products to TF32 they differ more. Different splits of a prompt need not give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ondevice.backends.base import (
    NO_BIASES,
    Biases,
    EmbeddingSource,
    FeedForwardSource,
    Float32,
    LinearSource,
    Norm,
    Selector,
)
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.mlx_ops import FloatLinear, MlxOps, activate, cut_off, normed
from ondevice.backends.reference import ReferenceBackend
from ondevice.backends.tiled_source import TiledSource
from ondevice.errors import BackendUnavailableError
from ondevice.model_config import FeedForwardSpec
from ondevice.records import dataclass


@dataclass(frozen=True)
class FloatFeedForward:
    """gate, up, down: (F, D); row f of `down` is neuron f's column of the down projection.

    up: None in an ungated feed-forward.
    """

    gate: mx.array
    up: mx.array | None
    down: mx.array
    biases: Biases = NO_BIASES

    def first(self, count: int) -> FloatFeedForward:
        """The first `count` neurons."""
        gate, up, down, gates = (
            None if array is None else array[:count]
            for array in (self.gate, self.up, self.down, self.biases.gates)
        )
        return FloatFeedForward(gate, up, down, self.biases._replace(gates=gates))

    def gates(self, x: mx.array) -> mx.array:
        """(T, F) for the normed input x (T, D)."""
        gates = x @ self.gate.T
        return gates if self.biases.gates is None else gates + self.biases.gates

    def output(self, x: mx.array, activated: mx.array, spec: FeedForwardSpec) -> mx.array:
        """(T, D) for the normed input x (T, D) and activated gates (T, F)."""
        if self.up is not None:
            ups = x @ self.up.T
            activated = activated * (
                ups if spec.up_activation == "none" else activate(ups, spec.up_activation)
            )
        product = activated @ self.down
        return product if self.biases.output is None else product + self.biases.output


class MlxFloatBackend(MlxOps):
    """`Backend` in MLX, on its default device, with all weights in float32."""

    name = "mlx"

    def __init__(self) -> None:
        self._loader = ReferenceBackend()

    def load_linear(self, source: LinearSource) -> FloatLinear:
        loaded = self._loader.load_linear(source)
        return FloatLinear(mx.array(loaded.weight), None if loaded.bias is None else mx.array(loaded.bias))

    def load_tiles(self, sections: Sequence[TiledSource], bias: Float32 | None = None) -> FloatLinear:
        loaded = self._loader.load_tiles(sections)
        return FloatLinear(mx.array(loaded.weight), None if bias is None else mx.array(bias))

    def load_feed_forward(
        self,
        layer: int,
        source: FeedForwardSource,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: FloatLinear | None = None,
        dense: int | None = None,
    ) -> FloatFeedForward:
        # Every neuron is multiplied, whatever the selector.
        loaded = self._loader.load_feed_forward(layer, source)
        up = None if loaded.up is None else mx.array(loaded.up)
        return FloatFeedForward(mx.array(loaded.gate), up, mx.array(loaded.down), biases)

    def load_embedding(
        self, source: EmbeddingSource, offloaded: bool = False, head: FloatLinear | None = None
    ) -> EmbeddingSource:
        return source

    def product(self, x: mx.array, weight: FloatLinear) -> mx.array:
        product = x @ weight.weight.T
        return product if weight.bias is None else product + weight.bias

    def heads_product(self, x: mx.array, weight: FloatLinear) -> mx.array:
        heads, _, cols = x.shape
        return x @ weight.weight.reshape(heads, -1, cols).swapaxes(1, 2)

    def prefetch(self, x: mx.array, norm: Norm | None, weight: FloatFeedForward) -> None:
        """Nothing to do: everything is in memory."""

    def mixture(self, *arguments: Any, **options: Any) -> mx.array:
        raise BackendUnavailableError("streams of a model with experts can't be trained")

    def feed_forward(
        self,
        x: mx.array,
        weight: FloatFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: mx.array | None = None,
    ) -> mx.array:
        x = normed(x, norm)
        gates = activate(cut_off(weight.gates(x), spec.cutoff), spec.activation, spec.threshold)
        product = weight.output(x, gates, spec)
        return product if added is None else added + product
