"""Per-layer inputs: values for each layer, from a token's row of a second table, which is on flash.

Legend: T tokens, D model width, L layers, W values for a layer.
"""

from __future__ import annotations

from ondevice.backends.base import Array, Backend, Int32
from ondevice.model.weights import PerLayerBlock, PerLayerInputs
from ondevice.model_config import Activation, ModelConfig


def per_layer_inputs(
    backend: Backend, weights: PerLayerInputs, tokens: Int32, x: Array, config: ModelConfig
) -> Array:
    """The inputs of all layers, (T, L * W), for tokens (T,): their scaled rows of the table, plus
    norm(projection @ x), x (T, D).
    """
    rows, width = backend.embedding(weights.table, tokens), config.per_layer_width
    if config.per_layer_multiplier != 1.0:
        rows *= config.per_layer_multiplier
    shape = tuple(rows.shape)
    projected = backend.linear(x, weights.projection).reshape(-1, width)
    return backend.add_normed(rows.reshape(-1, width), projected, weights.norm).reshape(shape)


def per_layer_output(
    backend: Backend, weights: PerLayerBlock, x: Array, inputs: Array, activation: Activation
) -> Array:
    """norm(out @ (activation(gate @ x) * inputs)), (T, D), for x (T, D) and the layer's inputs (T, W)."""
    gates = backend.linear(x, weights.gate)
    y = backend.linear(backend.gated(gates, inputs, activation), weights.out)
    return backend.normed(y, weights.norm)
