"""GLM-4 (0414): norms on both sides of each block, and interleaved pairs in half of each head."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.adapting import in_halves, renamed, split_gates
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    decoder,
    read_activation,
    read_sizes,
    score_scale,
    uniform_layers,
)
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.rotary import read_rope
from ondevice.model_config import AttentionSpec, ModelConfig, NormSpec

OUTPUT_NORMS = {
    "post_self_attn_layernorm.weight": "attention_output_layernorm.weight",
    "post_mlp_layernorm.weight": "feed_forward_output_layernorm.weight",
}


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=131072, kv_heads=2, head_dim=128)
    attention = AttentionSpec(score_scale(sizes.head_dim), bias=reader.boolean("attention_bias", True))
    config = decoder(
        "glm4",
        sizes,
        uniform_layers(sizes.num_layers, attention, read_activation(reader), norms="both"),
        [read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=0.5)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1.5625e-7)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    tensors = split_gates(renamed(tensors, OUTPUT_NORMS), config)
    return in_halves(tensors, config, interleaved=True)


GLM4 = Family("glm4", "Glm4ForCausalLM", _read)
