"""How GGUF files describe model families: their keys, tensor names, and how llama.cpp's converter changes
tensors.

The values of a family's keys are converted to those of the `config.json` that the model was made from, and
its tensors get the names of that checkpoint, so that `converters/architectures` is the only description of
each family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ondevice.converters.architectures.adapting import norms_shifted, split_attention
from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import shown
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.base import StoredTensor
from ondevice.converters.checkpoints.gguf_aliases import (
    baichuan_keys,
    minicpm_keys,
    mistral3_keys,
    mistral3_notes,
    text_keys,
    text_notes,
)
from ondevice.converters.checkpoints.gguf_delta import (
    DELTA_NAMES,
    delta_expert_keys,
    delta_keys,
    restored_delta,
    restored_interleaved_delta,
)
from ondevice.converters.checkpoints.gguf_experts import (
    expert_blocks,
    gemma4_expert_keys,
    glm4moe_keys,
    gpt_oss_keys,
    granitemoe_keys,
    lfm2moe_keys,
    mixtral_keys,
    olmoe_keys,
    phimoe_keys,
    qwen2moe_keys,
    qwen3moe_keys,
    restored_experts,
    restored_gpt_oss,
)
from ondevice.converters.checkpoints.gguf_file import GgufHeader
from ondevice.converters.checkpoints.gguf_gemma import (
    ROPE_FACTORS,
    Values,
    gemma2_keys,
    gemma3_keys,
    gemma3n_keys,
    gemma4_keys,
    restored_gemma3n,
    restored_gemma4,
)
from ondevice.converters.checkpoints.gguf_latent import LATENT_NAMES, V3, deepseek2_keys, latent_notes
from ondevice.converters.checkpoints.gguf_lfm2 import (
    CONV_NAMES,
    KEY_HEADS,
    LAST_NORM,
    lfm2_keys,
    restored_lfm2,
)
from ondevice.converters.checkpoints.gguf_mamba2 import (
    BLOCK_MIXER_NAMES,
    MIXER_NAMES,
    NEURONS,
    falcon_h1_keys,
    granite_keys,
    granitehybrid_keys,
    nemotron_h_keys,
    restored_granite,
    restored_mixers,
)
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.converters.checkpoints.gguf_mimo2 import (
    MIMO2_NAMES,
    WINDOWS,
    mimo2_keys,
    mimo2_notes,
    restored_mimo2,
)
from ondevice.errors import UnsupportedModelError
from ondevice.model_config import ModelConfig

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Names of the tensors by which rotary frequencies are divided: beyond the original context, and within
it."""
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Hugging Face's names of tensors outside the blocks, by those in GGUF files, without `.weight` or
`.bias`."""
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "attention_output_layernorm",
    "post_ffw_norm": "feed_forward_output_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The same for a block's tensors, unless a family has names of its own."""
_UNGATED = {"ffn_up": "mlp.gate_proj"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj"}
_FUSED_GATES = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA2_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


Keys = Callable[[Metadata, Values], dict[str, Any]]
"""A function from the metadata and the values so far to a family's own `config.json` values."""


def _no_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    return {}


def _no_notes(header: GgufHeader, config: ModelConfig) -> tuple[str, ...]:
    return ()


def _as_stored(tensors: Tensors, config: ModelConfig) -> Tensors:
    return tensors


@dataclass(frozen=True)
class GgufFamily:
    """How GGUF files describe one family of models.

    Args:
        model_type: its name in `config.json`.
        interleaved: whether rows of queries and keys are stored in the order of llama.cpp's rotary embedding,
            pairs (2i, 2i + 1).
        partial: whether only a part of each head may be rotated.
        norm_key: the key of the norms' epsilon in `config.json`.
        bias_key: the key there that says whether queries, keys and values have biases; empty if none does.
        fixed: values that all its models have and that aren't in files.
        blocks, wholes: names that differ from BLOCK_NAMES and MODEL_NAMES; `{}` in both is an expert's
            number.
        keys: returns the values of keys that only this family has, given the metadata and the values so far.
        restore: undoes what llama.cpp's converter does to tensors, apart from the order of rows and the
            names.
        factors: tensors that `keys` reads.
        latent: whether `keys` reads the widths of heads, and how much of them is rotated.
        all_experts: whether no layer is dense, so that files need no number of neurons of a dense layer.
        varied: keys that may have a value for each layer, which `keys` reads too. For other keys the first
            value counts.
        notes: sentences for users on what a file doesn't say.
    """

    model_type: str
    interleaved: bool = False
    partial: bool = False
    norm_key: str = "rms_norm_eps"
    bias_key: str = "attention_bias"
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    blocks: Mapping[str, str] = field(default_factory=dict)
    wholes: Mapping[str, str] = field(default_factory=dict)
    keys: Keys = _no_keys
    restore: Callable[[Tensors, ModelConfig], Tensors] = _as_stored
    factors: frozenset[str] = frozenset()
    latent: bool = False
    all_experts: bool = False
    varied: frozenset[str] = frozenset()
    notes: Callable[[GgufHeader, ModelConfig], tuple[str, ...]] = _no_notes


def _phi3_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    context = values["max_position_embeddings"]
    original = metadata.integer("rope.scaling.original_context_length", context)
    magnitude = metadata.number("rope.scaling.attn_factor", 1.0)
    keys: dict[str, Any] = {
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
    }
    if not {SHORT_FACTORS, LONG_FACTORS} & set(metadata.stored):
        if magnitude != 1.0:
            raise UnsupportedModelError(
                f"{metadata.header.file}: {metadata.prefix}rope.scaling.attn_factor is {magnitude}, without "
                f"longrope's factors, {SHORT_FACTORS}; only 1 can be converted there"
            )
        return keys
    named = values["rope_scaling"]
    if named is not None and named["rope_type"] != "longrope":
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}rope.scaling is {shown(named)} beside longrope's "
            f"factors, {SHORT_FACTORS}; only one of the two can hold"
        )
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": metadata.vector(SHORT_FACTORS),
        "long_factor": metadata.vector(LONG_FACTORS),
    }
    usual = _longrope_magnitude(context, original)
    if metadata.has("rope.scaling.attn_factor") and np.float32(magnitude) != np.float32(usual):
        scaling["attention_factor"] = magnitude
    return {**keys, "rope_scaling": scaling}


def _longrope_magnitude(context: int, original: int) -> float:
    """Longrope's factor of cosines and sines, for a model that doesn't name one."""
    if not 1 < original < context:
        return 1.0
    return math.sqrt(1.0 + math.log(context / original) / math.log(original))


def _granite_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    if not metadata.boolean("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}rope.scaling.finetuned is false: a Granite without "
            "rotary embedding, which can't be converted yet"
        )
    return granite_keys(metadata, values)


def _stablelm_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of StableLM.

    Older files wrongly say that blocks are parallel; the norms tell whether they are.
    """
    metadata.boolean("use_parallel_residual", True)
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in metadata.stored,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in metadata.stored,
    }


def _falcon_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    two_norms, kv_heads = "blk.0.attn_norm_2.weight" in metadata.stored, values["num_key_value_heads"]
    keys = {
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": values["intermediate_size"],
        "intermediate_size": None,
    }
    if kv_heads == 1 and not two_norms:
        return keys
    norms = 2 if two_norms else 1
    return {**keys, "new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}


def _nemotron_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    return {"mlp_bias": "blk.0.ffn_up.bias" in metadata.stored}


def _less_one(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with norms minus one, as a checkpoint stores them.

    Adding one again later gives exactly the stored weights if these are float32 numbers plus one.
    """
    return norms_shifted(tensors, -1.0)


def _restored_falcon(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors of Falcon. If a layer has two norms, the first is the feed-forward's."""
    restored = dict(split_attention(tensors, config))
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        for kind, norm in (("weight", name.norm), ("bias", name.norm_bias)):
            second = restored.pop(f"model.layers.{layer}.attn_norm_2.{kind}", None)
            if second is not None and norm("attention_norm") in restored:
                restored[norm("feed_forward_norm")] = restored[norm("attention_norm")]
                restored[norm("attention_norm")] = second
    return restored


def _flat_head_norms(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with the norms of all heads flattened to one vector."""
    restored = dict(tensors)
    for layer in range(config.num_layers):
        for which in "qk":
            name = LayerNames(layer).head_norm(which)
            tensor = restored.get(name)
            if isinstance(tensor, StoredTensor) and len(tensor.shape) == 2:
                restored[name] = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1],))
    return restored


def _with_experts(model_type: str, keys: Keys, **options: Any) -> GgufFamily:
    blocks = expert_blocks(model_type) | options.pop("blocks", {})
    restore = options.pop("restore", restored_experts)
    return GgufFamily(model_type, blocks=blocks, keys=keys, restore=restore, **options)


def _joint(*parts: Keys) -> Keys:
    """A `Keys` function that merges the values of all `parts`."""

    def keys(metadata: Metadata, values: Values) -> dict[str, Any]:
        return {key: value for part in parts for key, value in part(metadata, values).items()}

    return keys


_GEMMA = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
_PER_LAYER_NAMES = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_PER_LAYER_WHOLES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA4_NAMES = expert_blocks("gemma4_text") | {
    "layer_output_scale": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA3N_NAMES = (
    _GEMMA2_NAMES
    | _PER_LAYER_NAMES
    | {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
)
_NEMOTRON_H = GgufFamily(
    "nemotron_h",
    bias_key="",
    fixed={},
    blocks=BLOCK_MIXER_NAMES,
    keys=nemotron_h_keys,
    restore=restored_mixers,
    varied=frozenset((KEY_HEADS, NEURONS)),
)
_LLAMA = GgufFamily("llama", interleaved=True)
_LLAMA_IN_HALVES = GgufFamily("llama")
_LIKE_OTHERS = {
    **dict.fromkeys(("internlm2", "xverse", "ernie4_5"), _LLAMA),
    **dict.fromkeys(("exaone", "pangu-embedded"), _LLAMA_IN_HALVES),
    "baichuan": replace(_LLAMA, keys=baichuan_keys),
    "mistral3": GgufFamily(
        "mistral", interleaved=True, bias_key="", keys=mistral3_keys, notes=mistral3_notes
    ),
    "minicpm": GgufFamily("granite", interleaved=True, keys=minicpm_keys),
    "seed_oss": GgufFamily("qwen2", bias_key="", blocks={"post_attention_norm": "post_attention_layernorm"}),
    "qwen2vl": GgufFamily("qwen2", bias_key="", keys=text_keys, notes=text_notes),
    "qwen3vl": GgufFamily("qwen3", keys=text_keys, notes=text_notes),
    "qwen3vlmoe": _with_experts("qwen3_moe", _joint(qwen3moe_keys, text_keys), notes=text_notes),
}
"""Architectures that compute what a family of another name computes."""
GGUF_FAMILIES = {
    **_LIKE_OTHERS,
    "llama": _LLAMA,
    "qwen2": GgufFamily("qwen2", bias_key=""),
    "qwen3": GgufFamily("qwen3"),
    "gemma": GgufFamily("gemma", fixed=_GEMMA, restore=_less_one),
    "gemma2": GgufFamily("gemma2", fixed=_GEMMA, blocks=_GEMMA2_NAMES, keys=gemma2_keys, restore=_less_one),
    "gemma3": GgufFamily(
        "gemma3_text", fixed=_GEMMA, blocks=_GEMMA2_NAMES, keys=gemma3_keys, restore=_less_one
    ),
    "gemma3n": GgufFamily(
        "gemma3n_text",
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        blocks=_GEMMA3N_NAMES,
        wholes=_PER_LAYER_WHOLES
        | {
            "altup_proj": "model.altup_projections",
            "altup_unembd_proj": "model.altup_unembed_projections",
        },
        keys=gemma3n_keys,
        restore=restored_gemma3n,
        varied=frozenset(("feed_forward_length",)),
    ),
    "gemma4": GgufFamily(
        "gemma4_text",
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        blocks=_GEMMA2_NAMES | _PER_LAYER_NAMES | _GEMMA4_NAMES,
        wholes=_PER_LAYER_WHOLES,
        keys=_joint(gemma4_keys, gemma4_expert_keys),
        restore=lambda tensors, config: restored_experts(restored_gemma4(tensors, config), config),
        factors=frozenset((ROPE_FACTORS,)),
        varied=frozenset(("attention.head_count_kv", "feed_forward_length")),
    ),
    "phi2": GgufFamily(
        "phi",
        partial=True,
        norm_key="layer_norm_eps",
        bias_key="",
        fixed={"hidden_act": "gelu_new"},
        blocks=_FUSED | _UNGATED,
        restore=split_attention,
    ),
    "phi3": GgufFamily(
        "phi3",
        partial=True,
        bias_key="",
        blocks=_FUSED | _FUSED_GATES,
        keys=_phi3_keys,
        restore=split_attention,
        factors=frozenset((LONG_FACTORS, SHORT_FACTORS)),
    ),
    "glm4": GgufFamily("glm4", partial=True, blocks=_FUSED | _FUSED_GATES, restore=split_attention),
    "smollm3": GgufFamily("smollm3", interleaved=True),
    "granite": GgufFamily("granite", interleaved=True, keys=_granite_keys),
    "olmo2": GgufFamily("olmo2"),
    "stablelm": GgufFamily(
        "stablelm",
        partial=True,
        norm_key="layer_norm_eps",
        bias_key="use_qkv_bias",
        keys=_stablelm_keys,
        restore=_flat_head_norms,
    ),
    "falcon": GgufFamily(
        "falcon",
        norm_key="layer_norm_epsilon",
        bias_key="",
        fixed={"activation": "gelu"},
        blocks=_FUSED | _UNGATED | {"attn_norm_2": "attn_norm_2"},
        keys=_falcon_keys,
        restore=_restored_falcon,
    ),
    "nemotron": GgufFamily(
        "nemotron",
        partial=True,
        norm_key="norm_eps",
        fixed={"hidden_act": "relu2"},
        blocks=_UNGATED,
        keys=_nemotron_keys,
        restore=_less_one,
    ),
    "qwen3moe": _with_experts("qwen3_moe", qwen3moe_keys),
    "qwen2moe": _with_experts("qwen2_moe", qwen2moe_keys, bias_key="qkv_bias"),
    "olmoe": _with_experts("olmoe", olmoe_keys),
    "granitemoe": _with_experts("granitemoe", _joint(_granite_keys, granitemoe_keys), interleaved=True),
    "phimoe": _with_experts(
        "phimoe",
        _joint(_phi3_keys, phimoe_keys),
        factors=frozenset((LONG_FACTORS, SHORT_FACTORS)),
    ),
    "glm4moe": _with_experts(
        "glm4_moe",
        glm4moe_keys,
        partial=True,
        blocks={"post_attention_norm": "post_attention_layernorm"},
    ),
    "deepseek2": _with_experts(
        V3, deepseek2_keys, blocks=LATENT_NAMES, bias_key="", latent=True, notes=latent_notes
    ),
    "qwen3next": _with_experts(
        "qwen3_next", delta_expert_keys, partial=True, bias_key="", blocks=DELTA_NAMES, restore=restored_delta
    ),
    "qwen35": GgufFamily(
        "qwen3_5_text",
        partial=True,
        bias_key="",
        blocks=DELTA_NAMES,
        keys=delta_keys,
        restore=restored_interleaved_delta,
    ),
    "qwen35moe": _with_experts(
        "qwen3_5_moe_text",
        delta_expert_keys,
        partial=True,
        bias_key="",
        blocks=DELTA_NAMES,
        restore=restored_interleaved_delta,
        all_experts=True,
    ),
    "lfm2": GgufFamily(
        "lfm2",
        bias_key="",
        fixed={},
        blocks=CONV_NAMES,
        wholes=LAST_NORM,
        keys=lfm2_keys,
        restore=restored_lfm2,
        varied=frozenset((KEY_HEADS,)),
    ),
    "lfm2moe": _with_experts(
        "lfm2_moe",
        lfm2moe_keys,
        bias_key="",
        fixed={},
        blocks=CONV_NAMES,
        wholes=LAST_NORM,
        restore=lambda tensors, config: restored_experts(restored_lfm2(tensors, config), config),
        varied=frozenset((KEY_HEADS,)),
    ),
    "granitehybrid": _with_experts(
        "granitemoehybrid",
        granitehybrid_keys,
        interleaved=True,
        bias_key="",
        blocks=MIXER_NAMES,
        restore=restored_granite,
        varied=frozenset((KEY_HEADS,)),
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "falcon-h1": GgufFamily(
        "falcon_h1", bias_key="", blocks=MIXER_NAMES, keys=falcon_h1_keys, restore=restored_mixers
    ),
    "mimo2": _with_experts(
        "mimo_v2_flash",
        mimo2_keys,
        blocks=MIMO2_NAMES,
        restore=restored_mimo2,
        latent=True,
        varied=frozenset((KEY_HEADS, WINDOWS)),
        notes=mimo2_notes,
    ),
    "gpt-oss": _with_experts(
        "gpt_oss",
        gpt_oss_keys,
        blocks={"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        restore=restored_gpt_oss,
    ),
}
"""Families by value of `general.architecture`.

Mistral's models say llama, and are marked by a sliding window where the file has one; Mixtral's too, which
have experts."""
MIXTRAL = _with_experts("mixtral", mixtral_keys, interleaved=True, bias_key="")
