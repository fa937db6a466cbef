"""Qwen3, dense: a norm over each query and key head, and a separate key for head_dim."""

from __future__ import annotations

from ondevice.converters.architectures.common import Description, Family, read_llama, read_windows
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> Description:
    bias = reader.boolean("attention_bias", False)
    config = read_llama(
        reader,
        "qwen3",
        max_context=32768,
        kv_heads=32,
        head_dim=128,
        attention={"bias": bias, "output_bias": bias, "head_norm": "head"},
        windows=lambda num_layers: read_windows(reader, num_layers),
    )
    return Description(config)


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read)
