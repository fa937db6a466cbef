"""Llama 1 to 3, and the many checkpoints that declare themselves a Llama."""

from __future__ import annotations

from ondevice.converters.architectures.common import Description, Family, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> Description:
    bias = reader.boolean("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.only("pretraining_tp", 1)
    config = read_llama(reader, "llama", max_context=2048, attention={"bias": bias, "output_bias": bias})
    return Description(config)


LLAMA = Family("llama", "LlamaForCausalLM", _read)
