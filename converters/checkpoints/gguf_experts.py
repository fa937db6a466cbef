"""Mixtures of experts in GGUF files: their `config.json` values and the names of their tensors.

A layer's experts are stacked in them, (experts, rows, columns), in one tensor each for gates, ups and downs,
or in one for gates above ups and one for downs. Files from before April 2024 store each expert separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import SAME_REPOSITORY
from ondevice.converters.architectures.experts import MIXTRAL_NAMES, QWEN_NAMES, ExpertNames, unstacked
from ondevice.converters.architectures.gemma4 import EXPERTS as GEMMA4_NAMES
from ondevice.converters.architectures.glm4_moe import NAMES as GLM4_NAMES
from ondevice.converters.architectures.gpt_oss import NAMES as GPT_OSS_NAMES
from ondevice.converters.architectures.granite import EXPERTS as GRANITE_NAMES
from ondevice.converters.architectures.granite_hybrid import NAMES as GRANITE_HYBRID_NAMES
from ondevice.converters.architectures.lfm2_moe import NAMES as LFM2_NAMES
from ondevice.converters.architectures.nemotron_h import NAMES as NEMOTRON_H_NAMES
from ondevice.converters.architectures.qwen2_moe import NAMES as QWEN2_NAMES
from ondevice.converters.checkpoints.base import StoredTensor
from ondevice.converters.checkpoints.gguf_gemma import Values
from ondevice.converters.checkpoints.gguf_lfm2 import conv_keys
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

GATING = {1: "softmax", 2: "sigmoid"}
"""Scoring functions by value of `expert_gating_func`; 0, or no value, means the family's."""
EXPERT_NAMES: Mapping[str, ExpertNames] = {
    "qwen3_moe": QWEN_NAMES,
    "olmoe": QWEN_NAMES,
    "qwen2_moe": QWEN2_NAMES,
    "mixtral": MIXTRAL_NAMES,
    "granitemoe": GRANITE_NAMES,
    "phimoe": MIXTRAL_NAMES,
    "glm4_moe": GLM4_NAMES,
    "deepseek_v2": GLM4_NAMES,
    "deepseek_v3": GLM4_NAMES,
    "qwen3_next": QWEN2_NAMES,
    "qwen3_5_moe_text": QWEN2_NAMES,
    # What stands beside its experts is its dense feed-forward, under the usual names.
    "gemma4_text": replace(GEMMA4_NAMES, shared=""),
    "gpt_oss": GPT_OSS_NAMES,
    "lfm2_moe": LFM2_NAMES,
    "granitemoehybrid": GRANITE_HYBRID_NAMES,
    "nemotron_h": NEMOTRON_H_NAMES,
    "mimo_v2_flash": GLM4_NAMES,
}
"""Names of expert tensors in a checkpoint, by `model_type`, for families that GGUF files can hold."""
_NEUTRAL: Mapping[str, float] = {
    "expert_weights_scale": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "leading_dense_block_count": 0,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
}
"""Keys of single families, and the values with which they change nothing."""
_MATRICES = ("gate", "up", "down")
AHEAD = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")
"""Tensors of layers that predict tokens ahead; they are left out."""


def expert_blocks(model_type: str) -> dict[str, str]:
    """Names of a block's expert tensors in a checkpoint, by those in GGUF files, without `.weight`.

    Stacked tensors have the names of an expert's tensors without the expert's number. If there is a number,
    it is `{}` in both.
    """
    names = EXPERT_NAMES[model_type]
    blocks = {"ffn_gate_up_exps": _gates_and_ups(names), "ffn_gate_inp": names.router}
    for which in _MATRICES:
        blocks |= {f"ffn_{which}_exps": names.merged(which), f"ffn_{which}.{{}}": getattr(names, which)}
    if names.shared:
        blocks |= {f"ffn_{which}_shexp": f"{names.shared}{which}_proj.weight" for which in _MATRICES}
    if names.shared_gate:
        blocks["ffn_gate_inp_shexp"] = names.shared_gate
    blocks = {old: new.removesuffix(".weight") for old, new in blocks.items()}
    if names.choice_bias:
        blocks["exp_probs_b"] = names.choice_bias
        blocks |= {f"nextn.{name}": f"nextn.{name}" for name in AHEAD}
    return blocks


def _gates_and_ups(names: ExpertNames) -> str:
    return names.merged("gate").removesuffix(".weight") + "_and_up.weight"


def restored_experts(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with each expert's matrices split from their stack and the shared expert's gate as a
    one-row matrix.

    Raises CheckpointError for experts that are missing, or have other shapes.
    """
    names = EXPERT_NAMES[config.architecture]
    _check_merged(tensors, config, _gates_and_ups(names), "ffn_gate_up_exps")
    tensors = unstacked(tensors, config, _gates_and_ups(names), names.of("gate", "up"))
    for which in _MATRICES:
        _check_there(tensors, config, which)
        _check_merged(tensors, config, names.merged(which), f"ffn_{which}_exps")
        tensors = unstacked(tensors, config, names.merged(which), names.of(which))
        tensors = _biases_apart(tensors, config, getattr(names, which).removesuffix("weight") + "bias")
    restored = dict(tensors)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        if (
            names.choice_bias
            and (bias := restored.pop(f"{prefix}{names.choice_bias}.bias", None)) is not None
        ):
            restored[prefix + names.choice_bias] = bias
        gate = restored.get(prefix + names.shared_gate)
        if names.shared_gate and isinstance(gate, StoredTensor) and len(gate.shape) == 1:
            restored[gate.name] = replace(gate, shape=(1, *gate.shape))
    return restored


def restored_gpt_oss(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors of gpt-oss, with experts split and sinks renamed as in a checkpoint."""
    restored = dict(restored_experts(tensors, config))
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}.self_attn.sinks"
        if (sinks := restored.pop(f"{name}.weight", None)) is not None:
            restored[name] = sinks
    return restored


def _biases_apart(tensors: Tensors, config: ModelConfig, name: str) -> Tensors:
    """The tensors, with each layer's stacked biases, (experts, rows), split. `{}` in `name` is an expert's
    number.
    """
    restored = dict(tensors)
    for layer, spec in enumerate(config.layers):
        prefix = f"model.layers.{layer}."
        stack = restored.get(prefix + name.replace(".{}", ""))
        if spec.experts is None or not isinstance(stack, StoredTensor):
            continue
        del restored[stack.name]
        if len(stack.shape) != 2 or stack.shape[0] != spec.experts.count:
            raise CheckpointError(
                f"{stack.name} has shape {list(stack.shape)}; config.json asks for a row for each of "
                f"{spec.experts.count} experts; {SAME_REPOSITORY}"
            )
        step = stack.nbytes // stack.shape[0]
        for expert in range(stack.shape[0]):
            new, offset = prefix + name.format(expert), stack.offset + expert * step
            restored[new] = replace(stack, name=new, shape=stack.shape[1:], offset=offset)
    return restored


def _check_there(tensors: Tensors, config: ModelConfig, which: str) -> None:
    """Check that each layer has its experts' `gate`, `up` or `down`, stacked or separately. Raises
    CheckpointError if not.
    """
    names = EXPERT_NAMES[config.architecture]
    for layer, spec in enumerate(config.layers):
        known = (names.merged(which), *names.of(which)(0))
        if spec.experts is not None and not any(f"model.layers.{layer}.{it}" in tensors for it in known):
            raise CheckpointError(
                f"blk.{layer}.ffn_{which}_exps.weight, which config.json asks for, is missing; is the "
                "download complete?"
            )


def _check_merged(tensors: Tensors, config: ModelConfig, merged: str, stored: str) -> None:
    """Check the shape of a layer's stack `merged`, whose name in files is `stored`. Raises CheckpointError if
    it is wrong.
    """
    for layer, spec in enumerate(config.layers):
        stack = tensors.get(f"model.layers.{layer}.{merged}")
        if spec.experts is None or stack is None:
            continue
        neurons, hidden = spec.experts.neurons, config.hidden_size
        sizes = {"ffn_gate_up_exps": (2 * neurons, hidden), "ffn_down_exps": (hidden, neurons)}
        wanted = (spec.experts.count, *sizes.get(stored, (neurons, hidden)))
        if stack.shape != wanted:
            raise CheckpointError(
                f"blk.{layer}.{stored}.weight has shape {list(stack.shape)}; config.json asks for "
                f"{list(wanted)}; {SAME_REPOSITORY}"
            )


def expert_keys(
    metadata: Metadata, count: str, neurons: int, *read_keys: str, gating: str = "softmax"
) -> Values:
    """The number of experts, under the key `count`, and of chosen ones, as `config.json` values.

    neurons: number of neurons of an expert, if the family has no key for it. read_keys: keys that the family
        reads elsewhere.
    gating: the family's gating function.

    Raises UnsupportedModelError for another gating function, and for features that only other families have.
    """
    where = f"{metadata.header.file}: {metadata.prefix}"
    number = metadata.integer("expert_gating_func", 0)
    if number and GATING.get(number) != gating:
        known = next(key for key, name in GATING.items() if name == gating)
        raise UnsupportedModelError(
            f"{where}expert_gating_func is {number}; only {known}, {gating}, can be converted in this family"
        )
    for key, only in {**_NEUTRAL, "expert_feed_forward_length": neurons}.items():
        # Zero stands for none.
        if key not in read_keys and metadata.has(key) and metadata.number(key) not in (0, only):
            raise UnsupportedModelError(
                f"{where}{key} is {metadata.number(key):g}; only {only} can be converted in this family"
            )
    return {
        count: metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def always_renormalised(metadata: Metadata) -> None:
    if not metadata.boolean("expert_weights_norm", True):
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}expert_weights_norm is false; only weights divided by "
            "their sum can be converted in this family"
        )


def olmoe_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    return {
        **expert_keys(metadata, "num_experts", values["intermediate_size"]),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
    }


def qwen3moe_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Qwen3-MoE.

    Files don't say whether weights are divided by their sum, so they are, as in all published models.
    """
    return {
        **expert_keys(metadata, "num_experts", 0, "expert_feed_forward_length"),
        "moe_intermediate_size": _neurons(metadata, values),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", True),
    }


def qwen2moe_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    read_keys = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    return {
        **expert_keys(metadata, "num_experts", 0, *read_keys),
        "moe_intermediate_size": _neurons(metadata, values),
        "shared_expert_intermediate_size": metadata.integer(read_keys[1], values["intermediate_size"]),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
    }


def _neurons(metadata: Metadata, values: Values) -> int:
    """The number of neurons of an expert.

    Older files don't say; then a token's experts together have as many neurons as a dense layer.
    """
    used = max(1, metadata.integer("expert_used_count"))
    return metadata.integer("expert_feed_forward_length", values["intermediate_size"] // used)


def mixtral_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    always_renormalised(metadata)
    window = metadata.integer("attention.sliding_window", 0)
    return {
        **expert_keys(metadata, "num_local_experts", values["intermediate_size"]),
        "sliding_window": window or None,
    }


def granitemoe_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Granite-MoE: those of Granite, and of experts."""
    always_renormalised(metadata)
    return {**expert_keys(metadata, "num_local_experts", values["intermediate_size"])}


def phimoe_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Phi-3.5-MoE: those of Phi-3, and of experts.

    Files don't have the sparsemixer's jitter, which is the same in all models.
    """
    always_renormalised(metadata)
    return {
        **expert_keys(metadata, "num_local_experts", values["intermediate_size"]),
        "lm_head_bias": "output.bias" in metadata.stored,
    }


def gemma4_expert_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Gemma 4's experts; none for a model without experts."""
    if not metadata.integer("expert_count", 0) and not metadata.integer("expert_used_count", 0):
        return {}
    always_renormalised(metadata)
    width_key = "expert_feed_forward_length"
    keys = expert_keys(metadata, "num_experts", 0, width_key)
    return {
        "enable_moe_block": True,
        "num_experts": keys["num_experts"],
        "top_k_experts": keys["num_experts_per_tok"],
        "moe_intermediate_size": metadata.integer(width_key),
    }


def gpt_oss_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of gpt-oss.

    Files don't have the activation's constants, which are the same in all models. yarn's range isn't widened
    to complete pairs.
    """
    scaling = values["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}
    return {
        **expert_keys(metadata, "num_local_experts", 0, "expert_feed_forward_length"),
        "intermediate_size": metadata.integer("expert_feed_forward_length", values["intermediate_size"]),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "rope_scaling": scaling,
    }


def lfm2moe_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of LFM2-MoE.

    Files don't say whether weights are divided by their sum, so they are, as in all published models.
    """
    read_keys = ("expert_feed_forward_length", "leading_dense_block_count", "expert_weights_scale")
    return {
        **conv_keys(metadata, values),
        **expert_keys(metadata, "num_experts", 0, *read_keys, gating="sigmoid"),
        "moe_intermediate_size": metadata.integer(read_keys[0]),
        "num_dense_layers": metadata.integer(read_keys[1], 0),
        "routed_scaling_factor": metadata.number(read_keys[2], 0.0) or 1.0,
        "norm_topk_prob": metadata.boolean("expert_weights_norm", True),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in metadata.stored),
    }


def layers_ahead(metadata: Metadata, values: Values) -> int:
    """How many of the last layers predict further tokens. Raises CheckpointError if all of them do."""
    ahead = metadata.integer("nextn_predict_layers", 0)
    if not 0 <= ahead < values["num_hidden_layers"]:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}nextn_predict_layers is {ahead} of "
            f"{values['num_hidden_layers']} layers; one layer at least must be left"
        )
    return ahead


def glm4moe_keys(metadata: Metadata, values: Values, gating: str = "sigmoid") -> dict[str, Any]:
    ahead = layers_ahead(metadata, values)
    read_keys = (*_NEUTRAL, "expert_feed_forward_length")
    groups = metadata.integer("expert_group_count", 0) or 1
    # Files with groups must say how many are chosen.
    chosen = metadata.integer("expert_group_used_count", None if groups > 1 else 0)
    return {
        **expert_keys(metadata, "n_routed_experts", 0, *read_keys, gating=gating),
        "num_hidden_layers": values["num_hidden_layers"] - ahead,
        "num_nextn_predict_layers": ahead,
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": _shared(metadata),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": groups,
        "topk_group": chosen if groups > 1 else chosen or 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.stored,
    }


def _shared(metadata: Metadata) -> int:
    """The number of shared experts, each of which is as large as the other experts."""
    count, neurons = (
        metadata.integer("expert_shared_count", 0),
        metadata.integer("expert_feed_forward_length"),
    )
    key = "expert_shared_feed_forward_length"
    together = metadata.integer(key, 0) or count * neurons
    if together != count * neurons:
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}{key} is {together}; {count} shared experts of "
            f"{neurons} neurons can be converted"
        )
    return count
