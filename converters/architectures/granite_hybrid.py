"""Granite 4: Granite's multipliers, and in hybrid models Mamba-2 mixers in most layers.

The other layers have attention without rotary embedding. Models are dense, or have experts and a feed-forward
that every token goes through. Models without mixers also belong to this family, and have rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ondevice.converters.architectures.adapting import logits_scaled, outputs_scaled, renamed, split
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Sizes,
    Tensors,
    decoder,
    float32,
    read_activation,
    read_sizes,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, ConfigReader, shown
from ondevice.converters.architectures.experts import (
    join_experts,
    read_shared_neurons,
    read_training_keys,
    unstacked,
    with_experts,
)
from ondevice.converters.architectures.granite import EXPERTS, read_factor, read_multiplier
from ondevice.converters.architectures.mamba2 import KINDS, mixer_tensors, read_mixer, require_silu
from ondevice.converters.architectures.rotary import no_rope, read_rope
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    NO_ATTENTION,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
)

NEURONS = "shared_intermediate_size"
NAMES = replace(EXPERTS, shared="shared_mlp.")
SHARED = {f"shared_mlp.{which}_proj.weight": f"mlp.{which}_proj.weight" for which in ("gate", "up", "down")}
"""Names of the feed-forward that every token goes through, and its new names where a layer has no experts."""


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=2048, neurons=(NEURONS, 1024))
    read_shared_neurons(reader, sizes.intermediate_size, NEURONS)
    residual = read_multiplier(reader, "residual_multiplier")
    activation, mixer = (
        read_activation(reader),
        replace(read_mixer(reader, sizes), out_factor=float32(residual)),
    )
    bias = reader.boolean("attention_bias", False)
    scale = read_factor(reader, "attention_multiplier")
    attention = AttentionSpec(scale, bias=bias, output_bias=bias)
    feed_forward, layers = FeedForwardSpec(activation), []
    for kind in _read_kinds(reader, sizes):
        if kind == "linear_attention":
            require_silu(activation, "hidden_act")
            layers.append(LayerSpec(NO_ATTENTION, feed_forward, mamba2=mixer))
        else:
            layers.append(LayerSpec(attention, feed_forward))
    rope = read_rope(reader, sizes.head_dim, sizes.max_context)
    config = decoder(
        "granitemoehybrid",
        sizes,
        layers,
        [rope if _has_rope(reader) else no_rope(sizes.head_dim)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-6)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
        embedding_multiplier=read_factor(reader, "embedding_multiplier"),
    )
    config = _with_experts(reader, config)
    # What models are trained with, and the one norm that they know.
    reader.text("init_method", "")
    reader.only("normalization_function", "rmsnorm")
    divisor = read_multiplier(reader, "logits_scaling")
    return Description(config, partial(_adapt, config=config, residual=residual, divisor=divisor))


def _read_kinds(reader: ConfigReader, sizes: Sizes) -> list[str]:
    named = reader.texts("layer_types")
    kinds = [KINDS.get(kind, kind) for kind in named or ["linear_attention"] * sizes.num_layers]
    if unknown := set(kinds) - set(KINDS.values()):
        raise UnsupportedModelError(f"config.json: layer_types has {', '.join(sorted(unknown))}")
    if len(kinds) != sizes.num_layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers of {sizes.num_layers}; {CONFIG_REMEDY}"
        )
    return kinds


def _has_rope(reader: ConfigReader) -> bool:
    """Whether attention has a rotary embedding."""
    kind = reader.text("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise UnsupportedModelError(
            f"config.json: position_embedding_type is {shown(kind)}; it must be rope, nope or null"
        )
    return kind == "rope"


def _with_experts(reader: ConfigReader, config: ModelConfig) -> ModelConfig:
    """The config with the experts that `config.json` names, if there are any."""
    count, chosen = reader.integer("num_local_experts", 8), reader.integer("num_experts_per_tok", 2)
    neurons = reader.integer("intermediate_size", 11008)
    read_training_keys(reader)
    if not count:
        return config
    # Weights are a softmax of the chosen experts' logits.
    experts = ExpertsSpec(count, chosen, neurons, renormalised=True)
    return with_experts(config, experts, [True] * config.num_layers, config.intermediate_size)


def _adapt(tensors: Tensors, config: ModelConfig, residual: float, divisor: float) -> Tensors:
    neurons = config.dense_neurons(config.layers[0])
    halves = {"shared_mlp.gate_proj.weight": neurons, "shared_mlp.up_proj.weight": neurons}
    adapted = split(tensors, config, "shared_mlp.input_linear.weight", halves)
    adapted = renamed(adapted, {"shared_mlp.output_linear.weight": "shared_mlp.down_proj.weight"})
    if config.experts is None:
        adapted = renamed(adapted, SHARED)
    else:
        module = "block_sparse_moe."
        adapted = unstacked(adapted, config, f"{module}input_linear.weight", NAMES.of("gate", "up"))
        adapted = unstacked(adapted, config, f"{module}output_linear.weight", NAMES.of("down"))
        adapted = join_experts(adapted, config, NAMES)
    # Mixers have the factor in their spec.
    adapted = mixer_tensors(outputs_scaled(adapted, config, residual), config)
    return logits_scaled(adapted, 1 / divisor)


GRANITE_HYBRID = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", _read)
