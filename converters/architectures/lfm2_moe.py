"""LFM2 with experts: dense first layers, then experts chosen by biased sigmoids."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.adapting import renamed
from ondevice.converters.architectures.common import Description, Family, Tensors
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.experts import (
    ExpertNames,
    join_experts,
    read_count,
    read_training_keys,
    with_experts,
)
from ondevice.converters.architectures.lfm2 import adapted, read_lfm2
from ondevice.model_config import ExpertsSpec, ModelConfig

NAMES = ExpertNames(
    gate="feed_forward.experts.{}.w1.weight",
    up="feed_forward.experts.{}.w3.weight",
    down="feed_forward.experts.{}.w2.weight",
    router="feed_forward.gate.weight",
    choice_bias="feed_forward.expert_bias",
    stack="feed_forward.switch_mlp.",
)
DENSE_BY_MLX = {f"feed_forward.{it}_proj.weight": f"mlp.{it}_proj.weight" for it in ("gate", "up", "down")}
"""Names of dense feed-forwards in MLX's folders, and their new ones."""


def _read(reader: ConfigReader) -> Description:
    neurons = reader.integer("intermediate_size", 7168)
    config = read_lfm2(reader.with_value("intermediate_size", neurons), "lfm2_moe")
    experts = ExpertsSpec(
        read_count(reader, 32, "num_experts"),
        reader.integer("num_experts_per_tok", 4),
        reader.integer("moe_intermediate_size", 1792),
        "sigmoid",
        renormalised=reader.boolean("norm_topk_prob", True),
        factor=reader.number("routed_scaling_factor", 1.0),
        choice_bias=reader.boolean("use_expert_bias", True),
    )
    read_training_keys(reader)
    dense = reader.integer("num_dense_layers", 2)
    config = with_experts(config, experts, [layer >= dense for layer in range(config.num_layers)])
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    return join_experts(adapted(renamed(tensors, DENSE_BY_MLX), config), config, NAMES)


LFM2_MOE = Family("lfm2_moe", "Lfm2MoeForCausalLM", _read)
