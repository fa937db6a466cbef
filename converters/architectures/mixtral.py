"""Mixtral: Mistral's blocks, with experts in every layer."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.common import Description, Family, check_window, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.experts import (
    MIXTRAL_NAMES,
    join_experts,
    read_count,
    read_training_keys,
    with_experts,
)
from ondevice.model_config import ExpertsSpec


def _read(reader: ConfigReader) -> Description:
    window = 0
    if reader.has("sliding_window") and not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window")
        check_window(window)
    config = read_llama(
        reader, "mixtral", max_context=131072, kv_heads=8, attention={"window": window}, eps=1e-5
    )
    # The weights are a softmax of the chosen experts' logits; that is one of all, renormalised.
    experts = ExpertsSpec(
        read_count(reader, 8, "num_local_experts", "num_experts"),
        reader.integer("num_experts_per_tok", 2),
        config.intermediate_size,
        renormalised=True,
    )
    read_training_keys(reader)
    reader.number("router_jitter_noise", 0.0)
    config = with_experts(config, experts, [True] * config.num_layers)
    return Description(config, partial(join_experts, config=config, names=MIXTRAL_NAMES))


MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read)
