"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values, none on the attention output."""

from __future__ import annotations

from ondevice.config import ModelConfig
from ondevice.converters.architectures.common import Family, base_config, windows_by_layer
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> ModelConfig:
    fields = base_config(reader, "qwen2", max_context=32768, kv_heads=32)
    reader.only("attention_bias", True)
    windows = windows_by_layer(reader, fields["num_layers"])
    return ModelConfig(**fields, attention_bias=True, layer_windows=windows)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read)
