"""Phi-3.5-MoE: LayerNorms, biases in attention and on the head, and two experts chosen by sparsemixer."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.common import (
    Description,
    Family,
    check_code,
    check_window,
    decoder,
    read_activation,
    read_sizes,
    score_scale,
    uniform_layers,
)
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.experts import (
    MIXTRAL_NAMES,
    join_experts,
    read_count,
    read_training_keys,
    with_experts,
)
from ondevice.converters.architectures.rotary import read_rope
from ondevice.errors import UnsupportedModelError
from ondevice.model_config import AttentionSpec, ExpertsSpec, NormSpec


def _read(reader: ConfigReader) -> Description:
    reader = _with_one_magnitude(reader)
    sizes = read_sizes(reader, max_context=131072, kv_heads=8)
    check_code(reader, "phimoe")
    window = 0
    if reader.has("sliding_window") and not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window")
        check_window(window)
    bias = reader.boolean("attention_bias", False)
    attention = AttentionSpec(score_scale(sizes.head_dim), window=window, bias=bias, output_bias=bias)
    config = decoder(
        "phimoe",
        sizes,
        uniform_layers(sizes.num_layers, attention, read_activation(reader)),
        [read_rope(reader, sizes.head_dim, sizes.max_context, theta=1e6)],
        norm=NormSpec("layer", reader.number("rms_norm_eps", 1e-5), bias=True),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
        head_bias=reader.boolean("lm_head_bias", False),
    )
    experts = ExpertsSpec(
        read_count(reader, 16, "num_local_experts", "num_experts"),
        reader.integer("num_experts_per_tok", 2),
        sizes.intermediate_size,
        "sparsemixer",
        jitter=reader.number("router_jitter_noise", 0.01),
    )
    read_training_keys(reader)
    reader.number("input_jitter_noise", 0.0)
    config = with_experts(config, experts, [True] * config.num_layers)
    return Description(config, partial(join_experts, config=config, names=MIXTRAL_NAMES))


def _with_one_magnitude(reader: ConfigReader) -> ConfigReader:
    """The config with a single longrope magnitude for short and long contexts.

    Raises UnsupportedModelError if the two differ.
    """
    for key in ("rope_scaling", "rope_parameters"):
        section = reader.section(key) or {}
        magnitudes = {
            section[name] for name in ("short_mscale", "long_mscale") if section.get(name) is not None
        }
        if len(magnitudes) > 1:
            raise UnsupportedModelError(
                f"config.json: {key} has a short_mscale and a long_mscale that differ; only equal ones can "
                "be converted"
            )
        if magnitudes:
            rest = {name: it for name, it in section.items() if not name.endswith("_mscale")}
            reader = reader.with_value(key, rest | {"attention_factor": magnitudes.pop()})
    return reader


PHIMOE = Family("phimoe", "PhimoeForCausalLM", _read, ("PhiMoEForCausalLM",))
