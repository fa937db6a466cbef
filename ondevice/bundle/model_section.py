"""The section `model` of `bundle.json`: a `ModelConfig`, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from ondevice.bundle.strict_json import Rule, Section
from ondevice.model_config import (
    MAX_CHOSEN,
    MAX_DEVIATIONS,
    MAX_EXPERT_NEURONS,
    MAX_EXPERTS,
    MAX_FACTOR,
    MAX_TAPS,
    MAX_TIME,
    MAX_WEIGHT_FACTOR,
    SIZE_LIMITS,
    STATE_SIZES,
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    ModelConfig,
    ModelPart,
    NormSpec,
    RopeSpec,
)

T = TypeVar("T")

_MAX_TOKENS = 1 << 24
_MAX_LAYERS = 1 << 10
_MAX_PAIRS = 1 << 9
_WORD: Rule = (Section.text, 16)
_FLAG: Rule = (Section.boolean,)
_FACTOR: Rule = (Section.number, 0.0, MAX_FACTOR)
_TAPS: Rule = (Section.integer, 2, MAX_TAPS)
_HEADS: Rule = (Section.integer, 1, SIZE_LIMITS["num_heads"])
_WIDTH: Rule = (Section.integer, 1, SIZE_LIMITS["head_dim"])


class Form(NamedTuple):
    """How a dataclass is written as JSON: its fields. Optional fields are left out if they have their default
    value.
    """

    required: Mapping[str, Rule]
    optional: Mapping[str, Rule] = {}


def read_object(section: Section, key: str, kind: type[T]) -> T:
    """The object at a key, parsed as the dataclass `kind`. Raises BundleError or UnsupportedModelError for
    invalid values.
    """
    return kind(**section.section(key).values(*FORMS[kind]))


def _objects(section: Section, key: str, kind: type[T], most: int) -> tuple[T, ...]:
    return tuple(kind(**each.values(*FORMS[kind])) for each in section.sections(key, most))


FORMS: Mapping[type, Form] = {
    NormSpec: Form({"kind": _WORD, "eps": (Section.number, 0.0, 1.0), "bias": _FLAG}),
    RopeSpec: Form(
        {"frequencies": (Section.numbers, _MAX_PAIRS, 0.0, 1.0), "magnitude": _FACTOR},
        {
            "long_frequencies": (Section.numbers, _MAX_PAIRS, 0.0, 1.0),
            "original_context": (Section.integer, 1, _MAX_TOKENS),
        },
    ),
    LatentSpec: Form(
        {
            **dict.fromkeys(("rank", "turning", "key_dim", "value_dim"), _WIDTH),
            "query_rank": (Section.integer, 0, SIZE_LIMITS["hidden_size"]),
            "eps": (Section.number, 0.0, 1.0),
        }
    ),
    AttentionSpec: Form(
        {
            "scale": _FACTOR,
            "rope": (Section.integer, 0, _MAX_LAYERS),
            "window": (Section.integer, 0, _MAX_TOKENS),
            "soft_cap": _FACTOR,
            "head_norm": _WORD,
            "bias": _FLAG,
            "output_bias": _FLAG,
        },
        {
            **dict.fromkeys(("value_norm", "sinks", "gated"), _FLAG),
            "keys_of": (Section.integer, 0, _MAX_LAYERS),
            "head_dim": _WIDTH,
            "num_kv_heads": (Section.integer, 1, SIZE_LIMITS["num_kv_heads"]),
            "value_dim": _WIDTH,
            "out_factor": _FACTOR,
            "latent": (read_object, LatentSpec),
        },
    ),
    FeedForwardSpec: Form(
        {"activation": (Section.text, 64)},
        {
            **dict.fromkeys(("gated", "bias", "output_bias"), _FLAG),
            **dict.fromkeys(("threshold", "clamp", "slope"), _FACTOR),
            "up_activation": _WORD,
            "cutoff": (Section.number, -MAX_DEVIATIONS, MAX_DEVIATIONS),
            "neurons": (Section.integer, 0, SIZE_LIMITS["intermediate_size"]),
        },
    ),
    ExpertsSpec: Form(
        {
            "count": (Section.integer, 1, MAX_EXPERTS),
            "chosen": (Section.integer, 1, MAX_CHOSEN),
            "neurons": (Section.integer, 1, MAX_EXPERT_NEURONS),
            "scoring": _WORD,
            "renormalised": _FLAG,
            "factor": (Section.number, 0.0, MAX_WEIGHT_FACTOR),
        },
        {
            **dict.fromkeys(("choice_bias", "router_bias", "shared_gate", "apart", "bias"), _FLAG),
            **dict.fromkeys(("groups", "chosen_groups", "group_best"), (Section.integer, 1, MAX_EXPERTS)),
            "layout": _WORD,
            "jitter": (Section.number, 0.0, 1.0),
        },
    ),
    DeltaSpec: Form(
        {
            **dict.fromkeys(("key_heads", "value_heads"), _HEADS),
            **dict.fromkeys(("key_width", "value_width"), _WIDTH),
            "taps": _TAPS,
        }
    ),
    ConvSpec: Form({"channels": (Section.integer, 1, SIZE_LIMITS["hidden_size"]), "taps": _TAPS}),
    Mamba2Spec: Form(
        {
            **dict.fromkeys(("heads", "groups"), _HEADS),
            **dict.fromkeys(("head_width", "state_width"), _WIDTH),
            "taps": _TAPS,
            "norm": _WORD,
        },
        {
            "conv_bias": _FLAG,
            "norm_groups": (Section.integer, 1, _MAX_TOKENS),
            **dict.fromkeys(("least_time", "most_time"), (Section.number, 0.0, MAX_TIME)),
            **dict.fromkeys(("time_factor", "gate_factor", "out_factor"), _FACTOR),
        },
    ),
    LayerSpec: Form(
        {
            "attention": (read_object, AttentionSpec),
            "feed_forward": (read_object, FeedForwardSpec),
            "norms": _WORD,
            "parallel": _FLAG,
        },
        {
            "laurel_rank": (Section.integer, 1, _MAX_TOKENS),
            "scaled": _FLAG,
            "experts": (read_object, ExpertsSpec),
            "delta": (read_object, DeltaSpec),
            "conv": (read_object, ConvSpec),
            "mamba2": (read_object, Mamba2Spec),
        },
    ),
    ModelPart: Form(
        {},
        {
            "first": (Section.integer, 0, _MAX_LAYERS),
            "layers": (Section.integer, 1, _MAX_LAYERS),
            **dict.fromkeys(("embeds", "heads", "cutoffs"), _FLAG),
            "experts": (read_object, ExpertsSpec),
            "widths": (Section.integers, _MAX_LAYERS, 0, SIZE_LIMITS["intermediate_size"]),
            "states": (Section.integers, STATE_SIZES, 0, 1 << 48),
        },
    ),
    ModelConfig: Form(
        {
            "architecture": (Section.text, 64),
            **dict.fromkeys(
                (name for name in SIZE_LIMITS if name != "num_layers"), (Section.integer, 1, _MAX_TOKENS)
            ),
            "norm": (read_object, NormSpec),
            "ropes": (_objects, RopeSpec, _MAX_LAYERS),
            "layers": (_objects, LayerSpec, _MAX_LAYERS),
            "embedding_multiplier": _FACTOR,
            "logit_soft_cap": _FACTOR,
            "tie_embeddings": _FLAG,
        },
        {
            **dict.fromkeys(("learned_positions", "head_bias", "final_norm"), _FLAG),
            **dict.fromkeys(
                ("embedding_width", "per_layer_width", "residual_copies"), (Section.integer, 0, _MAX_TOKENS)
            ),
            "per_layer_multiplier": _FACTOR,
            "part": (read_object, ModelPart),
        },
    ),
}
"""The form of each dataclass of a model's description."""


def object_section(value: Any) -> Any:
    """The JSON of a dataclass that has a `Form`, including the dataclasses it contains."""
    form = FORMS.get(type(value))
    if form is None:
        return list(map(object_section, value)) if isinstance(value, tuple) else value
    absent = {it.name: it.default for it in fields(value) if it.name in form.optional}
    section = {it.name: getattr(value, it.name) for it in fields(value)}
    return {
        name: object_section(it) for name, it in section.items() if name not in absent or it != absent[name]
    }


def model_section(config: ModelConfig) -> dict[str, Any]:
    """The manifest's section `model` for `config`."""
    section: dict[str, Any] = object_section(config)
    return section


def parse_model(section: Section) -> ModelConfig:
    """The config described by the section `model`. Raises BundleError or UnsupportedModelError for invalid
    values.
    """
    config = ModelConfig(**section.values(*FORMS[ModelConfig]))
    config.check_neurons()
    return config
