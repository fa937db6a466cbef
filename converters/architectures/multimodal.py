"""Checkpoints with several towers: the text model is converted, the others are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import ConfigReader, shown
from ondevice.errors import UnsupportedModelError

OTHER_TOWERS = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
    "visual.",
)
_TEXT = ("language_model.", "model.language_model.")
_HARMLESS = frozenset({
    "audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id", "boi_token_id",
    "boi_token_index", "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index",
    "ignore_index", "image_seq_length", "image_token_id", "image_token_index", "language_model_only",
    "mm_tokens_per_image",
    "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "text_config",
    "tie_word_embeddings", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_feature_layer", "vision_feature_select_strategy", "vision_soft_tokens_per_image",
    "vision_start_token_id", "vocab_size",
})  # fmt: skip
"""Keys about images, and keys that the text model's config repeats."""


@dataclass(frozen=True)
class Multimodal:
    """A family of models with several towers. Their text model belongs to another family, and `text_config`
    describes it.

    Args:
        model_type, class_name: its names in `config.json`.
        text_type: the text model's type if the section names none.
        other_texts: other types that it may have.
        defaults: values of keys that the section may leave out, by the text model's type.
    """

    model_type: str
    class_name: str
    text_type: str
    other_texts: tuple[str, ...] = ()
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_SEVEN_BILLION = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAVA_DEFAULTS = {
    "llama": {**_SEVEN_BILLION, "intermediate_size": 11008, "vocab_size": 32000},
    "mistral": {**_SEVEN_BILLION, "intermediate_size": 14336, "vocab_size": 32000},
    "qwen2": {
        **_SEVEN_BILLION,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "num_key_value_heads": 32,
    },
}
"""What the text model classes of `transformers` use where their config says nothing."""


MULTIMODAL = {
    family.model_type: family
    for family in (
        Multimodal("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
        Multimodal("gemma3n", "Gemma3nForConditionalGeneration", "gemma3n_text"),
        Multimodal("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"),
        Multimodal("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
        Multimodal("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
        Multimodal("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
        Multimodal("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
        Multimodal("llava", "LlavaForConditionalGeneration", "llama", ("mistral", "qwen2"), _LLAVA_DEFAULTS),
    )
}


def harmless(values: Mapping[str, Any]) -> frozenset[str]:
    """The keys next to `text_config` that can't change the text model."""
    return _HARMLESS & frozenset(values)


def text_values(family: Multimodal, values: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the text model alone.

    Raises UnsupportedModelError for a text model of an unexpected family, including another one with towers.
    """
    text = {key: value for key, value in values["text_config"].items() if key != "architectures"}
    if "tie_word_embeddings" in values:
        text.setdefault("tie_word_embeddings", values["tie_word_embeddings"])
    kind = ConfigReader(text, "config.json: text_config").text("model_type", family.text_type)
    known = (family.text_type, *family.other_texts)
    if kind not in known:
        raise UnsupportedModelError(
            f"config.json: text_config has the model_type {shown(kind)}; of {family.model_type} only "
            f"{' or '.join(known)} can be converted"
        )
    return {**family.defaults.get(kind, {}), **text, "model_type": kind}


def text_tensors(tensors: Tensors) -> Tensors:
    """The tensors of the text model, under the names that they have in a model without other towers."""
    text = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(OTHER_TOWERS):
            continue
        for prefix in _TEXT:
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                name = rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
                break
        text[name] = tensor
    return text
