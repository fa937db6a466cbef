"""Phi-3 and Phi-4: fused projections, longrope, and heads of which only a part is rotated."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.adapting import in_halves, split_attention, split_gates
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    check_code,
    check_window,
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
    sizes = read_sizes(reader, max_context=4096)
    rope = read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=1.0)
    reader.number("embd_pdrop", 0.0)
    check_code(reader, "phi3")
    for key in ("interpolate_factor", "full_attn_mod"):
        reader.only(key, 1)
    window = 0
    if reader.has("sliding_window") and not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window")
        check_window(window)
    attention = AttentionSpec(score_scale(sizes.head_dim), window=window)
    config = decoder(
        "phi3",
        sizes,
        uniform_layers(sizes.num_layers, attention, read_activation(reader)),
        [rope],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-5)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    return in_halves(split_gates(split_attention(tensors, config), config), config)


PHI3 = Family("phi3", "Phi3ForCausalLM", _read)
