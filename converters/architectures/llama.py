"""Llama 1 to 3, and the many checkpoints that declare themselves a Llama."""

from __future__ import annotations

from ondevice.config import ModelConfig
from ondevice.converters.architectures.common import Family, base_config
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.only("pretraining_tp", 1)
    fields = base_config(reader, "llama", max_context=2048)
    return ModelConfig(**fields, attention_bias=bias, attention_output_bias=bias)


LLAMA = Family("llama", "LlamaForCausalLM", _read)
