"""OLMoE: experts in every layer, and norms over all heads of queries and of keys together."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.common import Description, Family, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.experts import (
    join_experts,
    read_count,
    read_training_keys,
    with_experts,
)
from ondevice.model_config import ExpertsSpec


def _read(reader: ConfigReader) -> Description:
    bias = reader.boolean("attention_bias", False)
    config = read_llama(
        reader,
        "olmoe",
        max_context=4096,
        attention={"bias": bias, "output_bias": bias, "head_norm": "projection"},
        eps=1e-5,
    )
    experts = ExpertsSpec(
        read_count(reader, 64, "num_experts", "num_local_experts"),
        reader.integer("num_experts_per_tok", 8),
        config.intermediate_size,
        renormalised=reader.boolean("norm_topk_prob", False),
    )
    read_training_keys(reader)
    config = with_experts(config, experts, [True] * config.num_layers)
    return Description(config, partial(join_experts, config=config))


OLMOE = Family("olmoe", "OlmoeForCausalLM", _read)
