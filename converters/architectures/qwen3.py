"""Qwen3, dense: a norm over each query and key head, and head_dim on its own."""

from __future__ import annotations

from ondevice.config import ModelConfig
from ondevice.converters.architectures.common import Family, base_config, windows_by_layer
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("attention_bias", False)
    fields = base_config(reader, "qwen3", max_context=32768, kv_heads=32, head_dim=128)
    windows = windows_by_layer(reader, fields["num_layers"])
    return ModelConfig(
        **fields, attention_bias=bias, attention_output_bias=bias, qk_norm=True, layer_windows=windows
    )


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read)
