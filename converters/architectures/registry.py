"""All families that the converter knows, and the functions that describe the model of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ondevice.converters.architectures.bamboo import BAMBOO
from ondevice.converters.architectures.common import Description, Tensors
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, HARMLESS_KEYS, ConfigReader, shown
from ondevice.converters.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from ondevice.converters.architectures.falcon import FALCON
from ondevice.converters.architectures.falcon_h1 import FALCON_H1
from ondevice.converters.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from ondevice.converters.architectures.gemma3n import GEMMA3N
from ondevice.converters.architectures.gemma4 import GEMMA4, GEMMA4_UNIFIED
from ondevice.converters.architectures.glm4 import GLM4
from ondevice.converters.architectures.glm4_moe import GLM4_MOE
from ondevice.converters.architectures.gpt_oss import GPT_OSS
from ondevice.converters.architectures.granite import GRANITE, GRANITE_MOE
from ondevice.converters.architectures.granite_hybrid import GRANITE_HYBRID
from ondevice.converters.architectures.lfm2 import LFM2
from ondevice.converters.architectures.lfm2_moe import LFM2_MOE
from ondevice.converters.architectures.llama import LLAMA, SPARSE_LLAMA
from ondevice.converters.architectures.mimo_v2 import MIMO_V2_FLASH
from ondevice.converters.architectures.mistral import MISTRAL
from ondevice.converters.architectures.mixtral import MIXTRAL
from ondevice.converters.architectures.multimodal import (
    MULTIMODAL,
    Multimodal,
    harmless,
    text_tensors,
    text_values,
)
from ondevice.converters.architectures.nemotron import NEMOTRON
from ondevice.converters.architectures.nemotron_h import NEMOTRON_H
from ondevice.converters.architectures.olmo2 import OLMO2
from ondevice.converters.architectures.olmoe import OLMOE
from ondevice.converters.architectures.opt import OPT
from ondevice.converters.architectures.persimmon import PERSIMMON
from ondevice.converters.architectures.phi import PHI
from ondevice.converters.architectures.phi3 import PHI3
from ondevice.converters.architectures.phimoe import PHIMOE
from ondevice.converters.architectures.qwen2 import QWEN2
from ondevice.converters.architectures.qwen2_moe import QWEN2_MOE
from ondevice.converters.architectures.qwen3 import QWEN3
from ondevice.converters.architectures.qwen3_moe import QWEN3_MOE
from ondevice.converters.architectures.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from ondevice.converters.architectures.smollm3 import SMOLLM3
from ondevice.converters.architectures.stablelm import STABLELM
from ondevice.errors import UnsupportedModelError
from ondevice.model_config import ModelConfig

_ALL = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    GEMMA4_UNIFIED,
    PHI3,
    GLM4,
    SMOLLM3,
    GRANITE,
    OLMO2,
    STABLELM,
    SPARSE_LLAMA,
    BAMBOO,
    OPT,
    FALCON,
    PHI,
    PERSIMMON,
    NEMOTRON,
    OLMOE,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    PHIMOE,
    GRANITE_MOE,
    GLM4_MOE,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MIMO_V2_FLASH,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    LFM2,
    LFM2_MOE,
    GRANITE_HYBRID,
    NEMOTRON_H,
    FALCON_H1,
)
FAMILIES = {family.model_type: family for family in _ALL}


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed `config.json`. Raises what `describe` raises."""
    return describe(values).config


def describe(values: Mapping[str, Any]) -> Description:
    """The model that a parsed `config.json` describes.

    Raises UnsupportedModelError for another family or head, for a value that isn't implemented, and for an
    unknown key. Raises CheckpointError for a key that is missing or has the wrong type. Messages begin with
    `config.json`.
    """
    reader = ConfigReader(values)
    model_type = reader.text("model_type", "")
    if model_type in MULTIMODAL and reader.section("text_config"):
        return _describe_text(MULTIMODAL[model_type], values)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"config.json: model_type {shown(model_type)} is not one of {', '.join([*FAMILIES, *MULTIMODAL])}"
        )
    _check_class(reader, family.class_name, *family.other_classes)
    reader.only("is_encoder_decoder", False)
    if not reader.boolean("is_causal", True):
        raise UnsupportedModelError(
            "config.json: is_causal is false: tokens see later ones; only causal attention can be converted"
        )
    try:
        # Numbers that float32 doesn't hold become infinite or 0, which the specs refuse.
        with np.errstate(all="ignore"):
            description = family.read(reader)
        description.config.check_neurons()
    except UnsupportedModelError as error:
        if str(error).startswith("config.json"):
            raise
        # Of ModelConfig or of a spec, which know of no file.
        raise UnsupportedModelError(f"config.json: {error}; {CONFIG_REMEDY}") from error
    reader.close(HARMLESS_KEYS)
    return replace(description, notes=(*description.notes, *_rope_notes(values, description.config)))


def _rope_notes(values: Mapping[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """The notes for users if rotary frequencies change with a text's context (longrope) or length
    (dynamic).
    """
    if config.original_context < config.max_context:
        return (
            f"with a --max-context above {config.original_context} tokens it takes its long rotary "
            "frequencies from a text's first token on",
        )
    parts = [values.get(key) for key in ("rope_parameters", "rope_scaling")]
    kinds = [part.get(key) for part in parts if isinstance(part, dict) for key in ("rope_type", "type")]
    if "dynamic" not in kinds:
        return ()
    return (
        f"its context ends at {config.max_context} tokens: keys of longer texts would need other rotary "
        "frequencies from their first token on",
    )


def _describe_text(family: Multimodal, values: Mapping[str, Any]) -> Description:
    """The description of the text model, for a checkpoint that also has other towers."""
    reader = ConfigReader(values)
    _check_class(reader, family.class_name)
    reader.close(HARMLESS_KEYS | harmless(values))
    text = describe(text_values(family, values))

    def adapt(tensors: Tensors) -> Tensors:
        return text.adapt(text_tensors(tensors))

    notes = (*text.notes, "its text model alone: images can't be given to it")
    return replace(text, adapt=adapt, notes=notes)


def _check_class(reader: ConfigReader, *known: str) -> None:
    names = reader.texts("architectures") or [known[0]]
    if names not in ([name] for name in known):
        raise UnsupportedModelError(
            f"config.json: architectures is {shown(names)}; only {' or '.join(known)} can be converted"
        )
