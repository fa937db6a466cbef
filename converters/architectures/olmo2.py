"""OLMo 2: norms only on the outputs of blocks, and over all heads of queries and of keys together."""

from __future__ import annotations

from ondevice.converters.architectures.adapting import renamed
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
from ondevice.model_config import AttentionSpec, NormSpec

OUTPUT_NORMS = {
    "post_attention_layernorm.weight": "attention_output_layernorm.weight",
    "post_feedforward_layernorm.weight": "feed_forward_output_layernorm.weight",
}


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=2048)
    bias = reader.boolean("attention_bias", False)
    attention = AttentionSpec(
        score_scale(sizes.head_dim), head_norm="projection", bias=bias, output_bias=bias
    )
    config = decoder(
        "olmo2",
        sizes,
        uniform_layers(sizes.num_layers, attention, read_activation(reader), norms="after"),
        [read_rope(reader, sizes.head_dim, sizes.max_context)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-5)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    return Description(config, _adapt)


def _adapt(tensors: Tensors) -> Tensors:
    return renamed(tensors, OUTPUT_NORMS)


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read)
