"""Granite, dense: a Llama with multipliers of the embedding, of scores, of what blocks add, and of logits."""

from __future__ import annotations

from dataclasses import replace

from ondevice.converters.architectures.adapting import logits_scaled, outputs_scaled
from ondevice.converters.architectures.common import Description, Family, Tensors, float32, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.errors import CheckpointError


def _read(reader: ConfigReader) -> Description:
    bias = reader.boolean("attention_bias", False)
    reader.only("mlp_bias", False)
    config = read_llama(reader, "granite", max_context=2048, attention={"bias": bias, "output_bias": bias})
    embedding, scale = (
        float32(_positive(reader, key)) for key in ("embedding_multiplier", "attention_multiplier")
    )
    layers = tuple(replace(layer, attention=replace(layer.attention, scale=scale)) for layer in config.layers)
    config = replace(config, layers=layers, embedding_multiplier=embedding)
    residual, divisor = _positive(reader, "residual_multiplier"), _positive(reader, "logits_scaling")

    def adapt(tensors: Tensors) -> Tensors:
        return logits_scaled(outputs_scaled(tensors, config, residual), 1 / divisor)

    return Description(config, adapt)


def _positive(reader: ConfigReader, key: str) -> float:
    value = reader.number(key, 1.0)
    if not 1e-6 <= value <= 1e6:
        raise CheckpointError(f"config.json: {key} is {value}; it must be from 1e-6 to 1e6")
    return value


GRANITE = Family("granite", "GraniteForCausalLM", _read)
