"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values, none on the attention output."""

from __future__ import annotations

from ondevice.converters.architectures.common import Description, Family, read_llama, read_windows
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> Description:
    # `transformers` doesn't read it; the tensors say whether there are biases.
    reader.boolean("attention_bias", True)
    config = read_llama(
        reader,
        "qwen2",
        max_context=32768,
        kv_heads=32,
        attention={"bias": True},
        windows=lambda num_layers: read_windows(reader, num_layers),
    )
    return Description(config)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read)
