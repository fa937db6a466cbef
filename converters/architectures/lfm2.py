"""LFM2, dense: gated short convolutions in most layers, attention with q/k norms in the others.

Published configs name some sizes twice (`block_dim`, `conv_dim`, `num_heads`). Models read one of the two, so
these must agree. In folders that MLX has written, the channels of convolutions come after their taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ondevice.converters.architectures.adapting import check_shape, renamed, taps_first, written_by_mlx
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Sizes,
    Tensors,
    decoder,
    read_layer_types,
    read_sizes,
    score_scale,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, SAME_REPOSITORY, ConfigReader
from ondevice.converters.architectures.rotary import read_rope
from ondevice.converters.architectures.tensors import FINAL_NORM, LayerNames
from ondevice.converters.checkpoints.views import RowsOf
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    NO_ATTENTION,
    SIZE_LIMITS,
    AttentionSpec,
    ConvSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
)

KINDS = ("conv", "full_attention")
NAMES = {
    "operator_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "self_attn.out_proj.weight": "self_attn.o_proj.weight",
    "self_attn.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attn.k_layernorm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
THETA = 1_000_000.0
FIRST_SCALES = ("block_mlp_init_scale", "block_out_init_scale")
FIRST_FLAGS = ("block_use_xavier_init", "conv_use_xavier_init")
"""Keys of weights at the start of training."""


def _read(reader: ConfigReader) -> Description:
    config = read_lfm2(_with_neurons(reader), "lfm2")
    return Description(config, partial(adapted, config=config))


def read_lfm2(reader: ConfigReader, name: str) -> ModelConfig:
    """The model without experts. reader: its `intermediate_size` must be the number of neurons of a dense
    layer.
    """
    sizes = read_sizes(reader, max_context=128_000, kv_heads=8)
    _check_doubles(reader, sizes)
    turning = read_rope(reader, sizes.head_dim, sizes.max_context, theta=THETA)
    eps = reader.number("norm_eps", 1e-5)
    reader.only("block_norm_eps", eps)
    attention = AttentionSpec(score_scale(sizes.head_dim), head_norm="head")
    feed_forward = FeedForwardSpec("silu")
    conv = ConvSpec(sizes.hidden_size, reader.integer("conv_L_cache", 3))
    layers = [
        LayerSpec(NO_ATTENTION, feed_forward, conv=conv)
        if kind == "conv"
        else LayerSpec(attention, feed_forward)
        for kind in _read_kinds(reader, sizes.num_layers)
    ]
    tied = reader.boolean("tie_word_embeddings", True)
    return decoder(
        name,
        sizes,
        layers,
        [turning],
        norm=NormSpec("rms", eps),
        tie_embeddings=reader.boolean("tie_embedding", tied),
    )


def _with_neurons(reader: ConfigReader) -> ConfigReader:
    """A reader whose `intermediate_size` is the number of neurons, computed if the config only implies it."""
    neurons = reader.integer("block_ff_dim", reader.integer("intermediate_size", 12288))
    if not 1 <= neurons <= 2 * SIZE_LIMITS["intermediate_size"]:
        raise CheckpointError(
            f"config.json: block_ff_dim or intermediate_size is {neurons}; it must be from 1 to "
            f"{2 * SIZE_LIMITS['intermediate_size']}"
        )
    multiple = reader.integer("block_multiple_of", 256)
    factor = reader.number("block_ffn_dim_multiplier", 1.0)
    if not reader.boolean("block_auto_adjust_ff_dim", True):
        return reader.with_value("intermediate_size", neurons)
    neurons = int(2 * neurons / 3)
    if not reader.is_null("block_ffn_dim_multiplier"):
        if multiple < 1 or not 0 < factor <= SIZE_LIMITS["intermediate_size"]:
            raise CheckpointError(
                f"config.json: block_multiple_of is {multiple} and block_ffn_dim_multiplier {factor:g}; both "
                f"must be above 0, and the latter at most {SIZE_LIMITS['intermediate_size']}; {CONFIG_REMEDY}"
            )
        neurons = -(-int(factor * neurons) // multiple) * multiple
    return reader.with_value("intermediate_size", neurons)


def _check_doubles(reader: ConfigReader, sizes: Sizes) -> None:
    """Check for unknown variants, and sizes whose second name has another value. Raises an error
    for these.
    """
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        reader.only(key, sizes.hidden_size)
    reader.only("num_heads", sizes.num_heads)
    reader.only("conv_bias", False)
    reader.only("block_use_swiglu", True)
    reader.only("use_pos_enc", True)
    named = (reader.section("rope_parameters") or {}).get("rope_theta")
    reader.only("theta", reader.number("rope_theta", THETA) if named is None else named)
    for key in FIRST_SCALES:
        reader.number(key, 1.0)
    for key in FIRST_FLAGS:
        reader.boolean(key, True)


def _read_kinds(reader: ConfigReader, num_layers: int) -> Sequence[str]:
    attended = reader.numbers("full_attn_idxs")
    kinds: Sequence[str] | None = read_layer_types(reader, num_layers, KINDS)
    if kinds is None:
        attended = [*range(num_layers)] if attended is None else attended
        kinds = [KINDS[layer in attended] for layer in range(num_layers)]
    if KINDS[1] not in kinds:
        raise UnsupportedModelError(
            "config.json: neither layer_types nor full_attn_idxs name a layer with attention; one needs it"
        )
    return kinds


def adapted(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors under the names of `tensors.py`. Experts' tensors and unknown ones keep their names.

    Raises CheckpointError for a convolution of another shape, or one in a layer that also has attention.
    """
    named = dict(renamed(tensors, NAMES))
    by_mlx = written_by_mlx(tensors, ".conv.conv.weight")
    if (norm := named.pop("model.embedding_norm.weight", None)) is not None:
        named[FINAL_NORM] = norm
    for layer, spec in enumerate(config.layers):
        if (conv := spec.conv) is None:
            continue
        name, prefix = LayerNames(layer), f"model.layers.{layer}.conv."
        if attended := [which for which in "qkvo" if name.projection(which) in named]:
            raise CheckpointError(
                f"layer {layer} has a short convolution, and {attended[0]}_proj of attention; "
                f"{SAME_REPOSITORY}"
            )
        weights = name.weight("conv.weight")
        if (stored := named.pop(f"{prefix}conv.weight", None)) is not None:
            named[weights] = taps_first(weights, stored, conv.channels, conv.taps, by_mlx)
        if (out := named.pop(f"{prefix}out_proj.weight", None)) is not None:
            named[name.projection("o")] = out
        if (fused := named.pop(f"{prefix}in_proj.weight", None)) is not None:
            check_shape(fused, (3 * conv.channels, config.hidden_size))
            for which, rows in zip("qkv", np.split(np.arange(3 * conv.channels), 3), strict=True):
                named[name.projection(which)] = RowsOf(name.projection(which), fused, rows)
    return named


LFM2 = Family("lfm2", "Lfm2ForCausalLM", _read)
