"""Names and shapes of weights that only some models have, such as those of per-layer inputs."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.config import QuantConfig, RowFormat
from ondevice.model_config import LayerSpec, ModelConfig

EXPERT_NORMS = ("router.norm", "experts.norm", "experts.output_norm", "dense.output_norm")
"""Norms of a layer with `ExpertsSpec.apart`, in a bundle's order."""


class WeightShape(NamedTuple):
    """A weight that only some models have. name: its name in a bundle, without the layer's prefix.

    shape: (rows, columns) of a matrix, else the shape of float32 values.
    is_matrix: whether it is stored as a matrix.
    is_half: whether this matrix has 16 bits, whatever others have.
    of_heads: whether each head multiplies only its own rows.
    """

    name: str
    shape: tuple[int, ...]
    is_matrix: bool
    is_half: bool = False
    of_heads: bool = False

    def tiled(self, quant: QuantConfig) -> TiledMatrix | None:
        """The stored matrix; None for float32 values."""
        if not self.is_matrix:
            return None
        rows, cols = self.shape
        stored = RowFormat(16) if self.is_half else quant.plain
        return TiledMatrix(rows, RowLayout(cols, *stored))


def model_weight_shapes(config: ModelConfig) -> tuple[WeightShape, ...]:
    """The weights outside layers that only some models have, in a bundle's order.

    `project_in` maps an embedding of another width to a layer's input, `project_out` a layer's output to the
    head's input. `spread` computes each residual stream except the first from the embedding, and `gather`
    projects each at the end.
    """
    hidden, part, shapes = config.hidden_size, config.part, []
    if config.embedding_width and part.embeds:
        shapes.append(WeightShape("project_in", (hidden, config.embedding_width), True))
    if config.embedding_width and part.heads:
        shapes.append(WeightShape("project_out", (config.embedding_width, hidden), True))
    if config.has_inputs_table:
        shapes += [
            WeightShape("per_layer.projection", (config.per_layer_size, hidden), True),
            WeightShape("per_layer.norm.weight", (config.per_layer_width,), False),
        ]
    for name, exists in (("spread", part.embeds), ("gather", part.heads)):
        for copy in range(1, config.residual_copies if exists else 1):
            shapes.append(WeightShape(f"copies.{name}.{copy}", (hidden, hidden), True))
    return tuple(shapes)


def layer_weight_shapes(config: ModelConfig, layer: LayerSpec) -> tuple[WeightShape, ...]:
    """The weights of a layer that only some models have, in a bundle's order. They come after the layer's
    other weights.
    """
    hidden, width, rank = config.hidden_size, config.per_layer_width, layer.laurel_rank
    copies, shapes = config.residual_copies, []
    if rank:
        shapes += [
            WeightShape("laurel.down", (rank, hidden), True),
            WeightShape("laurel.up", (hidden, rank), True),
            WeightShape("laurel.norm.weight", (hidden,), False),
        ]
    if copies > 1:
        shapes += [
            WeightShape("copies.norm.weight", (hidden,), False),
            WeightShape("copies.router", (copies, hidden), False),
            WeightShape("copies.predict", (copies * copies, copies), False),
            WeightShape("copies.correct", (copies, copies), False),
            WeightShape("copies.scale", (hidden,), False),
        ]
    if width:
        shapes += [
            WeightShape("per_layer.gate", (width, hidden), True),
            WeightShape("per_layer.out", (hidden, width), True),
            WeightShape("per_layer.norm.weight", (hidden,), False),
        ]
    if layer.attention.gated:
        shapes.append(WeightShape("attention.gate", (config.out_cols(layer), hidden), True))
    if (delta := layer.delta) is not None:
        # Betas and decays act on the complete state, so they must not depend on rounded weights.
        shapes += [
            WeightShape("delta.gates", (2 * delta.value_heads, hidden), True, is_half=True),
            WeightShape("delta.conv", (delta.taps, delta.channels), False),
            WeightShape("delta.decay_log", (delta.value_heads,), False),
            WeightShape("delta.time_bias", (delta.value_heads,), False),
            WeightShape("delta.norm.weight", (delta.value_width,), False),
        ]
    if layer.conv is not None:
        shapes.append(WeightShape("conv.weight", (layer.conv.taps, layer.conv.channels), False))
    shapes += _mixer_shapes(config, layer)
    if layer.attention.sinks:
        shapes.append(WeightShape("attention.sinks", (config.heads(layer.attention).queries,), False))
    shapes += _latent_shapes(config, layer)
    if layer.experts is not None:
        # A choice of experts must not depend on rounded weights.
        shapes.append(WeightShape("router", (layer.experts.count, hidden), True, is_half=True))
        if layer.experts.router_bias:
            shapes.append(WeightShape("router.bias", (layer.experts.count,), False))
        if layer.experts.choice_bias:
            shapes.append(WeightShape("router.choice_bias", (layer.experts.count,), False))
        if layer.experts.shared_gate:
            shapes.append(WeightShape("shared_gate", (1, hidden), True, is_half=True))
        if layer.experts.apart:
            shapes += [WeightShape(f"{name}.weight", (hidden,), False) for name in EXPERT_NORMS]
            shapes.append(WeightShape("router.scales", (layer.experts.count,), False))
    if layer.scaled:
        shapes.append(WeightShape("scale", (1,), False))
    return tuple(shapes)


def _mixer_shapes(config: ModelConfig, layer: LayerSpec) -> list[WeightShape]:
    """The weights of a layer's Mamba-2 mixer; empty without one.

    If the layer also has attention, the mixer has separate projections: `in` with the rows of x, B, C and z,
    and `out`.
    """
    mixer, hidden = layer.mamba2, config.hidden_size
    if mixer is None:
        return []
    shapes = []
    if layer.attends:
        shapes += [
            WeightShape("mamba2.in", (sum(mixer.projections.values()), hidden), True),
            WeightShape("mamba2.out", (hidden, mixer.value_size), True),
        ]
    # Time steps act on the complete state, like a delta rule's gates.
    shapes += [
        WeightShape("mamba2.steps", (mixer.heads, hidden), True, is_half=True),
        WeightShape("mamba2.conv", (mixer.taps, mixer.channels), False),
        *([WeightShape("mamba2.conv.bias", (mixer.channels,), False)] if mixer.conv_bias else []),
        *(
            WeightShape(f"mamba2.{name}", (mixer.heads,), False)
            for name in ("decay_log", "time_bias", "skip")
        ),
    ]
    if mixer.norm != "none":
        shapes.append(WeightShape("mamba2.norm.weight", (mixer.value_size,), False))
    return shapes


def _latent_shapes(config: ModelConfig, layer: LayerSpec) -> list[WeightShape]:
    """The weights of a layer's latent attention, as in `LatentWeights`; empty without it."""
    latent, heads = layer.attention.latent, config.num_heads
    if latent is None:
        return []
    shapes = []
    if latent.query_rank:
        shapes += [
            WeightShape("attention.query_norm.weight", (latent.query_rank,), False),
            WeightShape("attention.queries", (heads * latent.query_width, latent.query_rank), True),
        ]
    return [
        *shapes,
        WeightShape("attention.latent_norm.weight", (latent.rank,), False),
        WeightShape("attention.latent_keys", (heads * latent.rank, latent.key_dim), True, of_heads=True),
        WeightShape("attention.latent_values", (heads * latent.value_dim, latent.rank), True, of_heads=True),
    ]


def extra_matrices(config: ModelConfig) -> tuple[WeightShape, ...]:
    """All matrices that only some models have, of the model and of its layers."""
    return tuple(weight for weight in _all_shapes(config) if weight.is_matrix)


def vectors_size(config: ModelConfig) -> int:
    """Number of values of all norms, biases, learned positions and other float32 weights."""
    others = sum(prod(weight.shape) for weight in _all_shapes(config) if not weight.is_matrix)
    others += (
        config.final_norm * config.norm_size + config.positions_size + config.head_bias * config.vocab_size
    )
    return others + sum(_norms_and_biases(config, layer) for layer in config.layers)


def _all_shapes(config: ModelConfig) -> list[WeightShape]:
    of_layers = (weight for layer in config.layers for weight in layer_weight_shapes(config, layer))
    return [*model_weight_shapes(config), *of_layers]


def _norms_and_biases(config: ModelConfig, layer: LayerSpec) -> int:
    attention, feed_forward = layer.attention, layer.feed_forward
    norms = (layer.norms_input + layer.norms_output) * (1 + layer.has_feed_forward) * config.norm_size
    biases = attention.bias * config.qkv_rows(layer) + attention.output_bias * config.hidden_size
    biases += feed_forward.bias * config.neurons(layer) + feed_forward.output_bias * config.hidden_size
    head_norms = sum(config.head_norm_sizes(layer)) * (2 if attention.head_norm_bias else 1)
    return norms + biases + head_norms
