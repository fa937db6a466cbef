"""Nemotron (dense): LayerNorms stored minus one, relu² without gates, and half of each head rotated."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.adapting import (
    in_halves,
    norms_shifted,
    renamed,
    weights_and_biases,
)
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    decoder,
    read_activation,
    read_sizes,
    score_scale,
)
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.rotary import read_rope
from ondevice.model_config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormSpec

NAMES = weights_and_biases({"mlp.up_proj": "mlp.gate_proj"})


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=4096)
    # Another name of head_dim, in some files beside it.
    reader.only("kv_channels", sizes.head_dim)
    bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
    activation = read_activation(reader, default="relu2")
    layer = LayerSpec(
        AttentionSpec(score_scale(sizes.head_dim), bias=bias, output_bias=bias),
        FeedForwardSpec(activation, gated=False, bias=mlp_bias, output_bias=mlp_bias),
    )
    config = decoder(
        "nemotron",
        sizes,
        [layer] * sizes.num_layers,
        [read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=0.5)],
        norm=NormSpec("layer", reader.number("norm_eps", 1e-5), bias=True),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    tensors = renamed(norms_shifted(tensors), NAMES)
    return in_halves(tensors, config)


NEMOTRON = Family("nemotron", "NemotronForCausalLM", _read)
