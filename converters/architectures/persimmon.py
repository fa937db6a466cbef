"""Persimmon: fused projections, a LayerNorm of each head's queries and keys, relu² without gates."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.adapting import (
    in_halves,
    norms_of_each_head,
    renamed,
    split_grouped,
    under_model,
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

NAMES = weights_and_biases(
    {
        "self_attn.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    }
)


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=16384)
    normed = reader.boolean("qk_layernorm", True)
    layer = LayerSpec(
        AttentionSpec(
            score_scale(sizes.head_dim),
            head_norm="layer" if normed else "none",
            bias=True,
            output_bias=True,
        ),
        FeedForwardSpec(read_activation(reader, default="relu2"), gated=False, bias=True, output_bias=True),
    )
    config = decoder(
        "persimmon",
        sizes,
        [layer] * sizes.num_layers,
        [read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=0.5)],
        norm=NormSpec("layer", reader.number("layer_norm_eps", 1e-5), bias=True),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    tensors = under_model(renamed(tensors, NAMES), {"model.final_layernorm.": "model.norm."})
    tensors = split_grouped(tensors, config, "self_attn.query_key_value")
    return in_halves(norms_of_each_head(tensors, config), config)


PERSIMMON = Family("persimmon", "PersimmonForCausalLM", _read)
