"""Falcon 7B and 40B: parallel blocks, ungated feed-forwards and fused projections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ondevice.converters.architectures.adapting import (
    one_norm_for_both,
    renamed,
    split_grouped,
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
from ondevice.errors import UnsupportedModelError
from ondevice.model_config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormSpec

PREFIXES = {
    "transformer.h.": "model.layers.",
    "transformer.word_embeddings.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
}
NAMES = weights_and_biases(
    {
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
        "ln_attn": "input_layernorm",
        "ln_mlp": "post_attention_layernorm",
    }
)


def _read(reader: ConfigReader) -> Description:
    check_code(reader, "falcon")
    neurons = ("ffn_hidden_size", 4 * reader.integer("hidden_size"))
    sizes = read_sizes(reader, max_context=2048, neurons=neurons)
    if reader.boolean("alibi", False):
        raise UnsupportedModelError(
            "config.json: alibi is true: scores biased by distance aren't implemented; rotary Falcons convert"
        )
    newer = reader.boolean("new_decoder_architecture", False)
    one_kv_head, kv_heads = (
        reader.boolean("multi_query", True),
        reader.integer("num_kv_heads", sizes.num_heads),
    )
    if not newer:
        kv_heads = 1 if one_kv_head else sizes.num_heads
    parallel = reader.boolean("parallel_attn", True)
    norms = reader.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    if (newer and not parallel) or norms not in ((1, 2) if newer else (1,)):
        raise UnsupportedModelError(
            f"config.json: parallel_attn {parallel} and num_ln_in_parallel_attn {norms} don't go with "
            f"new_decoder_architecture {newer}"
        )
    bias = reader.boolean("bias", False)
    sizes = replace(sizes, num_kv_heads=kv_heads)
    layer = LayerSpec(
        AttentionSpec(score_scale(sizes.head_dim), bias=bias, output_bias=bias),
        FeedForwardSpec(
            read_activation(reader, "activation", "gelu"), gated=False, bias=bias, output_bias=bias
        ),
        parallel=parallel,
    )
    config = decoder(
        "falcon",
        sizes,
        [layer] * sizes.num_layers,
        [read_rope(reader, sizes.head_dim, sizes.max_context)],
        norm=NormSpec("layer", reader.number("layer_norm_epsilon", 1e-5), bias=True),
        tie_embeddings=reader.boolean("tie_word_embeddings", True),
    )
    return Description(config, partial(_adapt, config, norms == 1))


def _adapt(config: ModelConfig, shares_norm: bool, tensors: Tensors) -> Tensors:
    tensors = renamed(under_model(tensors, PREFIXES), NAMES)
    adapted = split_grouped(tensors, config, "self_attention.query_key_value")
    return one_norm_for_both(adapted, config) if shares_norm else adapted


FALCON = Family("falcon", "FalconForCausalLM", _read)
