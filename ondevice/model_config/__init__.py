"""The description of a decoder-only transformer: the model, its layers and their blocks."""

from ondevice.model_config.attention import NO_ATTENTION, AttentionSpec, HeadNorm, HeadSizes
from ondevice.model_config.checks import MAX_FACTOR, SIZE_LIMITS
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
    LayerSpec,
    ModelConfig,
    NormKind,
    NormPlaces,
    NormSpec,
)
from ondevice.model_config.part import (
    ALIGNED_FLOATS,
    FULL_MODEL,
    STATE_SIZES,
    ModelPart,
    cut_places,
    part_config,
)
from ondevice.model_config.recurrent import (
    MAX_TAPS,
    MAX_TIME,
    ConvSpec,
    DeltaSpec,
    Mamba2Spec,
    MixerNorm,
    RecurrentSpec,
)
from ondevice.model_config.rope import RopeSpec

__all__ = [
    "ACTIVATIONS",
    "ALIGNED_FLOATS",
    "CLAMP",
    "FULL_MODEL",
    "LATENT_LANES",
    "MAX_CHOSEN",
    "MAX_COPIES",
    "MAX_DEVIATIONS",
    "MAX_EXPERTS",
    "MAX_EXPERT_NEURONS",
    "MAX_FACTOR",
    "MAX_TAPS",
    "MAX_TIME",
    "MAX_WEIGHT_FACTOR",
    "NO_ATTENTION",
    "SIZE_LIMITS",
    "STATE_SIZES",
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
    "Mamba2Spec",
    "MixerNorm",
    "ModelConfig",
    "ModelPart",
    "NormKind",
    "NormPlaces",
    "NormSpec",
    "RecurrentSpec",
    "RopeSpec",
    "Scoring",
    "UpActivation",
    "cut_places",
    "part_config",
]
