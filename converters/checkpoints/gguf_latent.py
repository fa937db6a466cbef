"""Models with latent attention in GGUF files: DeepSeek V2 and V3, and GLM-4.7-Flash, all as `deepseek2`.

llama.cpp's converter writes the matrix that computes keys and values from latents as two matrices, of which
the keys' is transposed; in files from before April 2025 it is one. Nothing distinguishes GLM-4.7-Flash from
DeepSeek V3, which has the same blocks.
"""

from __future__ import annotations

from typing import Any

from ondevice.converters.checkpoints.gguf_experts import (
    GATING,
    expert_blocks,
    glm4moe_keys,
    layers_ahead,
)
from ondevice.converters.checkpoints.gguf_file import GgufHeader
from ondevice.converters.checkpoints.gguf_gemma import Values
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

V2, V3 = "deepseek_v2", "deepseek_v3"
LATENT_NAMES = expert_blocks(V3) | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
"""Names of a block's tensors by those in GGUF files: in a checkpoint, or in MLX's folders."""
PUBLISHED_GROUPS = {(V2, 160): (8, 3), (V3, 256): (8, 4)}
"""Groups of experts and chosen groups of published models, by number of experts: DeepSeek V2 and V2.5, V3 and
R1. All others have one group: V2 Lite, Moonlight, Kimi K2, GLM-4.7-Flash."""
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def deepseek2_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The sizes of latents, yarn's factor of scores, and experts. How these are chosen distinguishes V2 from
    V3.
    """
    kind = V3 if _chosen_by_sigmoids(metadata) else V2
    keys = {"model_type": kind, **_latent(metadata, values), **_experts(metadata, values, kind)}
    if metadata.has(_LOG_MULTIPLIER):
        scaling = values["rope_scaling"]
        if scaling is None or scaling["rope_type"] != "yarn":
            raise UnsupportedModelError(
                f"{metadata.header.file}: {metadata.prefix}{_LOG_MULTIPLIER} is there without yarn, "
                "which alone has it"
            )
        # A tenth of the config's `mscale_all_dim`, of few digits, which `mscale` equals in all models.
        multiplier = round(10.0 * metadata.number(_LOG_MULTIPLIER), 5)
        keys["rope_scaling"] = {**scaling, "mscale": multiplier, "mscale_all_dim": multiplier}
    return keys


def _lacks_groups(header: GgufHeader) -> bool:
    """Whether a file doesn't mention groups of experts, like files from before October 2025."""
    return not any(f"deepseek2.expert_group_{it}" in header.metadata for it in ("count", "used_count"))


def latent_notes(header: GgufHeader, config: ModelConfig) -> tuple[str, ...]:
    """The notes for users on how experts are chosen, if the file doesn't say and published models were the
    guide.
    """
    experts = config.experts
    if experts is None or not _lacks_groups(header):
        return ()
    taken = f"{experts.chosen_groups} of {experts.groups} groups" if experts.groups > 1 else "one group"
    return (
        f"experts are chosen from {taken}, as in published models with {experts.count}: {header.file} has no "
        "expert_group_count",
    )


def _chosen_by_sigmoids(metadata: Metadata) -> bool:
    """Whether sigmoids choose experts: as the key says, or in files without the key, if there is a choice
    bias.
    """
    gating = metadata.integer("expert_gating_func", 0)
    if gating:
        return GATING.get(gating) == "sigmoid"
    return any(name.endswith("exp_probs_b.bias") for name in metadata.stored)


def _latent(metadata: Metadata, values: Values) -> dict[str, Any]:
    heads, stored = values["num_attention_heads"], values["num_key_value_heads"]
    if stored not in (1, heads):
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}attention.head_count_kv is {stored}; with latent "
            f"attention it is 1, or {heads} as there are heads"
        )
    rank, turning = metadata.integer("attention.kv_lora_rank"), metadata.integer("rope.dimension_count")
    if metadata.has("attention.key_length_mla"):
        for stored_key, width in (("key_length", rank + turning), ("value_length", rank)):
            metadata.reader.only(f"{metadata.prefix}attention.{stored_key}", width)
        key, value = (metadata.integer(f"attention.{it}_length_mla") for it in ("key", "value"))
    else:
        key, value = (metadata.integer(f"attention.{it}_length") for it in ("key", "value"))
    if not 0 < turning < key:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}rope.dimension_count is {turning}; of a key's {key} "
            "dimensions some must turn, and not all"
        )
    return {
        "num_key_value_heads": heads,
        "head_dim": turning,
        "kv_lora_rank": rank,
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": value,
    }


def _experts(metadata: Metadata, values: Values, kind: str) -> dict[str, Any]:
    if not metadata.integer("expert_count", 0):
        # Some converters write the keys of experts for models without.
        for key in ("expert_feed_forward_length", "expert_shared_count", "leading_dense_block_count"):
            metadata.integer(key, 0)
        layers = values["num_hidden_layers"] - layers_ahead(metadata, values)
        keys = {"num_hidden_layers": layers, "first_k_dense_replace": layers}
        return {**keys, "num_experts_per_tok": max(1, metadata.integer("expert_used_count", 1))}
    gating = "sigmoid" if kind == V3 else "softmax"
    keys = glm4moe_keys(metadata, values, gating)
    del keys["use_qk_norm"]
    if _lacks_groups(metadata.header):
        count, chosen = PUBLISHED_GROUPS.get((kind, keys["n_routed_experts"]), (1, 1))
        keys |= {"n_group": count, "topk_group": chosen}
    if kind == V2:
        keys["topk_method"] = "group_limited_greedy" if keys["n_group"] > 1 else "greedy"
    return keys
