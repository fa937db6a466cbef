"""MiMo V2 Flash: five layers of six have windows, with other heads, rotary bases and attention sinks.

Values are narrower than keys. Experts are chosen as in DeepSeek V3, and none is shared.

The authors' folders have up to three more layers `model.mtp.layers.N`, each of which predicts one more token
and isn't part of the model. `transformers` renames most keys of the authors' `config.json`, and gives sliding
layers twice the key heads. Both forms are read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ondevice.converters.architectures.adapting import in_halves, renamed, without_layers_ahead
from ondevice.converters.architectures.common import (
    GLOBAL,
    LOCAL,
    Description,
    Family,
    Sizes,
    Tensors,
    check_code,
    check_window,
    decoder,
    float32,
    read_activation,
    read_layer_types,
    read_sizes,
    score_scale,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, ConfigReader, shown
from ondevice.converters.architectures.deepseek import experts_of_v3
from ondevice.converters.architectures.experts import join_experts, read_training_keys, with_experts
from ondevice.converters.architectures.glm4_moe import NAMES
from ondevice.converters.architectures.layers_ahead import NOTE_OF_SEVERAL, first_of_several
from ondevice.converters.architectures.rotary import read_section, rope_spec
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    SIZE_LIMITS,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
    RopeSpec,
)

THETAS = {GLOBAL: 5e6, LOCAL: 1e4}
OLDER = {GLOBAL: "rope_theta", LOCAL: "swa_rope_theta"}
"""The authors' names of keys that `transformers` renames."""
ROTATED = 0.334
PERIOD = 6
"""Layers from one full-attention layer to the next, the first being one, where the file doesn't say."""
WINDOW = 129
"""Tokens that a query sees in a sliding layer, itself included, where the file doesn't say."""
VALUE_DIM, VALUE_SCALE = 128, 0.707
RENAMED = {
    "self_attn.attention_sink_bias": "attention.sinks",
    "self_attn.sinks": "attention.sinks",
    # Of the layers that predict tokens ahead.
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


def _read(reader: ConfigReader) -> Description:
    check_code(reader, "mimo_v2_flash")
    sizes = read_sizes(reader, max_context=131072, kv_heads=4, head_dim=192)
    kinds, sparse = _kinds(reader, sizes.num_layers), _sparse(reader, sizes.num_layers)
    attention, ropes = _attention(reader, sizes)
    config = decoder(
        "mimo_v2_flash",
        sizes,
        [LayerSpec(attention[kind], FeedForwardSpec(read_activation(reader))) for kind in kinds],
        ropes,
        norm=NormSpec("rms", _eps(reader)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    experts = experts_of_v3((256, 8, 2048, 1.0), (1, 1), reader)
    reader.only("n_shared_experts", 0)
    read_training_keys(reader)
    # Windows are those of `sliding_window`, whatever the chunks in which some code computes them.
    reader.integer("attention_chunk_size", WINDOW)
    # How many layers predict tokens ahead: folders have them whether it is there or not.
    ahead = reader.integer("num_nextn_predict_layers", 0)
    dense = replace(config.layers[0], attention=attention[LOCAL], experts=None)
    layer = _alone(replace(config, layers=(dense,)))
    if any(sparse):
        config = with_experts(config, experts, sparse)
    notes = (NOTE_OF_SEVERAL,) if ahead > 0 or reader.has("hybrid_layer_pattern") else ()
    first = partial(first_of_several, config=layer, prefix="model.mtp.layers.", adapt=_adapt)
    return Description(config, partial(_adapt, config), notes, first)


def _eps(reader: ConfigReader) -> float:
    """The epsilon of norms: `layernorm_epsilon` in the authors' files, `rms_norm_eps` in those of
    `transformers`.
    """
    eps = reader.number("layernorm_epsilon", reader.number("rms_norm_eps", 1e-5))
    if reader.number("rms_norm_eps", eps) != eps:
        raise CheckpointError(
            f"config.json: layernorm_epsilon is {eps}, and rms_norm_eps {reader.number('rms_norm_eps')}; "
            f"{CONFIG_REMEDY}"
        )
    return eps


def _kinds(reader: ConfigReader, layers: int) -> list[str]:
    """Each layer's kind of attention."""
    pattern = _flags(reader, "hybrid_layer_pattern", layers)
    kinds = read_layer_types(reader, layers)
    if pattern is not None:
        by_pattern = [LOCAL if flag else GLOBAL for flag in pattern]
        if kinds not in (None, by_pattern):
            raise CheckpointError(
                f"config.json: layer_types and hybrid_layer_pattern contradict each other; {CONFIG_REMEDY}"
            )
        return by_pattern
    return kinds or [LOCAL if i and (i + 1) % PERIOD else GLOBAL for i in range(layers)]


def _sparse(reader: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has experts."""
    flags, kinds = _flags(reader, "moe_layer_freq", layers), reader.texts("mlp_layer_types")
    if kinds is not None and (len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}):
        raise CheckpointError(
            f"config.json: mlp_layer_types must name each layer `dense` or `sparse`; {CONFIG_REMEDY}"
        )
    named = None if kinds is None else [kind == "sparse" for kind in kinds]
    if flags is not None and named not in (None, flags):
        raise CheckpointError(
            f"config.json: mlp_layer_types and moe_layer_freq contradict each other; {CONFIG_REMEDY}"
        )
    return flags or named or [layer > 0 for layer in range(layers)]


def _flags(reader: ConfigReader, key: str, layers: int) -> list[bool] | None:
    """A list of 0 and 1, one for each layer, as booleans; None if the key is missing."""
    flags = reader.numbers(key)
    if flags is not None and (len(flags) != layers or not set(flags) <= {0.0, 1.0}):
        raise CheckpointError(
            f"config.json: {key} must be a 0 or a 1 for each of {layers} layers; {CONFIG_REMEDY}"
        )
    return None if flags is None else [flag == 1.0 for flag in flags]


def _attention(reader: ConfigReader, sizes: Sizes) -> tuple[dict[str, AttentionSpec], list[RopeSpec]]:
    """The attention specs of both kinds of layer, and their rotary embeddings."""
    reader.only("swa_num_attention_heads", sizes.num_heads)
    width, keys = sizes.head_dim, sizes.num_kv_heads
    head_sizes = {GLOBAL: (width, keys)}
    head_sizes[LOCAL] = (
        reader.integer("swa_head_dim", width),
        reader.integer("swa_num_key_value_heads", min(2 * keys, sizes.num_heads)),
    )
    value = reader.integer("v_head_dim", VALUE_DIM)
    values = {GLOBAL: value, LOCAL: reader.integer("swa_v_head_dim", value)}
    sinks = {
        GLOBAL: reader.boolean("add_full_attention_sink_bias", False),
        LOCAL: reader.boolean("add_swa_attention_sink_bias", True),
    }
    windows = {GLOBAL: 0, LOCAL: _window(reader)}
    bias, factor = reader.boolean("attention_bias", False), _value_scale(reader)
    specs = {}
    for rope, (kind, (of_head, heads)) in enumerate(head_sizes.items()):
        for name, size, most in (
            ("head_dim", of_head, SIZE_LIMITS["head_dim"]),
            ("num_key_value_heads", heads, sizes.num_heads),
            ("v_head_dim", values[kind], of_head),
        ):
            if not 1 <= size <= most:
                # Before anything is made for each of them.
                raise UnsupportedModelError(
                    f"config.json: {name} of layers of {kind} is {size}; it must be from 1 to {most}"
                )
        specs[kind] = AttentionSpec(
            score_scale(of_head),
            rope=rope,
            window=windows[kind],
            bias=bias,
            sinks=sinks[kind],
            head_dim=0 if of_head == width else of_head,
            num_kv_heads=0 if heads == keys else heads,
            value_dim=0 if values[kind] == of_head else values[kind],
            # Values are scaled; as attention is linear in them, so is what it gives.
            out_factor=factor,
        )
    return specs, _ropes(
        reader, {kind: of_head for kind, (of_head, _) in head_sizes.items()}, sizes.max_context
    )


def _window(reader: ConfigReader) -> int:
    """The number of tokens that a query sees, including itself.

    The authors' `sliding_window_size` is one less, because their code for SGLang counts the tokens before the
    query.
    """
    window = reader.integer("sliding_window", WINDOW)
    if reader.has("sliding_window_size") and not reader.is_null("sliding_window_size"):
        window = reader.integer("sliding_window_size") + 1
    check_window(window)
    return window


def _value_scale(reader: ConfigReader) -> float:
    if reader.is_null("attention_value_scale"):
        return 1.0
    return float32(reader.number("attention_value_scale", VALUE_SCALE))


def _ropes(reader: ConfigReader, widths: dict[str, int], max_context: int) -> list[RopeSpec]:
    """The rotary embeddings of full and of sliding attention. widths: the widths of their heads."""
    parts: dict[str, Any] | None = reader.section("rope_parameters")
    if parts is None:
        thetas = {kind: reader.number(OLDER[kind], theta) for kind, theta in THETAS.items()}
        share = reader.number("partial_rotary_factor", ROTATED)
        return [rope_spec(thetas[kind], width, rotated=int(width * share)) for kind, width in widths.items()]
    if set(parts) - set(widths) or not all(isinstance(part, dict) for part in parts.values()):
        raise UnsupportedModelError(
            f"config.json: rope_parameters is {shown(parts)}; it must hold objects for full_attention and "
            "sliding_attention"
        )
    ropes = []
    for kind, width in widths.items():
        rope = ConfigReader(parts.get(kind, {}), f"config.json: rope_parameters.{kind}")
        rope.only("rope_type", "default")
        _check_older(reader, OLDER[kind], rope.number("rope_theta", THETAS[kind]))
        _check_older(reader, "partial_rotary_factor", rope.number("partial_rotary_factor", ROTATED))
        ropes.append(read_section(rope, width, THETAS[kind], max_context, max_context, rotated_share=ROTATED))
    return ropes


def _check_older(reader: ConfigReader, key: str, value: float) -> None:
    """Check a key of the authors, which `transformers` keeps. Raises CheckpointError if it has
    another value.
    """
    if (older := reader.number(key, value)) != value:
        raise CheckpointError(
            f"config.json: {key} is {older:g}, and rope_parameters say {value:g}; {CONFIG_REMEDY}"
        )


def _alone(config: ModelConfig) -> ModelConfig:
    """A one-layer model with the model's heads and rotary embedding."""
    layer = config.layers[0]
    sizes, attention = config.heads(layer.attention), layer.attention
    return replace(
        config,
        num_kv_heads=sizes.keys,
        head_dim=sizes.width,
        ropes=(config.ropes[attention.rope],),
        layers=(replace(layer, attention=replace(attention, rope=0, head_dim=0, num_kv_heads=0)),),
    )


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    model_tensors = without_layers_ahead(tensors, config)
    model_tensors = {
        name: tensor for name, tensor in model_tensors.items() if not name.startswith("model.mtp.")
    }
    return in_halves(join_experts(renamed(model_tensors, RENAMED), config, NAMES), config)


MIMO_V2_FLASH = Family("mimo_v2_flash", "MiMoV2FlashForCausalLM", _read)
