"""What a decoder-only transformer is: `model` with its layers, what these have, `rope`; and `checks`."""

from ondevice.model_config.checks import MAX_FACTOR, SIZE_LIMITS
from ondevice.model_config.delta import MAX_TAPS, DeltaSpec
from ondevice.model_config.experts import (
    MAX_CHOSEN,
    MAX_EXPERT_NEURONS,
    MAX_EXPERTS,
    MAX_WEIGHT_FACTOR,
    ExpertsSpec,
    Scoring,
)
from ondevice.model_config.feed_forward import (
    ACTIVATIONS,
    CLAMP,
    MAX_DEVIATIONS,
    SWISH_SLOPE,
    ZEROING_NAMES,
    Activation,
    FeedForwardSpec,
    UpActivation,
)
from ondevice.model_config.latent import LATENT_LANES, LatentSpec
from ondevice.model_config.model import (
    MAX_COPIES,
    NO_ATTENTION,
    AttentionSpec,
    HeadNorm,
    HeadSizes,
    LayerSpec,
    ModelConfig,
    NormKind,
    NormPlaces,
    NormSpec,
)
from ondevice.model_config.rope import RopeSpec
from ondevice.model_config.short_conv import ConvSpec

__all__ = [
    "ACTIVATIONS",
    "CLAMP",
    "LATENT_LANES",
    "MAX_CHOSEN",
    "MAX_COPIES",
    "MAX_DEVIATIONS",
    "MAX_EXPERTS",
    "MAX_EXPERT_NEURONS",
    "MAX_FACTOR",
    "MAX_TAPS",
    "MAX_WEIGHT_FACTOR",
    "NO_ATTENTION",
    "SIZE_LIMITS",
    "SWISH_SLOPE",
    "ZEROING_NAMES",
    "Activation",
    "AttentionSpec",
    "ConvSpec",
    "DeltaSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
    "HeadNorm",
    "HeadSizes",
    "LatentSpec",
    "LayerSpec",
    "ModelConfig",
    "NormKind",
    "NormPlaces",
    "NormSpec",
    "RopeSpec",
    "Scoring",
    "UpActivation",
]
