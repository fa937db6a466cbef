"""GGUF architectures that compute the same as another family, and kinds of GGUF files that contain no text
model.
"""

from __future__ import annotations

from typing import Any

from ondevice.converters.checkpoints.gguf_file import GgufHeader
from ondevice.converters.checkpoints.gguf_gemma import Values
from ondevice.converters.checkpoints.gguf_mamba2 import granite_keys
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_TEMPERATURE = "attention.temperature_scale"
_ORIGINAL = "rope.scaling.original_context_length"
_BAICHUAN_LAYERS = 32

OTHER_KINDS = {
    "an encoder of images or sound, which goes with a language model": ("clip",),
    "an encoder, which generates nothing": (
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
        "eurobert", "t5encoder", "gemma-embedding", "llama-embed",
    ),
    "an encoder with a decoder": ("t5",),
    "a diffusion model, whose tokens see later ones": ("dream", "llada", "llada-moe", "rnd1"),
    "a model that drafts for another one": ("eagle3", "dflash", "gemma4-assistant"),
    "a model of sound": ("wavtokenizer-dec", "qwen3tts", "pockettts"),
    "a recurrent model without attention": ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
}  # fmt: skip
"""What an architecture is that no family here could have, by llama.cpp's name of it."""


def mistral3_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Mistral 3 and Ministral 3.

    Their queries are scaled up beyond the original context; here texts end before that.
    """
    scaling = values["rope_scaling"]
    config: dict[str, Any] = {"sliding_window": None}
    if (multiplier := metadata.number(_LOG_MULTIPLIER, 0.0)) > 0.0:
        if scaling is None or scaling["rope_type"] != "yarn":
            raise CheckpointError(
                f"{metadata.header.file}: {metadata.prefix}{_LOG_MULTIPLIER} is there without yarn, "
                "which it is a part of"
            )
        config["rope_scaling"] = {**scaling, "mscale": 1.0, "mscale_all_dim": multiplier}
    if metadata.number(_TEMPERATURE, 0.0):
        original = metadata.integer(_ORIGINAL)
        config["max_position_embeddings"] = min(original, values["max_position_embeddings"])
    return config


def mistral3_notes(header: GgufHeader, config: ModelConfig) -> tuple[str, ...]:
    if not header.metadata.get(f"mistral3.{_TEMPERATURE}"):
        return ()
    return (
        f"its context ends at {config.max_context} tokens: beyond them its queries are scaled by a text's "
        "length, which isn't done here",
    )


def minicpm_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """Granite's multipliers for MiniCPM. All of them are required, because older files mean other values
    without saying so.
    """
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        metadata.number(key)
    return granite_keys(metadata, values)


def baichuan_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Baichuan 7B.

    The 13B model adds a term to scores that grows with distance (ALiBi); no key says so, so it is refused.
    """
    if (layers := values["num_hidden_layers"]) != _BAICHUAN_LAYERS:
        raise UnsupportedModelError(
            f"{metadata.header.file} is a Baichuan of {layers} layers; only the 7B, of {_BAICHUAN_LAYERS}, "
            "has rotary embedding and can be converted"
        )
    return {}


def text_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """An empty result, after reading the keys by which a vision model places pictures.

    In a text without pictures, a picture's three positions become one, and nothing of a picture is added to
    the layers.
    """
    metadata.array("rope.dimension_sections")
    metadata.integer("n_deepstack_layers", 0)
    return {}


def text_notes(header: GgufHeader, config: ModelConfig) -> tuple[str, ...]:
    return ("its text model alone: images can't be given to it",)


def other_kind(architecture: str) -> str:
    """What kind of model an architecture is if it can't be a family here; empty if it can."""
    return next((kind for kind, names in OTHER_KINDS.items() if architecture in names), "")
