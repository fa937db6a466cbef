"""GLM-4.5-MoE: experts chosen by biased sigmoids within groups, a shared expert, dense first layers.

Its last layers predict further tokens, and aren't part of the model.
"""

from __future__ import annotations

from functools import partial

from ondevice.converters.architectures.adapting import in_halves, without_layers_ahead
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    decoder,
    read_activation,
    read_sizes,
    score_scale,
    uniform_layers,
)
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.experts import (
    ExpertNames,
    join_experts,
    read_count,
    read_shared_experts,
    read_training_keys,
    with_experts,
)
from ondevice.converters.architectures.layers_ahead import layer_after_last, notes_of_layers_ahead
from ondevice.converters.architectures.rotary import read_rope
from ondevice.model_config import AttentionSpec, ExpertsSpec, ModelConfig, NormSpec

NAMES = ExpertNames(choice_bias="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts.")


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=131072, kv_heads=8, head_dim=128)
    attention = AttentionSpec(
        score_scale(sizes.head_dim),
        bias=reader.boolean("attention_bias", False),
        head_norm="head" if reader.boolean("use_qk_norm", False) else "none",
    )
    config = decoder(
        "glm4_moe",
        sizes,
        uniform_layers(sizes.num_layers, attention, read_activation(reader)),
        [read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=0.5)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-5)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    experts = ExpertsSpec(
        read_count(reader, 128, "n_routed_experts", "num_local_experts", "num_experts"),
        reader.integer("num_experts_per_tok", 8),
        reader.integer("moe_intermediate_size", 1408),
        "sigmoid",
        renormalised=reader.boolean("norm_topk_prob", True),
        factor=reader.number("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=reader.integer("n_group", 1),
        chosen_groups=reader.integer("topk_group", 1),
    )
    read_training_keys(reader)
    shared = read_shared_experts(reader, experts.neurons)
    dense = reader.integer("first_k_dense_replace", 1)
    ahead = reader.integer("num_nextn_predict_layers", 0)
    config = with_experts(config, experts, [layer >= dense for layer in range(config.num_layers)], shared)
    ahead_layer = partial(layer_after_last, config=config, adapt=_adapt)
    return Description(config, partial(_adapt, config), notes_of_layers_ahead(ahead), ahead_layer)


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    model_tensors = without_layers_ahead(tensors, config)
    return in_halves(join_experts(model_tensors, config, NAMES), config)


GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", _read)
