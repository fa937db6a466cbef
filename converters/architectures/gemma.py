"""Gemma 1, 2 and 3 (text): norms that are stored minus one, and a scaled embedding.

From Gemma 2 on, layers have four norms, soft caps or head norms, and local layers between global ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ondevice.converters.architectures.adapting import norms_shifted, renamed
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Sizes,
    Tensors,
    check_window,
    decoder,
    float32,
    read_activation,
    read_layer_types,
    read_sizes,
    score_scale,
)
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.rotary import read_rope, read_section
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormPlaces,
    NormSpec,
    RopeSpec,
)

PATTERN = 6
"""Layers from one global layer to the next in Gemma 3."""
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Rotary bases of Gemma 3's local and global layers."""
OUTPUT_NORMS = {
    "post_attention_layernorm.weight": "attention_output_layernorm.weight",
    "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight": "feed_forward_output_layernorm.weight",
}


def _read_gemma(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=8192, kv_heads=16, head_dim=256)
    rope = read_rope(reader, sizes.head_dim, sizes.max_context)
    if reader.has("hidden_activation") and not reader.is_null("hidden_activation"):
        activation = _activation(reader)
    else:
        # `gelu` in older files means the tanh form, as the authors' own code had it.
        activation = read_activation(reader, default="gelu_pytorch_tanh")
        activation = "gelu_tanh" if activation == "gelu" else activation
    config = _decoder("gemma", reader, sizes, [rope], [0] * sizes.num_layers, "before", activation)
    return Description(config, norms_shifted)


def _read_gemma2(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=8192, kv_heads=4, head_dim=256)
    rope = read_rope(reader, sizes.head_dim, sizes.max_context)
    # Beside `sliding_window` in the files of 9B and 27B, without an effect.
    reader.integer("sliding_window_size", 4096)
    kinds = read_layer_types(reader, sizes.num_layers)
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.num_layers)]
    config = _decoder(
        "gemma2",
        reader,
        sizes,
        [rope],
        _windows(reader, kinds),
        "both",
        _activation(reader),
        attention={"soft_cap": read_soft_cap(reader, "attn_logit_softcapping", 50.0)},
        logit_soft_cap=read_soft_cap(reader, "final_logit_softcapping", 30.0),
    )
    return Description(config, _adapt)


def _read_gemma3(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=131072, kv_heads=4, head_dim=256, heads=8, vocab_size=262208)
    # Null in all published configs, and `transformers` reads it without capping anything.
    reader.only("attn_logit_softcapping", 0.0)
    pattern = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", PATTERN))
    if pattern < 1:
        raise CheckpointError(f"config.json: sliding_window_pattern is {pattern}; it must be 1 or more")
    kinds = read_layer_types(reader, sizes.num_layers)
    if kinds is None:
        kinds = [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(sizes.num_layers)
        ]
    config = _decoder(
        "gemma3_text",
        reader,
        sizes,
        read_ropes(reader, sizes),
        _windows(reader, kinds),
        "both",
        _activation(reader),
        attention={"head_norm": "head"},
        logit_soft_cap=read_soft_cap(reader, "final_logit_softcapping", 0.0),
    )
    # Local layers have a rotary base of their own.
    layers = tuple(
        replace(layer, attention=replace(layer.attention, rope=int(kind == "sliding_attention")))
        for layer, kind in zip(config.layers, kinds, strict=True)
    )
    return Description(replace(config, layers=layers), _adapt)


def read_ropes(reader: ConfigReader, sizes: Sizes) -> list[RopeSpec]:
    """The rotary embeddings of Gemma 3's and 3n's global and local layers, from older or newer keys."""
    newer, scaling = reader.section("rope_parameters") or {}, reader.section("rope_scaling") or {}
    older = {"full_attention": scaling, "sliding_attention": {}}
    if newer and scaling and scaling != newer.get("full_attention"):
        raise CheckpointError(
            "config.json: rope_scaling and rope_parameters.full_attention contradict each other; keep one"
        )
    parts = newer if newer else older
    unknown = set(parts) - set(older)
    if unknown or not all(isinstance(part, dict) for part in parts.values()):
        raise UnsupportedModelError(
            "config.json: rope_parameters must hold objects for full_attention and sliding_attention"
        )
    bases = {
        "full_attention": reader.number("rope_theta", GLOBAL_THETA),
        "sliding_attention": reader.number("rope_local_base_freq", LOCAL_THETA),
    }
    context = sizes.max_context
    return [
        read_section(
            ConfigReader(parts.get(kind, {}), f"config.json: rope_parameters.{kind}"),
            sizes.head_dim,
            base,
            context,
            context,
        )
        for kind, base in bases.items()
    ]


def read_soft_cap(reader: ConfigReader, key: str, default: float) -> float:
    """A soft cap; 0 if the key is null."""
    return 0.0 if reader.is_null(key) else reader.number(key, default)


def _decoder(
    name: str,
    reader: ConfigReader,
    sizes: Sizes,
    ropes: list[RopeSpec],
    windows: list[int],
    norms: NormPlaces,
    activation: Activation,
    attention: Mapping[str, Any] | None = None,
    logit_soft_cap: float = 0.0,
) -> ModelConfig:
    """The config that all Gemmas share. attention: fields of every AttentionSpec."""
    bias = reader.boolean("attention_bias", False)
    reader.only("use_bidirectional_attention", False)
    width = sizes.head_dim if name == "gemma" else reader.number("query_pre_attn_scalar", 256)
    if width <= 0:
        raise CheckpointError(f"config.json: query_pre_attn_scalar is {width}; it must be above 0")
    spec = AttentionSpec(score_scale(width), bias=bias, output_bias=bias, **(attention or {}))
    feed_forward = FeedForwardSpec(activation)
    return decoder(
        name,
        sizes,
        [LayerSpec(replace(spec, window=window), feed_forward, norms) for window in windows],
        ropes,
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-6)),
        embedding_multiplier=float32(sizes.hidden_size**0.5),
        logit_soft_cap=logit_soft_cap,
        tie_embeddings=reader.boolean("tie_word_embeddings", True),
    )


def _activation(reader: ConfigReader) -> Activation:
    # Gemma 2 and 3 read `hidden_activation` alone; some files have the other key too.
    reader.text("hidden_act", "")
    return read_activation(reader, "hidden_activation", "gelu_pytorch_tanh")


def _windows(reader: ConfigReader, kinds: list[str]) -> list[int]:
    if reader.is_null("sliding_window"):
        return [0] * len(kinds)
    window = reader.integer("sliding_window", 4096)
    check_window(window)
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _adapt(tensors: Tensors) -> Tensors:
    return renamed(norms_shifted(tensors), OUTPUT_NORMS)


GEMMA = Family("gemma", "GemmaForCausalLM", _read_gemma)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _read_gemma2)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3)
