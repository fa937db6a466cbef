"""Models with Mamba-2 mixers in GGUF files: their `config.json` values and their tensors.

Files contain decays, -exp(A_log), in place of a checkpoint's `A_log`, and store one number per head as a row.
Falcon-H1's multipliers are part of its weights. Nemotron-H's layers are single blocks, as in its checkpoints:
a block with key heads is attention, one with neurons is a feed-forward, and any other is a mixer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ondevice.converters.architectures.common import MAX_LAYERS, Tensors
from ondevice.converters.checkpoints.base import SourceTensor, StoredTensor
from ondevice.converters.checkpoints.gguf_delta import DecayLogs, heads_with_states
from ondevice.converters.checkpoints.gguf_experts import always_renormalised, expert_keys, restored_experts
from ondevice.converters.checkpoints.gguf_gemma import Values
from ondevice.converters.checkpoints.gguf_lfm2 import KEY_HEADS
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

NEURONS = "feed_forward_length"
PARTS = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_proj",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
MIXER_NAMES = {old: f"mamba.{new}" for old, new in PARTS.items()}
"""Names of a mixer's tensors in a checkpoint, by those in GGUF files."""
BLOCK_MIXER_NAMES = {
    **{old: f"mixer.{new}" for old, new in PARTS.items()},
    **{f"attn_{which}": f"mixer.{which}_proj" for which in "qkv"},
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    **{f"ffn_{which}": f"mixer.{which}_proj" for which in ("up", "down")},
    **{f"ffn_{which}_exps": f"mixer.experts.{which}_proj" for which in ("up", "down")},
    **{f"ffn_{which}_shexp": f"mixer.shared_experts.{which}_proj" for which in ("up", "down")},
}
"""The same for Nemotron-H's blocks."""
SUFFIXES = {
    ".dt_proj.bias": ".dt_bias",
    ".e_score_correction_bias.bias": ".e_score_correction_bias",
    ".experts.up_proj.weight": ".experts.up_proj",
    ".experts.down_proj.weight": ".experts.down_proj",
    # Falcon-H1's has no suffix in files.
    ".post_attention_layernorm": ".post_attention_layernorm.weight",
}
"""Suffixes of names that still differ from a checkpoint's, and their replacements."""


def granite_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The multipliers that every Granite model has."""
    return {
        "attention_multiplier": metadata.number("attention.scale", values["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def granitehybrid_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"
    heads, width, sizes = _mixer_keys(metadata)
    sizes = {
        **granite_keys(metadata, values),
        **{f"mamba_{key}": value for key, value in sizes.items()},
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_expand": heads * width // values["hidden_size"],
        "mamba_conv_bias": _has(metadata, ".ssm_conv1d.bias"),
        "attention_bias": _has(metadata, ".attn_q.bias"),
        "position_embedding_type": "rope" if metadata.boolean("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": metadata.integer(shared, values["intermediate_size"]),
    }
    key_heads = _of_layers(metadata, values, KEY_HEADS)
    sizes["num_key_value_heads"] = _one_number(metadata, KEY_HEADS, key_heads)
    sizes["layer_types"] = ["attention" if count else "mamba" for count in key_heads]
    if not metadata.integer("expert_count", 0):
        return {**sizes, "num_local_experts": 0}
    always_renormalised(metadata)
    return {**sizes, **expert_keys(metadata, "num_local_experts", values["intermediate_size"], shared)}


def nemotron_h_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    heads, width, sizes = _mixer_keys(metadata)
    key_heads, neurons = (_of_layers(metadata, values, key) for key in (KEY_HEADS, NEURONS))
    sparse = metadata.integer("expert_count", 0) > 0
    kinds = []
    for block, (count, inner) in enumerate(zip(key_heads, neurons, strict=True)):
        if count and inner:
            raise UnsupportedModelError(
                f"{metadata.header.file}: block {block} has heads of keys and neurons; in this family it has "
                "one of the two"
            )
        kind = "moe" if sparse else "mlp"
        kinds.append("attention" if count else kind if inner else "mamba")
    sizes = {
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "ssm_state_size": sizes["d_state"],
        "n_groups": sizes["n_groups"],
        "conv_kernel": sizes["d_conv"],
        "use_conv_bias": _has(metadata, ".ssm_conv1d.bias"),
        "layers_block_type": kinds,
        "num_key_value_heads": _one_number(metadata, KEY_HEADS, key_heads),
        "intermediate_size": _one_number(metadata, NEURONS, neurons),
        "layer_norm_epsilon": values["rms_norm_eps"],
        "rms_norm_eps": None,
        "num_nextn_predict_layers": metadata.integer("nextn_predict_layers", 0),
        "moe_latent_size": metadata.integer("moe_latent_size", 0) or None,
    }
    # Files may have the same number for norms of another form.
    metadata.reader.only(f"{metadata.prefix}attention.layer_norm_epsilon", values["rms_norm_eps"])
    return {**sizes, **_nemotron_experts(metadata)} if sparse else sizes


def _nemotron_experts(metadata: Metadata) -> dict[str, Any]:
    inner, shared, count = (
        f"expert_{it}" for it in ("feed_forward_length", "shared_feed_forward_length", "shared_count")
    )
    groups, chosen, scale = "expert_group_count", "expert_group_used_count", "expert_weights_scale"
    number = metadata.integer(groups, 0) or 1
    keys = expert_keys(
        metadata,
        "n_routed_experts",
        0,
        *(inner, shared, count, groups, chosen, scale),
        gating="sigmoid",
    )
    return {
        **keys,
        "moe_intermediate_size": metadata.integer(inner),
        "moe_shared_expert_intermediate_size": metadata.integer(shared),
        "n_shared_experts": metadata.integer(count, 1),
        "n_group": number,
        # Files with groups must say how many are chosen.
        "topk_group": metadata.integer(chosen, None if number > 1 else 0) or 1,
        "routed_scaling_factor": metadata.number(scale, 0.0) or 1.0,
        "norm_topk_prob": metadata.boolean("expert_weights_norm", True),
    }


def falcon_h1_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Falcon-H1. Files don't say where a norm is applied; it is after the gate, as llama.cpp has
    it.
    """
    heads, width, sizes = _mixer_keys(metadata)
    return {
        **{f"mamba_{key}": value for key, value in sizes.items()},
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_d_ssm": heads * width,
        "mamba_conv_bias": _has(metadata, ".ssm_conv1d.bias"),
        "mamba_rms_norm": _has(metadata, ".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def restored_mixers(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with values and shapes as in a checkpoint."""
    restored: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        for old, new in SUFFIXES.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
                break
        if name.endswith((".A_log", ".D", "norm.weight")) and isinstance(tensor, StoredTensor):
            count = 1
            for size in tensor.shape:
                count *= size
            tensor = replace(tensor, shape=(count,))
        restored[name] = DecayLogs(name, tensor) if name.endswith(".A_log") else tensor
    return restored


def restored_granite(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors of Granite, with experts split."""
    return restored_experts(restored_mixers(tensors, config), config)


def _mixer_keys(metadata: Metadata) -> tuple[int, int, dict[str, Any]]:
    """The number of a mixer's heads, the width of all heads, and the other sizes by the ends of
    their keys.
    """
    heads, inner = heads_with_states(metadata)
    sizes = {
        "n_groups": metadata.integer("ssm.group_count"),
        "d_state": metadata.integer("ssm.state_size"),
        "d_conv": metadata.integer("ssm.conv_kernel"),
    }
    return heads, inner // heads, sizes


def _of_layers(metadata: Metadata, values: Values, key: str) -> list[int]:
    """A number for each layer. A single number counts for all layers."""
    layers = values["num_hidden_layers"]
    if not 1 <= layers <= MAX_LAYERS:
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}block_count is {layers}; it must be from 1 to "
            f"{MAX_LAYERS}"
        )
    if not metadata.is_array(key):
        return [metadata.integer(key)] * layers
    numbers = [int(number) for number in metadata.array(key) or []]
    if len(numbers) != layers:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}{key} has {len(numbers)} values for {layers} layers"
        )
    return numbers


def _one_number(metadata: Metadata, key: str, numbers: Sequence[int]) -> int:
    """The number that all layers share, apart from layers without any; 1 if none has one.

    Raises UnsupportedModelError if the numbers differ.
    """
    distinct = sorted(set(numbers) - {0})
    if len(distinct) > 1:
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}{key} has {', '.join(map(str, distinct[:8]))}; layers "
            "must have one number, or 0"
        )
    return distinct[0] if distinct else 1


def _has(metadata: Metadata, ending: str) -> bool:
    """Whether the name of any tensor ends with `ending`."""
    return any(name.endswith(ending) for name in metadata.stored)
