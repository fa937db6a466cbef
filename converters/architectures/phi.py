"""Phi-1, Phi-1.5 and Phi-2: parallel blocks under one LayerNorm, and biases everywhere, also on the head."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.adapting import (
    in_halves,
    norms_of_each_head,
    one_norm_for_both,
    renamed,
    under_model,
    weights_and_biases,
)
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    check_code,
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
        "mlp.fc1": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
    }
)


def _read(reader: ConfigReader) -> Description:
    check_code(reader, "phi")
    sizes = read_sizes(reader, max_context=2048)
    reader.number("embd_pdrop", 0.0)
    normed = reader.boolean("qk_layernorm", False)
    layer = LayerSpec(
        AttentionSpec(
            score_scale(sizes.head_dim),
            head_norm="layer" if normed else "none",
            bias=True,
            output_bias=True,
        ),
        FeedForwardSpec(
            read_activation(reader, default="gelu_new"), gated=False, bias=True, output_bias=True
        ),
        parallel=True,
    )
    config = decoder(
        "phi",
        sizes,
        [layer] * sizes.num_layers,
        [read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=0.5)],
        norm=NormSpec("layer", reader.number("layer_norm_eps", 1e-5), bias=True),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
        head_bias=True,
    )
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    tensors = under_model(renamed(tensors, NAMES), {"model.final_layernorm.": "model.norm."})
    tensors = norms_of_each_head(one_norm_for_both(tensors, config), config)
    return in_halves(tensors, config)


PHI = Family("phi", "PhiForCausalLM", _read)
