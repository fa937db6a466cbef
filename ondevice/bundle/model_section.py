"""The section `model` of `bundle.json`: a `ModelConfig`, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from ondevice.bundle.strict_json import Section
from ondevice.model_config import (
    FULL_MODEL,
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
    Activation,
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    HeadNorm,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MixerNorm,
    ModelConfig,
    ModelPart,
    NormKind,
    NormPlaces,
    NormSpec,
    RopeSpec,
    Scoring,
    UpActivation,
)

_MAX_TOKENS = 1 << 24
_MAX_LAYERS = 1 << 10
_MAX_PAIRS = 1 << 9
SIZES = (
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_context",
)
"""The fields of ModelConfig that are sizes."""
FLAGS = {"learned_positions": False, "head_bias": False, "final_norm": True}
"""Flags, with the values that are left out."""
COUNTS = {"embedding_width": 0, "per_layer_width": 0, "residual_copies": 1}
"""Numbers of blocks that few models have, with the values that are left out."""
FACTORS = {"per_layer_multiplier": 1.0}
"""Factors, with the values that are left out."""
_PLAIN = asdict(FeedForwardSpec("silu"))
"""Values of a feed-forward's keys that are left out, except the activation."""
_PLAIN_ROPE = {"long_frequencies": [], "original_context": 0}
_PLAIN_LAYER = {
    "laurel_rank": 0,
    "scaled": False,
    "experts": None,
    "delta": None,
    "conv": None,
    "mamba2": None,
}
_PLAIN_MIXER = {
    "conv_bias": False,
    "norm_groups": 1,
    "least_time": 0.0,
    "most_time": None,
    "time_factor": 1.0,
    "gate_factor": 1.0,
    "out_factor": 1.0,
}
_PLAIN_EXPERTS = {
    "choice_bias": False,
    "router_bias": False,
    "groups": 1,
    "chosen_groups": 1,
    "group_best": 2,
    "jitter": 0.0,
    "shared_gate": False,
    "apart": False,
    "layout": "matrices",
    "bias": False,
}
_PLAIN_PART = asdict(FULL_MODEL) | {"widths": [], "states": []}
_PLAIN_ATTENTION = {
    "value_norm": False,
    "sinks": False,
    "keys_of": None,
    "head_dim": 0,
    "num_kv_heads": 0,
    "latent": None,
    "gated": False,
    "out_factor": 1.0,
    "value_dim": 0,
}
"""Likewise of a rope, a layer, its mixer, its experts, a part and its attention."""


def model_section(config: ModelConfig) -> dict[str, Any]:
    """The section of `config`."""
    section: dict[str, Any] = _plain(asdict(config))
    for layer in section["layers"]:
        spec = layer["feed_forward"]
        layer["feed_forward"] = {
            name: value for name, value in spec.items() if name == "activation" or value != _PLAIN[name]
        }
        if layer["experts"] is not None:
            drop_plain_experts(layer["experts"])
        if layer["mamba2"] is not None:
            _drop(layer["mamba2"], _PLAIN_MIXER)
        _drop(layer, _PLAIN_LAYER)
        _drop(layer["attention"], _PLAIN_ATTENTION)
    for rope in section["ropes"]:
        _drop(rope, _PLAIN_ROPE)
    part = section["part"]
    if part["experts"] is not None:
        drop_plain_experts(part["experts"])
    _drop(part, _PLAIN_PART)
    absent: dict[str, Any] = {**FLAGS, **COUNTS, **FACTORS, "part": {}}
    return {name: value for name, value in section.items() if name not in absent or value != absent[name]}


def parse_model(section: Section) -> ModelConfig:
    """The config of a section. Raises BundleError or UnsupportedModelError for invalid values."""
    sizes: dict[str, Any] = {name: section.integer(name, 1, _MAX_TOKENS) for name in SIZES}
    flags: dict[str, Any] = {name: section.boolean(name) for name in FLAGS if name in section.names}
    flags |= {name: section.integer(name, 0, _MAX_TOKENS) for name in COUNTS if name in section.names}
    flags |= {name: section.number(name, 0.0, MAX_FACTOR) for name in FACTORS if name in section.names}
    if "part" in section.names:
        flags["part"] = _parse_part(section.section("part"))
    config = ModelConfig(
        architecture=section.text("architecture", 64),
        norm=_parse_norm(section.section("norm")),
        ropes=tuple(_parse_rope(rope) for rope in section.sections("ropes", _MAX_LAYERS)),
        layers=tuple(_parse_layer(layer) for layer in section.sections("layers", _MAX_LAYERS)),
        embedding_multiplier=section.number("embedding_multiplier", 0.0, MAX_FACTOR),
        logit_soft_cap=section.number("logit_soft_cap", 0.0, MAX_FACTOR),
        tie_embeddings=section.boolean("tie_embeddings"),
        **sizes,
        **flags,
    )
    config.check_neurons()
    section.close()
    return config


def _parse_part(section: Section) -> ModelPart:
    given: dict[str, Any] = {}
    if "first" in section.names:
        given["first"] = section.integer("first", 0, _MAX_LAYERS)
    if "layers" in section.names:
        given["layers"] = section.integer("layers", 1, _MAX_LAYERS)
    given |= {name: section.boolean(name) for name in ("embeds", "heads", "cutoffs") if name in section.names}
    if "experts" in section.names:
        given["experts"] = parse_experts(section.section("experts"))
    if "widths" in section.names:
        given["widths"] = section.integers("widths", _MAX_LAYERS, 0, SIZE_LIMITS["intermediate_size"])
    if "states" in section.names:
        given["states"] = section.integers("states", STATE_SIZES, 0, 1 << 48)
    section.close()
    return ModelPart(**given)


def _parse_norm(section: Section) -> NormSpec:
    norm = NormSpec(
        kind=cast(NormKind, section.text("kind", 16)),
        eps=section.number("eps", 0.0, 1.0),
        bias=section.boolean("bias"),
    )
    section.close()
    return norm


def _parse_rope(section: Section) -> RopeSpec:
    given: dict[str, Any] = {}
    if "long_frequencies" in section.names:
        given["long_frequencies"] = section.numbers("long_frequencies", _MAX_PAIRS, 0.0, 1.0)
    if "original_context" in section.names:
        given["original_context"] = section.integer("original_context", 1, _MAX_TOKENS)
    rope = RopeSpec(
        frequencies=section.numbers("frequencies", _MAX_PAIRS, 0.0, 1.0),
        magnitude=section.number("magnitude", 0.0, MAX_FACTOR),
        **given,
    )
    section.close()
    return rope


def _parse_layer(section: Section) -> LayerSpec:
    given: dict[str, Any] = {}
    if "laurel_rank" in section.names:
        given["laurel_rank"] = section.integer("laurel_rank", 1, _MAX_TOKENS)
    if "scaled" in section.names:
        given["scaled"] = section.boolean("scaled")
    if "experts" in section.names:
        given["experts"] = parse_experts(section.section("experts"))
    if "delta" in section.names:
        given["delta"] = _parse_delta(section.section("delta"))
    if "conv" in section.names:
        given["conv"] = _parse_conv(section.section("conv"))
    if "mamba2" in section.names:
        given["mamba2"] = _parse_mixer(section.section("mamba2"))
    layer = LayerSpec(
        attention=_parse_attention(section.section("attention")),
        feed_forward=_parse_feed_forward(section.section("feed_forward")),
        norms=cast(NormPlaces, section.text("norms", 16)),
        parallel=section.boolean("parallel"),
        **given,
    )
    section.close()
    return layer


def parse_experts(section: Section) -> ExpertsSpec:
    """A layer's experts. Raises BundleError or UnsupportedModelError for invalid values."""
    given: dict[str, Any] = {}
    for name in ("choice_bias", "router_bias", "shared_gate", "apart", "bias"):
        if name in section.names:
            given[name] = section.boolean(name)
    for name in ("groups", "chosen_groups", "group_best"):
        if name in section.names:
            given[name] = section.integer(name, 1, MAX_EXPERTS)
    if "layout" in section.names:
        given["layout"] = section.text("layout", 16)
    if "jitter" in section.names:
        given["jitter"] = section.number("jitter", 0.0, 1.0)
    experts = ExpertsSpec(
        count=section.integer("count", 1, MAX_EXPERTS),
        chosen=section.integer("chosen", 1, MAX_CHOSEN),
        neurons=section.integer("neurons", 1, MAX_EXPERT_NEURONS),
        scoring=cast(Scoring, section.text("scoring", 16)),
        renormalised=section.boolean("renormalised"),
        factor=section.number("factor", 0.0, MAX_WEIGHT_FACTOR),
        **given,
    )
    section.close()
    return experts


def _parse_delta(section: Section) -> DeltaSpec:
    delta = DeltaSpec(
        key_heads=section.integer("key_heads", 1, SIZE_LIMITS["num_heads"]),
        value_heads=section.integer("value_heads", 1, SIZE_LIMITS["num_heads"]),
        key_width=section.integer("key_width", 1, SIZE_LIMITS["head_dim"]),
        value_width=section.integer("value_width", 1, SIZE_LIMITS["head_dim"]),
        taps=section.integer("taps", 2, MAX_TAPS),
    )
    section.close()
    return delta


def _parse_conv(section: Section) -> ConvSpec:
    conv = ConvSpec(
        channels=section.integer("channels", 1, SIZE_LIMITS["hidden_size"]),
        taps=section.integer("taps", 2, MAX_TAPS),
    )
    section.close()
    return conv


def _parse_mixer(section: Section) -> Mamba2Spec:
    given: dict[str, Any] = {}
    if "conv_bias" in section.names:
        given["conv_bias"] = section.boolean("conv_bias")
    if "norm_groups" in section.names:
        given["norm_groups"] = section.integer("norm_groups", 1, _MAX_TOKENS)
    for names, most in (
        (("least_time", "most_time"), MAX_TIME),
        (("time_factor", "gate_factor", "out_factor"), MAX_FACTOR),
    ):
        given |= {name: section.number(name, 0.0, most) for name in names if name in section.names}
    mixer = Mamba2Spec(
        heads=section.integer("heads", 1, SIZE_LIMITS["num_heads"]),
        head_width=section.integer("head_width", 1, SIZE_LIMITS["head_dim"]),
        groups=section.integer("groups", 1, SIZE_LIMITS["num_heads"]),
        state_width=section.integer("state_width", 1, SIZE_LIMITS["head_dim"]),
        taps=section.integer("taps", 2, MAX_TAPS),
        norm=cast(MixerNorm, section.text("norm", 16)),
        **given,
    )
    section.close()
    return mixer


def _parse_attention(section: Section) -> AttentionSpec:
    given: dict[str, Any] = {}
    for name in ("value_norm", "sinks", "gated"):
        if name in section.names:
            given[name] = section.boolean(name)
    if "keys_of" in section.names:
        given["keys_of"] = section.integer("keys_of", 0, _MAX_LAYERS)
    for name in ("head_dim", "num_kv_heads"):
        if name in section.names:
            given[name] = section.integer(name, 1, SIZE_LIMITS[name])
    if "value_dim" in section.names:
        given["value_dim"] = section.integer("value_dim", 1, SIZE_LIMITS["head_dim"])
    if "out_factor" in section.names:
        given["out_factor"] = section.number("out_factor", 0.0, MAX_FACTOR)
    if "latent" in section.names:
        given["latent"] = parse_latent(section.section("latent"))
    attention = AttentionSpec(
        scale=section.number("scale", 0.0, MAX_FACTOR),
        rope=section.integer("rope", 0, _MAX_LAYERS),
        window=section.integer("window", 0, _MAX_TOKENS),
        soft_cap=section.number("soft_cap", 0.0, MAX_FACTOR),
        head_norm=cast(HeadNorm, section.text("head_norm", 16)),
        bias=section.boolean("bias"),
        output_bias=section.boolean("output_bias"),
        **given,
    )
    section.close()
    return attention


def parse_latent(section: Section) -> LatentSpec:
    """Latent attention. Raises BundleError or UnsupportedModelError for invalid values."""
    latent = LatentSpec(
        rank=section.integer("rank", 1, SIZE_LIMITS["head_dim"]),
        turning=section.integer("turning", 1, SIZE_LIMITS["head_dim"]),
        key_dim=section.integer("key_dim", 1, SIZE_LIMITS["head_dim"]),
        value_dim=section.integer("value_dim", 1, SIZE_LIMITS["head_dim"]),
        query_rank=section.integer("query_rank", 0, SIZE_LIMITS["hidden_size"]),
        eps=section.number("eps", 0.0, 1.0),
    )
    section.close()
    return latent


def _parse_feed_forward(section: Section) -> FeedForwardSpec:
    given: dict[str, Callable[[str], Any]] = {
        "gated": section.boolean,
        "threshold": lambda key: section.number(key, 0.0, MAX_FACTOR),
        "up_activation": lambda key: cast(UpActivation, section.text(key, 16)),
        "bias": section.boolean,
        "output_bias": section.boolean,
        "cutoff": lambda key: section.number(key, -MAX_DEVIATIONS, MAX_DEVIATIONS),
        "clamp": lambda key: section.number(key, 0.0, MAX_FACTOR),
        "slope": lambda key: section.number(key, 0.0, MAX_FACTOR),
        "neurons": lambda key: section.integer(key, 0, SIZE_LIMITS["intermediate_size"]),
    }
    values: dict[str, Any] = {key: read(key) for key, read in given.items() if key in section.names}
    feed_forward = FeedForwardSpec(cast(Activation, section.text("activation", 64)), **values)
    section.close()
    return feed_forward


def drop_plain_experts(section: dict[str, Any]) -> None:
    """Delete the keys of a section of experts that have default values."""
    _drop(section, _PLAIN_EXPERTS)


def _drop(part: dict[str, Any], plain: dict[str, Any]) -> None:
    """Delete the keys of `part` that have the values of `plain`."""
    for name in [name for name, value in plain.items() if part[name] == value]:
        del part[name]


def _plain(value: Any) -> Any:
    """`value` as JSON returns it: with lists for tuples."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
