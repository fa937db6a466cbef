"""Latent attention: DeepSeek V2 and V3, and GLM-4.7-Flash, which has the blocks of V3.

The first layers are dense, the others have experts, some of which are shared. In the checkpoints, the pairs
(2 i, 2 i + 1) are rotated. A last layer of V3 and GLM predicts further tokens, and isn't part of the model.
Keys and values are computed from latents by one matrix in a checkpoint, and mostly by two, split by heads, in
MLX's folders and in GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ondevice.converters.architectures.adapting import (
    check_shape,
    in_turning_halves,
    renamed,
    without_layers_ahead,
)
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    check_code,
    decoder,
    float32,
    read_activation,
    read_sizes,
    uniform_layers,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, SAME_REPOSITORY, ConfigReader
from ondevice.converters.architectures.experts import (
    join_experts,
    piece,
    read_count,
    read_shared_experts,
    read_training_keys,
    with_experts,
)
from ondevice.converters.architectures.glm4_moe import NAMES
from ondevice.converters.architectures.layers_ahead import layer_after_last, notes_of_layers_ahead
from ondevice.converters.architectures.rotary import read_rope, read_score_magnitude
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.views import HeadsTransposed, RowsOf
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    ModelConfig,
    NormSpec,
)

RENAMED = {
    "self_attn.q_a_proj.weight": "self_attn.q_proj.weight",
    "self_attn.q_a_layernorm.weight": "attention.query_norm.weight",
    "self_attn.q_b_proj.weight": "attention.queries",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attn.kv_proj.weight",
    "self_attn.kv_a_layernorm.weight": "attention.latent_norm.weight",
}
_EPS = 1e-6
"""Epsilon of the norms of latents and of query latents; `rms_norm_eps` is that of the other norms."""


def _read(
    model_type: str,
    read_experts: Callable[[ConfigReader], ExpertsSpec],
    defaults: LatentSpec,
    max_context: int,
    dense_layers: int,
    reader: ConfigReader,
) -> Description:
    """The description of a family with latent attention.

    defaults, max_context, dense_layers: values for missing keys.
    """
    check_code(reader, "deepseek")
    latent = _read_latent(reader, defaults)
    sizes = read_sizes(reader, max_context=max_context, head_dim=latent.turning)
    wanted = {"head_dim": latent.turning, "num_key_value_heads": sizes.num_heads}
    for key, size in (("head_dim", sizes.head_dim), ("num_key_value_heads", sizes.num_kv_heads)):
        if size != wanted[key]:
            raise UnsupportedModelError(
                f"config.json: {key} is {size}; with latent attention it must be {wanted[key]}, as other "
                f"keys have it; {CONFIG_REMEDY}"
            )
    reader.only("qk_head_dim", latent.query_width)
    reader.only("attention_bias", False)
    reader.only("mlp_bias", False)
    interleaved = reader.boolean("rope_interleave", True)
    scale = float32(latent.query_width**-0.5 * read_score_magnitude(reader) ** 2)
    config = decoder(
        model_type,
        replace(sizes, num_kv_heads=1, head_dim=latent.width),
        uniform_layers(sizes.num_layers, AttentionSpec(scale, latent=latent), read_activation(reader)),
        [read_rope(reader, latent.turning, sizes.max_context)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-6)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    config = _with_experts(reader, config, read_experts(reader), dense_layers)
    ahead = max(reader.integer(key, 0) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    adapt = partial(_adapt, latent, interleaved)
    ahead_layer = partial(layer_after_last, config=config, adapt=adapt)
    return Description(config, partial(adapt, config), notes_of_layers_ahead(ahead), ahead_layer)


def _read_latent(reader: ConfigReader, defaults: LatentSpec) -> LatentSpec:
    """The sizes of latent attention. A null `q_lora_rank` means that queries are computed from a layer's
    input.
    """
    without = reader.is_null("q_lora_rank")
    return LatentSpec(
        rank=reader.integer("kv_lora_rank", defaults.rank),
        turning=reader.integer("qk_rope_head_dim", defaults.turning),
        key_dim=reader.integer("qk_nope_head_dim", defaults.key_dim),
        value_dim=reader.integer("v_head_dim", defaults.value_dim),
        query_rank=reader.integer("q_lora_rank", 0 if without else defaults.query_rank),
        eps=_EPS,
    )


def _with_experts(
    reader: ConfigReader, config: ModelConfig, experts: ExpertsSpec, dense_layers: int
) -> ModelConfig:
    read_training_keys(reader)
    # What only training and running on several machines use.
    reader.boolean("seq_aux", True)
    reader.number("aux_loss_alpha", 0.0)
    reader.integer("pretraining_tp", 1)
    reader.integer("ep_size", 1)
    reader.only("moe_layer_freq", 1)
    shared = read_shared_experts(reader, experts.neurons)
    dense = reader.integer("first_k_dense_replace", dense_layers)
    kinds = reader.texts("mlp_layer_types")
    sparse = [layer >= dense for layer in range(config.num_layers)]
    if kinds is not None:
        if len(kinds) != config.num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise CheckpointError(
                "config.json: mlp_layer_types must name each layer `dense` or `sparse`; " + CONFIG_REMEDY
            )
        sparse = [kind == "sparse" for kind in kinds]
    return with_experts(config, experts, sparse, shared) if any(sparse) else config


def _experts_of_v2(reader: ConfigReader) -> ExpertsSpec:
    """The experts of DeepSeek V2.

    They are chosen by softmax among all experts, or among the groups whose best expert is highest.
    """
    reader.only("scoring_func", "softmax")
    # Some of the authors' code then divides by the sum in the factor's place; no checkpoint asks for it.
    reader.only("norm_topk_prob", False)
    method = reader.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"config.json: topk_method {method[:40]!a} is not one of greedy, group_limited_greedy"
        )
    groups, chosen = reader.integer("n_group", 1), reader.integer("topk_group", 1)
    in_groups = method == "group_limited_greedy" and groups > 1
    return ExpertsSpec(
        read_count(reader, 64, "n_routed_experts", "num_local_experts", "num_experts"),
        reader.integer("num_experts_per_tok"),
        reader.integer("moe_intermediate_size", 1407),
        "softmax",
        factor=reader.number("routed_scaling_factor", 1.0),
        groups=groups if in_groups else 1,
        chosen_groups=chosen if in_groups else 1,
        group_best=1 if in_groups else 2,
    )


def experts_of_v3(
    defaults: tuple[int, int, int, float], groups: tuple[int, int], reader: ConfigReader
) -> ExpertsSpec:
    """The experts of DeepSeek V3, chosen by biased sigmoids among the groups whose best two experts are
    highest.

    defaults: values for missing keys: number of experts, number that a token chooses, neurons of an expert,
    and the factor of weights. groups: values for the number of groups, and of those that a token chooses
    from.
    """
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    count, chosen, neurons, factor = defaults
    return ExpertsSpec(
        read_count(reader, count, "n_routed_experts", "num_local_experts", "num_experts"),
        reader.integer("num_experts_per_tok", chosen),
        reader.integer("moe_intermediate_size", neurons),
        "sigmoid",
        renormalised=reader.boolean("norm_topk_prob", True),
        factor=reader.number("routed_scaling_factor", factor),
        choice_bias=True,
        groups=reader.integer("n_group", groups[0]),
        chosen_groups=reader.integer("topk_group", groups[1]),
    )


def _adapt(latent: LatentSpec, interleaved: bool, config: ModelConfig, tensors: Tensors) -> Tensors:
    model_tensors = without_layers_ahead(tensors, config)
    adapted = dict(renamed(model_tensors, RENAMED))
    heads, of_head = config.num_heads, latent.key_dim + latent.value_dim
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        queries = name.weight("attention.queries") if latent.query_rank else name.projection("q")
        for tensor, count, width in (
            (queries, heads, latent.query_width),
            (name.projection("kv"), 1, latent.width),
        ):
            if interleaved and tensor in adapted:
                adapted[tensor] = in_turning_halves(adapted[tensor], tensor, count, width, latent.turning)
        keys, values = name.weight("attention.latent_keys"), name.weight("attention.latent_values")
        for part, new, shape in (
            ("embed_q", keys, (heads, latent.rank, latent.key_dim)),
            ("unembed_out", values, (heads, latent.value_dim, latent.rank)),
        ):
            if (stack := adapted.pop(f"model.layers.{layer}.self_attn.{part}.weight", None)) is not None:
                check_shape(stack, shape)
                adapted[new] = piece(stack, new, 0, 1)
        both = adapted.pop(f"model.layers.{layer}.self_attn.kv_b_proj.weight", None)
        if both is None:
            continue
        check_shape(both, (heads * of_head, latent.rank))
        if keys in adapted or values in adapted:
            raise CheckpointError(f"{both.name} is there whole and in parts; {SAME_REPOSITORY}")
        adapted[keys] = HeadsTransposed(keys, both, heads, latent.key_dim)
        rows = np.arange(heads * of_head).reshape(heads, of_head)[:, latent.key_dim :]
        adapted[values] = RowsOf(values, both, rows.reshape(-1), latent.value_dim)
    return join_experts(adapted, config, NAMES)


_LATENT = LatentSpec(512, 64, 128, 128, 1536)
_LATENT_OF_GLM = LatentSpec(512, 64, 192, 256, 768)
_EXPERTS_OF_V3 = partial(experts_of_v3, (256, 8, 2048, 2.5), (8, 4))
_EXPERTS_OF_GLM = partial(experts_of_v3, (64, 4, 1536, 1.8), (1, 1))

DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", partial(_read, "deepseek_v2", _experts_of_v2, _LATENT, 2048, 0)
)
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", partial(_read, "deepseek_v3", _EXPERTS_OF_V3, _LATENT, 4096, 3)
)
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    partial(_read, "glm4_moe_lite", _EXPERTS_OF_GLM, _LATENT_OF_GLM, 202752, 1),
)
