"""Mistral 7B and its relatives: a Llama without biases, with one sliding window for all layers."""

from __future__ import annotations

from ondevice.converters.architectures.common import Description, Family, check_window, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader


def _read(reader: ConfigReader) -> Description:
    # A missing key means the first release's 4,096 tokens; later releases say null, full attention.
    window = 0
    if not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window", 4096)
        check_window(window)
    config = read_llama(reader, "mistral", max_context=131072, kv_heads=8, attention={"window": window})
    return Description(config)


MISTRAL = Family("mistral", "MistralForCausalLM", _read)
