"""StableLM 2: LayerNorms, a quarter of each head rotated, and parallel blocks if the config says so."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ondevice.converters.architectures.adapting import in_halves, norms_of_each_head, one_norm_for_both
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


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=4096, kv_heads=32)
    normed = reader.boolean("qk_layernorm", False)
    parallel = reader.boolean("use_parallel_residual", False)
    attention = AttentionSpec(
        score_scale(sizes.head_dim),
        head_norm="layer" if normed else "none",
        bias=reader.boolean("use_qkv_bias", False),
    )
    layers = [
        replace(layer, parallel=parallel)
        for layer in uniform_layers(sizes.num_layers, attention, read_activation(reader))
    ]
    config = decoder(
        "stablelm",
        sizes,
        layers,
        [read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=0.25)],
        norm=NormSpec("layer", reader.number("layer_norm_eps", 1e-5), bias=True),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    tensors = norms_of_each_head(one_norm_for_both(tensors, config), config)
    return in_halves(tensors, config)


STABLELM = Family("stablelm", "StableLmForCausalLM", _read)
