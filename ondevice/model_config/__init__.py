"""What a decoder-only transformer is: `model` and its layers, `rope`, `experts`; ranges are in `checks`."""

from ondevice.model_config.checks import MAX_FACTOR
from ondevice.model_config.experts import (
    MAX_EXPERT_NEURONS,
    MAX_EXPERTS,
    MAX_WEIGHT_FACTOR,
    ExpertsSpec,
    Scoring,
)
from ondevice.model_config.model import (
    ACTIVATIONS,
    MAX_COPIES,
    MAX_DEVIATIONS,
    SIZE_LIMITS,
    ZEROING_NAMES,
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    HeadNorm,
    HeadSizes,
    LayerSpec,
    ModelConfig,
    NormKind,
    NormPlaces,
    NormSpec,
    UpActivation,
)
from ondevice.model_config.rope import RopeSpec

__all__ = [
    "ACTIVATIONS",
    "MAX_COPIES",
    "MAX_DEVIATIONS",
    "MAX_EXPERTS",
    "MAX_EXPERT_NEURONS",
    "MAX_FACTOR",
    "MAX_WEIGHT_FACTOR",
    "SIZE_LIMITS",
    "ZEROING_NAMES",
    "Activation",
    "AttentionSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
    "HeadNorm",
    "HeadSizes",
    "LayerSpec",
    "ModelConfig",
    "NormKind",
    "NormPlaces",
    "NormSpec",
    "RopeSpec",
    "Scoring",
    "UpActivation",
]
