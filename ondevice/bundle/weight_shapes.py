"""Names and shapes of weights that only some models have, such as those of per-layer inputs, and the sizes of
all weights that aren't projections of every model.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.config import QuantConfig, RowFormat
from ondevice.model_config import LayerSpec, ModelConfig

EXPERT_NORMS = ("router.norm", "experts.norm", "experts.output_norm", "dense.output_norm")
"""Norms of a layer whose experts stand apart, in a bundle's order."""


class WeightShape(NamedTuple):
    """A weight that only some models have: its name in a bundle, behind the prefix of a layer's.

    shape: (rows, columns) of a matrix, else the shape of float32 values.
    is_matrix: whether it is stored as matrices are.
    is_half: whether this matrix has 16 bits, whatever others have.
    of_heads: whether each head multiplies its own rows alone.
    """

    name: str
    shape: tuple[int, ...]
    is_matrix: bool
    is_half: bool = False
    of_heads: bool = False

    def tiled(self, quant: QuantConfig) -> TiledMatrix | None:
        """This matrix as it is stored; None for float32 values."""
        if not self.is_matrix:
            return None
        rows, cols = self.shape
        stored = RowFormat(16) if self.is_half else quant.plain
        return TiledMatrix(rows, RowLayout(cols, *stored))


def model_weight_shapes(config: ModelConfig) -> tuple[WeightShape, ...]:
    """The weights of `WeightShape` that stand outside layers, in a bundle's order.

    `project_in` makes a layer's input of an embedding of another width, `project_out` the head's of a layer's
    output.

    The copies' matrices are one for each copy but the first: `spread` makes it of the embedding, `gather`
    is multiplied by it in the end.
    """
    hidden, part, found = config.hidden_size, config.part, []
    if config.embedding_width and part.embeds:
        found.append(WeightShape("project_in", (hidden, config.embedding_width), True))
    if config.embedding_width and part.heads:
        found.append(WeightShape("project_out", (config.embedding_width, hidden), True))
    if config.has_inputs_table:
        found += [
            WeightShape("per_layer.projection", (config.per_layer_size, hidden), True),
            WeightShape("per_layer.norm.weight", (config.per_layer_width,), False),
        ]
    for name, exists in (("spread", part.embeds), ("gather", part.heads)):
        for copy in range(1, config.residual_copies if exists else 1):
            found.append(WeightShape(f"copies.{name}.{copy}", (hidden, hidden), True))
    return tuple(found)


def layer_weight_shapes(config: ModelConfig, layer: LayerSpec) -> tuple[WeightShape, ...]:
    """A layer's weights of `WeightShape`, in a bundle's order: behind all others of the layer."""
    hidden, width, rank = config.hidden_size, config.per_layer_width, layer.laurel_rank
    copies, found = config.residual_copies, []
    if rank:
        found += [
            WeightShape("laurel.down", (rank, hidden), True),
            WeightShape("laurel.up", (hidden, rank), True),
            WeightShape("laurel.norm.weight", (hidden,), False),
        ]
    if copies > 1:
        found += [
            WeightShape("copies.norm.weight", (hidden,), False),
            WeightShape("copies.router", (copies, hidden), False),
            WeightShape("copies.predict", (copies * copies, copies), False),
            WeightShape("copies.correct", (copies, copies), False),
            WeightShape("copies.scale", (hidden,), False),
        ]
    if width:
        found += [
            WeightShape("per_layer.gate", (width, hidden), True),
            WeightShape("per_layer.out", (hidden, width), True),
            WeightShape("per_layer.norm.weight", (hidden,), False),
        ]
    if layer.attention.gated:
        found.append(WeightShape("attention.gate", (config.out_cols(layer), hidden), True))
    if (delta := layer.delta) is not None:
        # Betas and decays act on all that a state holds, so they aren't to depend on how weights are rounded.
        found += [
            WeightShape("delta.gates", (2 * delta.value_heads, hidden), True, is_half=True),
            WeightShape("delta.conv", (delta.taps, delta.channels), False),
            WeightShape("delta.decay_log", (delta.value_heads,), False),
            WeightShape("delta.time_bias", (delta.value_heads,), False),
            WeightShape("delta.norm.weight", (delta.value_width,), False),
        ]
    if layer.conv is not None:
        found.append(WeightShape("conv.weight", (layer.conv.taps, layer.conv.channels), False))
    found += _mixer_shapes(config, layer)
    if layer.attention.sinks:
        found.append(WeightShape("attention.sinks", (config.heads(layer.attention).queries,), False))
    found += _latent_shapes(config, layer)
    if layer.experts is not None:
        # A choice of experts isn't to depend on how weights are rounded.
        found.append(WeightShape("router", (layer.experts.count, hidden), True, is_half=True))
        if layer.experts.router_bias:
            found.append(WeightShape("router.bias", (layer.experts.count,), False))
        if layer.experts.choice_bias:
            found.append(WeightShape("router.choice_bias", (layer.experts.count,), False))
        if layer.experts.shared_gate:
            found.append(WeightShape("shared_gate", (1, hidden), True, is_half=True))
        if layer.experts.apart:
            found += [WeightShape(f"{name}.weight", (hidden,), False) for name in EXPERT_NORMS]
            found.append(WeightShape("router.scales", (layer.experts.count,), False))
    if layer.scaled:
        found.append(WeightShape("scale", (1,), False))
    return tuple(found)


def _mixer_shapes(config: ModelConfig, layer: LayerSpec) -> list[WeightShape]:
    """The weights of a Mamba-2 mixer; none without one.

    Where the layer attends too, the mixer has matrices of its own: `in` with the rows of x, B, C and z, and
    `out`, which makes its output.
    """
    mixer, hidden = layer.mamba2, config.hidden_size
    if mixer is None:
        return []
    found = []
    if layer.attends:
        found += [
            WeightShape("mamba2.in", (sum(mixer.projections.values()), hidden), True),
            WeightShape("mamba2.out", (hidden, mixer.value_size), True),
        ]
    # Time steps act on all that a state holds, as a delta rule's gates do.
    found += [
        WeightShape("mamba2.steps", (mixer.heads, hidden), True, is_half=True),
        WeightShape("mamba2.conv", (mixer.taps, mixer.channels), False),
        *([WeightShape("mamba2.conv.bias", (mixer.channels,), False)] if mixer.conv_bias else []),
        *(
            WeightShape(f"mamba2.{name}", (mixer.heads,), False)
            for name in ("decay_log", "time_bias", "skip")
        ),
    ]
    if mixer.norm != "none":
        found.append(WeightShape("mamba2.norm.weight", (mixer.value_size,), False))
    return found


def _latent_shapes(config: ModelConfig, layer: LayerSpec) -> list[WeightShape]:
    """The weights of latent attention, as `LatentWeights` has them; none without it."""
    latent, heads = layer.attention.latent, config.num_heads
    if latent is None:
        return []
    found = []
    if latent.query_rank:
        found += [
            WeightShape("attention.query_norm.weight", (latent.query_rank,), False),
            WeightShape("attention.queries", (heads * latent.query_width, latent.query_rank), True),
        ]
    return [
        *found,
        WeightShape("attention.latent_norm.weight", (latent.rank,), False),
        WeightShape("attention.latent_keys", (heads * latent.rank, latent.key_dim), True, of_heads=True),
        WeightShape("attention.latent_values", (heads * latent.value_dim, latent.rank), True, of_heads=True),
    ]


def extra_matrices(config: ModelConfig) -> tuple[WeightShape, ...]:
    """All matrices among the weights of `WeightShape`, of the model and of its layers."""
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
