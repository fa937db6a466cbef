"""Granite: a Llama with multipliers of the embedding, of scores, of the blocks' outputs, and of logits.

Granite-MoE has experts in every layer, stacked in one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from ondevice.converters.architectures.adapting import logits_scaled, outputs_scaled
from ondevice.converters.architectures.common import Description, Family, Tensors, float32, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.experts import (
    ExpertNames,
    join_experts,
    read_count,
    read_training_keys,
    unstacked,
    with_experts,
)
from ondevice.errors import CheckpointError
from ondevice.model_config import ExpertsSpec, ModelConfig

EXPERTS = ExpertNames(
    gate="block_sparse_moe.{}.gate.weight",
    up="block_sparse_moe.{}.up.weight",
    down="block_sparse_moe.{}.down.weight",
    router="block_sparse_moe.router.layer.weight",
    stack="block_sparse_moe.switch_mlp.",
)
"""Names of the experts' tensors, once their stacks are split."""


def _read(reader: ConfigReader) -> Description:
    reader.only("mlp_bias", False)
    config = _read_attention(reader, "granite")
    residual, divisor = (
        read_multiplier(reader, "residual_multiplier"),
        read_multiplier(reader, "logits_scaling"),
    )

    def adapt(tensors: Tensors) -> Tensors:
        return logits_scaled(outputs_scaled(tensors, config, residual), 1 / divisor)

    return Description(config, adapt)


def _read_experts(reader: ConfigReader) -> Description:
    config = _read_attention(reader, "granitemoe")
    # Weights are a softmax of the chosen experts' logits.
    experts = ExpertsSpec(
        read_count(reader, 8, "num_local_experts"),
        reader.integer("num_experts_per_tok", 2),
        config.intermediate_size,
        renormalised=True,
    )
    read_training_keys(reader)
    config = with_experts(config, experts, [True] * config.num_layers)
    residual, divisor = (
        read_multiplier(reader, "residual_multiplier"),
        read_multiplier(reader, "logits_scaling"),
    )

    def adapt(tensors: Tensors) -> Tensors:
        module = "block_sparse_moe."
        adapted = unstacked(tensors, config, f"{module}input_linear.weight", EXPERTS.of("gate", "up"))
        adapted = unstacked(adapted, config, f"{module}output_linear.weight", EXPERTS.of("down"))
        adapted = join_experts(adapted, config, EXPERTS)
        return logits_scaled(outputs_scaled(adapted, config, residual), 1 / divisor)

    return Description(config, adapt)


def _read_attention(reader: ConfigReader, name: str) -> ModelConfig:
    bias = reader.boolean("attention_bias", False)
    config = read_llama(reader, name, max_context=2048, attention={"bias": bias, "output_bias": bias})
    embedding, scale = (read_factor(reader, key) for key in ("embedding_multiplier", "attention_multiplier"))
    layers = tuple(replace(layer, attention=replace(layer.attention, scale=scale)) for layer in config.layers)
    return replace(config, layers=layers, embedding_multiplier=embedding)


def read_factor(reader: ConfigReader, key: str) -> float:
    """The multiplier at a key, as a float32 value; 1 if the key is missing. Raises CheckpointError."""
    return float32(read_multiplier(reader, key))


def read_multiplier(reader: ConfigReader, key: str) -> float:
    """The multiplier at a key; 1 if the key is missing. Raises CheckpointError."""
    value = reader.number(key, 1.0)
    if not 1e-6 <= value <= 1e6:
        raise CheckpointError(f"config.json: {key} is {value}; it must be from 1e-6 to 1e6")
    return value


GRANITE = Family("granite", "GraniteForCausalLM", _read)
GRANITE_MOE = Family("granitemoe", "GraniteMoeForCausalLM", _read_experts)
