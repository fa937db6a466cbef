"""Gemma 4 (text): global layers have heads of another size, whose keys may also be the values.

A number scales the output of each layer. E models also have per-layer inputs and shared keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ondevice.converters.architectures.adapting import renamed
from ondevice.converters.architectures.common import (
    GLOBAL,
    LOCAL,
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
)
from ondevice.converters.architectures.config_reader import ConfigReader, shown
from ondevice.converters.architectures.experts import (
    ExpertNames,
    join_experts,
    read_count,
    unstacked,
    with_experts,
)
from ondevice.converters.architectures.gemma import (
    GLOBAL_THETA,
    LOCAL_THETA,
    OUTPUT_NORMS,
    PATTERN,
    read_soft_cap,
)
from ondevice.converters.architectures.gemma3n import (
    PER_LAYER_NAMES,
    key_owners,
    per_layer_multiplier,
    per_layer_vocabulary,
    with_per_layer_inputs,
    without_shared_keys,
)
from ondevice.converters.architectures.rotary import read_section, rope_spec
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.views import Scaled
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    SIZE_LIMITS,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
    RopeSpec,
)

GLOBAL_HEAD_DIM = 512
ROTATED = 0.25
"""Share of a global head's dimensions that turn, where the file has no rotary parameters."""
NAMES = OUTPUT_NORMS | PER_LAYER_NAMES | {"layer_scalar": "scale"}

EXPERT_NAMES = {
    "router.scale": "router.norm.weight",
    "router.per_expert_scale": "router.scales",
    "pre_feedforward_layernorm_2.weight": "experts.norm.weight",
    "post_feedforward_layernorm_2.weight": "experts.output_norm.weight",
    "post_feedforward_layernorm_1.weight": "dense.output_norm.weight",
}
EXPERTS = ExpertNames(
    gate="experts.{}.gate.weight",
    up="experts.{}.up.weight",
    down="experts.{}.down.weight",
    router="router.proj.weight",
    shared="mlp.",
    stack="experts.switch_glu.",
)
"""Names of the experts' tensors, once their stacks are split."""

Heads = dict[str, dict[str, Any]]
"""The AttentionSpec fields by which each kind of layer differs from the model's sizes."""


def _read(reader: ConfigReader, max_context: int, window: int, inputs: int) -> Description:
    """The description of a Gemma 4. max_context, window, inputs: values for missing keys. inputs is the width
    of per-layer inputs, 0 if there are none.
    """
    _check_kind(reader)
    sizes = read_sizes(reader, max_context=max_context, kv_heads=4, head_dim=256, heads=8, vocab_size=262144)
    kinds = _kinds(reader, sizes.num_layers)
    key_values = reader.boolean("attention_k_eq_v", False)
    heads = _heads(reader, sizes, kinds, key_values)
    shared = reader.integer("num_kv_shared_layers", 0)
    owners = key_owners(kinds, shared)
    double = reader.boolean("use_double_wide_mlp", False)
    bias = reader.boolean("attention_bias", False)
    window = reader.integer("sliding_window", window)
    check_window(window)
    attention = AttentionSpec(1.0, head_norm="head", value_norm=True, bias=bias, output_bias=bias)
    feed_forward = FeedForwardSpec(read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"))
    specs = [
        LayerSpec(
            replace(
                attention,
                rope=int(kind == LOCAL),
                window=window if kind == LOCAL else 0,
                keys_of=owner,
                **heads[kind],
            ),
            replace(
                feed_forward,
                neurons=2 * sizes.intermediate_size if double and owner is not None else None,
            ),
            "both",
            scaled=True,
        )
        for kind, owner in zip(kinds, owners, strict=True)
    ]
    width = reader.integer("hidden_size_per_layer_input", inputs)
    config = decoder(
        "gemma4_text",
        sizes,
        specs,
        _ropes(reader, sizes, heads),
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-6)),
        embedding_multiplier=float32(sizes.hidden_size**0.5),
        logit_soft_cap=read_soft_cap(reader, "final_logit_softcapping", 0.0),
        tie_embeddings=reader.boolean("tie_word_embeddings", True),
        per_layer_width=width,
        per_layer_multiplier=per_layer_multiplier(width),
    )
    config = _with_experts(reader, config)
    known = per_layer_vocabulary(reader, config.vocab_size) if width else config.vocab_size
    # Of models without per-layer inputs, it says nothing.
    reader.integer("vocab_size_per_layer_input", 0)
    joint = [layer for layer, kind in enumerate(kinds) if key_values and kind == GLOBAL]
    return Description(config, lambda tensors: _adapt(tensors, config, known, joint))


def _with_experts(reader: ConfigReader, config: ModelConfig) -> ModelConfig:
    """The config, with experts parallel to each layer's dense feed-forward if the model has any."""
    if not reader.boolean("enable_moe_block", False):
        for unused in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            reader.integer(unused, 0)
        return config
    if len(set(config.widths)) > 1:
        raise UnsupportedModelError(
            "config.json: use_double_wide_mlp beside enable_moe_block isn't known of any model"
        )
    experts = ExpertsSpec(
        read_count(reader, None, "num_experts"),
        reader.integer("top_k_experts"),
        reader.integer("moe_intermediate_size"),
        renormalised=True,
        apart=True,
    )
    return with_experts(config, experts, [True] * config.num_layers, config.intermediate_size)


def _check_kind(reader: ConfigReader) -> None:
    """Check the kind of model. Raises UnsupportedModelError if a text token attends to later tokens."""
    if (sees := reader.text("use_bidirectional_attention", "vision")) != "vision":
        raise UnsupportedModelError(
            f"config.json: use_bidirectional_attention is {shown(sees)}; only 'vision', under which a text's "
            "tokens see those before them, is supported"
        )


def _kinds(reader: ConfigReader, layers: int) -> list[str]:
    kinds = read_layer_types(reader, layers)
    if kinds is None:
        kinds = [LOCAL if (i + 1) % PATTERN else GLOBAL for i in range(layers)]
    # The last layer is a global one, whatever the file names.
    return [*kinds[:-1], GLOBAL]


def _heads(reader: ConfigReader, sizes: Sizes, kinds: list[str], key_values: bool) -> Heads:
    """How the heads of each kind of layer differ from the model's, from keys for global layers or for each
    layer.
    """
    width = reader.integer("global_head_dim", GLOBAL_HEAD_DIM)
    keys = reader.integer("num_global_key_value_heads", sizes.num_kv_heads)
    of_kinds: Heads = {LOCAL: {}, GLOBAL: {"head_dim": width}}
    if key_values:
        of_kinds[GLOBAL]["num_kv_heads"] = keys
    named = reader.section("per_layer_config")
    if named is not None:
        layers = [_layer_heads(named, layer) for layer in range(len(kinds))]
        if unknown := set(named) - {str(layer) for layer in range(len(kinds))}:
            raise CheckpointError(
                f"config.json: per_layer_config has {shown(sorted(unknown))}, which aren't its layers"
            )
        for kind in of_kinds:
            of_kind = [it for it, other in zip(layers, kinds, strict=True) if other == kind]
            if any(it != of_kind[0] for it in of_kind):
                raise UnsupportedModelError(
                    f"config.json: per_layer_config gives layers of {kind} heads of different sizes"
                )
            of_kinds[kind] = of_kind[0] if of_kind else {}
    for fields in of_kinds.values():
        for name, value in fields.items():
            if not 1 <= value <= SIZE_LIMITS[name]:
                # Before anything is made for each of them.
                raise CheckpointError(
                    f"config.json: {name} of a layer is {value}; it must be from 1 to {SIZE_LIMITS[name]}"
                )
    model = {"head_dim": sizes.head_dim, "num_kv_heads": sizes.num_kv_heads}
    return {kind: {name: it for name, it in of_kinds[kind].items() if it != model[name]} for kind in of_kinds}


def _layer_heads(named: dict[str, Any], layer: int) -> dict[str, Any]:
    values = named.get(str(layer)) or {}
    where = f"config.json: per_layer_config.{layer}"
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is {shown(values)}; it must be an object")
    reader = ConfigReader(values, where)
    fields = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    sizes = {new: reader.integer(old) for old, new in fields.items() if reader.has(old)}
    reader.close()
    return sizes


def _ropes(reader: ConfigReader, sizes: Sizes, heads: Heads) -> list[RopeSpec]:
    """The rotary embeddings of global and local layers."""
    parts = reader.section("rope_parameters") or {
        GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": ROTATED}
    }
    if set(parts) - {GLOBAL, LOCAL} or not all(isinstance(part, dict) for part in parts.values()):
        raise UnsupportedModelError(
            "config.json: rope_parameters must hold objects for full_attention and sliding_attention"
        )
    ropes = []
    for kind, base in ((GLOBAL, GLOBAL_THETA), (LOCAL, LOCAL_THETA)):
        rope = ConfigReader(parts.get(kind, {}), f"config.json: rope_parameters.{kind}")
        width = heads[kind].get("head_dim", sizes.head_dim)
        if rope.text("rope_type", "default") == "proportional":
            ropes.append(_proportional(rope, width, base))
        else:
            ropes.append(read_section(rope, width, base, sizes.max_context, sizes.max_context))
    return ropes


def _proportional(rope: ConfigReader, width: int, base: float) -> RopeSpec:
    """The rotary embedding of a head in which only the first pairs are rotated, with the frequencies that
    they have if all are.
    """
    share, factor = rope.number("partial_rotary_factor", 1.0), rope.number("factor", 1.0)
    if not 0.0 <= share <= 1.0 or not 1.0 <= factor <= 1e6:
        raise CheckpointError(
            f"{rope.where}: partial_rotary_factor is {share} and factor {factor}; they must be from 0 to 1 "
            "and from 1 to 1e6"
        )
    frequencies = rope_spec(rope.number("rope_theta", base), width).frequencies
    rope.close()
    turning = int(share * width // 2)
    scaled = [float32(frequency / factor) for frequency in frequencies[:turning]]
    return RopeSpec((*scaled, *[0.0] * (len(frequencies) - turning)))


def _adapt(tensors: Tensors, config: ModelConfig, known: int, joint: list[int]) -> Tensors:
    """The tensors under the names of `tensors.py`.

    known: as for Gemma 3n. joint: layers whose values come from the projection of the keys.
    """
    if config.experts is not None:
        tensors = _adapt_experts(tensors, config)
    adapted = without_shared_keys(renamed(tensors, NAMES), config)
    for layer in joint:
        for kind in ("weight", "bias"):
            keys, values = (f"model.layers.{layer}.self_attn.{which}_proj.{kind}" for which in "kv")
            if keys in adapted:
                adapted[values] = adapted[keys]
    return with_per_layer_inputs(adapted, config, known) if config.per_layer_width else adapted


def _adapt_experts(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with a layer's experts stored as neurons, and the router's norm in the usual form."""
    adapted = unstacked(tensors, config, "experts.gate_up_proj", EXPERTS.of("gate", "up"))
    adapted = unstacked(adapted, config, "experts.down_proj", EXPERTS.of("down"))
    scaled = dict(renamed(join_experts(adapted, config, EXPERTS), EXPERT_NAMES))
    for layer in range(config.num_layers):
        name = LayerNames(layer).weight("router.norm.weight")
        if name in scaled:
            scaled[name] = Scaled(name, scaled[name], factor=config.hidden_size**-0.5)
    return scaled


def _reader(max_context: int, window: int, inputs: int) -> Callable[[ConfigReader], Description]:
    return partial(_read, max_context=max_context, window=window, inputs=inputs)


GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", _reader(131072, 512, 256))
GEMMA4_UNIFIED = Family("gemma4_unified_text", "Gemma4UnifiedForCausalLM", _reader(262144, 1024, 0))
