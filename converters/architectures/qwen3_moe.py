"""Qwen3-MoE: Qwen3's attention; experts in most layers, dense feed-forwards in the others."""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.common import Description, Family, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader, shown
from ondevice.converters.architectures.experts import (
    join_experts,
    read_count,
    read_training_keys,
    with_experts,
)
from ondevice.errors import CheckpointError
from ondevice.model_config import ExpertsSpec


def _read(reader: ConfigReader) -> Description:
    bias = reader.boolean("attention_bias", False)
    # Without use_sliding_window, the window has no effect.
    reader.only("use_sliding_window", False)
    reader.integer("sliding_window", 4096)
    reader.integer("max_window_layers", 28)
    config = read_llama(
        reader,
        "qwen3_moe",
        max_context=32768,
        kv_heads=4,
        attention={"bias": bias, "output_bias": bias, "head_norm": "head"},
    )
    experts = ExpertsSpec(
        read_count(reader, 128, "num_experts", "num_local_experts"),
        reader.integer("num_experts_per_tok", 8),
        reader.integer("moe_intermediate_size", 768),
        renormalised=reader.boolean("norm_topk_prob", False),
    )
    read_training_keys(reader)
    config = with_experts(config, experts, read_sparse_layers(reader, config.num_layers))
    return Description(config, partial(join_experts, config=config))


def read_sparse_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has experts, from the keys of Qwen2-MoE and Qwen3-MoE."""
    step = reader.integer("decoder_sparse_step", 1)
    if step < 1:
        raise CheckpointError(f"config.json: decoder_sparse_step is {step}; it must be 1 or more")
    dense = reader.numbers("mlp_only_layers") or []
    if any(layer != int(layer) or not 0 <= layer < num_layers for layer in dense):
        raise CheckpointError(
            f"config.json: mlp_only_layers is {shown(dense)}; layers are from 0 to {num_layers - 1}"
        )
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read)
