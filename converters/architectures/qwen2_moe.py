"""Qwen2-MoE: biases on queries, keys and values, and a shared expert with a gate in addition to
the others.
"""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.common import Description, Family, read_llama, read_windows
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.experts import (
    ExpertNames,
    join_experts,
    read_count,
    read_shared_neurons,
    read_training_keys,
    with_experts,
)
from ondevice.converters.architectures.qwen3_moe import read_sparse_layers
from ondevice.model_config import ExpertsSpec

NAMES = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate.weight")


def _read(reader: ConfigReader) -> Description:
    if not reader.boolean("use_sliding_window", False):
        # A window that isn't used may be 0.
        reader = reader.with_value("sliding_window", None)
    config = read_llama(
        reader,
        "qwen2_moe",
        max_context=32768,
        kv_heads=16,
        attention={"bias": reader.boolean("qkv_bias", True)},
        windows=lambda num_layers: read_windows(reader, num_layers),
    )
    shared = read_shared_neurons(reader, 5632)
    experts = ExpertsSpec(
        read_count(reader, 60, "num_experts", "num_local_experts"),
        reader.integer("num_experts_per_tok", 4),
        reader.integer("moe_intermediate_size", 1408),
        renormalised=reader.boolean("norm_topk_prob", False),
        shared_gate=True,
    )
    read_training_keys(reader)
    config = with_experts(config, experts, read_sparse_layers(reader, config.num_layers), shared)
    return Description(config, partial(join_experts, config=config, names=NAMES))


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _read)
