"""Mistral 7B and its relatives: a Llama without biases, with one sliding window for all layers."""

from __future__ import annotations

from ondevice.config import ModelConfig
from ondevice.converters.architectures.common import Family, base_config, check_window
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> ModelConfig:
    fields = base_config(reader, "mistral", max_context=131072, kv_heads=8)
    # A missing key means the first release's 4,096 tokens; later releases say null, full attention.
    if reader.is_null("sliding_window"):
        return ModelConfig(**fields)
    window = reader.integer("sliding_window", 4096)
    check_window(window)
    return ModelConfig(**fields, layer_windows=(window,) * fields["num_layers"])


MISTRAL = Family("mistral", "MistralForCausalLM", _read)
