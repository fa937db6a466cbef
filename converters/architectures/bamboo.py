"""Bamboo and TurboSparse-Mistral (arXiv 2406.05955): a Mistral whose gates and ups both go through ReLU.

TurboSparse checkpoints include the authors' predictors of which neurons dReLU makes zero. Without them the
model is exact, so they are left out. `ondevice train predictors` trains new ones.
"""

from __future__ import annotations

import re

from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    check_code,
    check_window,
    read_llama,
)
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.errors import UnsupportedModelError

_PREDICTOR = re.compile(r"model\.layers\.\d+\.mlp\.predictor\..+")


def _read(reader: ConfigReader) -> Description:
    window = 0
    if not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window", 4096)
        check_window(window)
    check_code(reader, "bamboo")
    config = read_llama(
        reader,
        "bamboo",
        max_context=131072,
        kv_heads=8,
        attention={"window": window},
        up_activation="relu",
    )
    if config.activation != "relu":
        raise UnsupportedModelError(
            f"config.json: hidden_act is {config.activation!r}; a Bamboo model has relu gates"
        )
    return Description(config, _adapt, ("any predictors of the checkpoint were left out",))


def _adapt(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not _PREDICTOR.fullmatch(name)}


BAMBOO = Family("bamboo", "BambooForCausalLM", _read)
