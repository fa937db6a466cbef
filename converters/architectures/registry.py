"""All families that this converter knows, and the function that reads a `config.json` into a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.config import ModelConfig
from ondevice.converters.architectures.config_reader import HARMLESS_KEYS, ConfigReader, shown
from ondevice.converters.architectures.llama import LLAMA
from ondevice.converters.architectures.mistral import MISTRAL
from ondevice.converters.architectures.qwen2 import QWEN2
from ondevice.converters.architectures.qwen3 import QWEN3
from ondevice.errors import UnsupportedModelError

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed `config.json`.

    Raises UnsupportedModelError for another family or head, for a value that isn't implemented, and for an
    unknown key. Raises CheckpointError for a key that is missing or has the wrong type.
    """
    reader = ConfigReader(values)
    model_type = reader.text("model_type", "")
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"config.json: model_type {shown(model_type)} is not one of {', '.join(FAMILIES)}"
        )
    names = reader.texts("architectures") or [family.class_name]
    if names != [family.class_name]:
        raise UnsupportedModelError(
            f"config.json: architectures is {shown(names)}; only {family.class_name} can be converted"
        )
    reader.only("is_encoder_decoder", False)
    config = family.read(reader)
    reader.close(HARMLESS_KEYS)
    return config
