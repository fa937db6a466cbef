"""Checkpoints of several towers: the text model among them is converted, the others are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ondevice.converters.architectures.common import Tensors

OTHER_TOWERS = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
)
_TEXT = ("language_model.", "model.language_model.")
_HARMLESS = frozenset({
    "audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id", "boi_token_id",
    "boi_token_index", "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index",
    "image_seq_length", "image_token_id", "image_token_index", "mm_tokens_per_image",
    "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "text_config",
    "tie_word_embeddings", "video_token_id", "vision_config", "vision_feature_layer",
    "vision_feature_select_strategy", "vision_soft_tokens_per_image",
})  # fmt: skip
"""Keys about images, and those that the text model's own config repeats."""


@dataclass(frozen=True)
class Multimodal:
    """A family whose text model is described by the section `text_config`, and is of another family.

    model_type, class_name: its names in `config.json`. text_type: the text model's, where the section names
    none.
    """

    model_type: str
    class_name: str
    text_type: str


MULTIMODAL = {
    family.model_type: family
    for family in (
        Multimodal("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
        Multimodal("gemma3n", "Gemma3nForConditionalGeneration", "gemma3n_text"),
        Multimodal("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"),
        Multimodal("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
        Multimodal("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
        Multimodal("llava", "LlavaForConditionalGeneration", "llama"),
    )
}


def harmless(values: Mapping[str, Any]) -> frozenset[str]:
    """The keys beside `text_config` that can't change what the text model computes."""
    return _HARMLESS & frozenset(values)


def text_values(family: Multimodal, values: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` that the text model would have by itself."""
    text = {key: value for key, value in values["text_config"].items() if key != "architectures"}
    if "tie_word_embeddings" in values:
        text.setdefault("tie_word_embeddings", values["tie_word_embeddings"])
    return {"model_type": family.text_type} | text


def text_tensors(tensors: Tensors) -> Tensors:
    """The text model's tensors, by the names that they would have by themselves."""
    found = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(OTHER_TOWERS):
            continue
        for prefix in _TEXT:
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                name = rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
                break
        found[name] = tensor
    return found
