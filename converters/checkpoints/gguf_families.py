"""Families of models as GGUF files have them: the keys that only they have, the names of their tensors, and
what llama.cpp's converter does to tensors before it writes them.

The values of a family's keys become those of the `config.json` that the model was made from, and its tensors
get the names that they have beside that, so that `converters/architectures` describes each family once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from ondevice.converters.architectures.adapting import norms_shifted, split_attention
from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import shown
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.base import SourceTensor, StoredTensor
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.converters.checkpoints.gguf_tensor import QuantizedTensor
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that rotary frequencies are divided by, for texts beyond the original context and within it."""
GEMMA_LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models of 27 billion parameters."""

WHOLE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Hugging Face's names of tensors outside the blocks, by those in files; `.weight` or `.bias` follows."""
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
"""The same of a block's tensors, where a family has no names of its own."""
_UNGATED = {"ffn_up": "mlp.gate_proj"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj"}
_FUSED_GATES = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA2_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


Values = Mapping[str, Any]


def _no_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    return {}


def _as_stored(tensors: Tensors, config: ModelConfig) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Family:
    """A family of models as GGUF files have it.

    Args:
        model_type: its name in `config.json`.
        interleaved: whether rows of queries and keys are stored in the order of llama.cpp's rotary
            embedding, pairs (2i, 2i + 1).
        partial: whether a part of each head may be all that turns.
        norm_key: the key of the norms' epsilon in `config.json`.
        bias_key: the key there that says whether queries, keys and values have biases; empty if none does.
        fixed: values that all its models have, and files don't say.
        blocks, wholes: names that differ from BLOCK_NAMES and WHOLE_NAMES.
        keys: the values of its own keys, given the metadata and the values so far.
        restore: undoes what was done to its tensors, but for the order of rows and the names.
        factors: tensors that `keys` reads.
    """

    model_type: str
    interleaved: bool = False
    partial: bool = False
    norm_key: str = "rms_norm_eps"
    bias_key: str = "attention_bias"
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    blocks: Mapping[str, str] = field(default_factory=dict)
    wholes: Mapping[str, str] = field(default_factory=dict)
    keys: Callable[[Metadata, Values], dict[str, Any]] = _no_keys
    restore: Callable[[Tensors, ModelConfig], Tensors] = _as_stored
    factors: frozenset[str] = frozenset()


def _gemma2_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """Files don't have the scale of scores: llama.cpp knows the largest model by its number of layers."""
    width = values["hidden_size"] // values["num_attention_heads"]
    largest = values["num_hidden_layers"] == GEMMA_LARGEST[values["model_type"]]
    window = metadata.integer("attention.sliding_window", 0)
    found: dict[str, Any] = {
        "query_pre_attn_scalar": width if largest else values["head_dim"],
        "sliding_window": window or None,
    }
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.has(cap):
            found[cap] = metadata.number(cap)
    return found


def _gemma3_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    found = _gemma2_keys(metadata, values)
    found["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10_000.0)
    found["sliding_window_pattern"] = metadata.integer("attention.sliding_window_pattern", 6)
    return found


def _gemma3n_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The share of gates below a cutoff is stored as the cutoff, in standard deviations."""
    found: dict[str, Any] = {
        "sliding_window": metadata.integer("attention.sliding_window"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": metadata.rows("per_layer_token_embd.weight"),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers"),
        "altup_num_inputs": metadata.integer("altup.num_inputs"),
        "altup_active_idx": metadata.integer("altup.active_idx", 0),
        "laurel_rank": metadata.rows("blk.0.laurel_l.weight"),
    }
    if (scales := metadata.array("activation_sparsity_scale")) is not None:
        normal = NormalDist()
        # Configs name shares of few digits.
        found["activation_sparsity_pattern"] = [round(normal.cdf(scale), 6) for scale in scales]
    if (local := metadata.array("attention.sliding_window_pattern")) is not None:
        found["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in local]
    if metadata.has("final_logit_softcapping"):
        found["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return found


def _phi3_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    context = values["max_position_embeddings"]
    original = metadata.integer("rope.scaling.original_context_length", context)
    magnitude = metadata.number("rope.scaling.attn_factor", 1.0)
    found: dict[str, Any] = {
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
    }
    if not {SHORT_FACTORS, LONG_FACTORS} & set(metadata.stored):
        if magnitude != 1.0:
            raise UnsupportedModelError(
                f"{metadata.header.file}: {metadata.prefix}rope.scaling.attn_factor is {magnitude}, without "
                f"longrope's factors, {SHORT_FACTORS}; only 1 can be converted there"
            )
        return found
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
    return {**found, "rope_scaling": scaling}


def _longrope_magnitude(context: int, original: int) -> float:
    """What longrope's cosines and sines are multiplied by unless a model says so."""
    if not 1 < original < context:
        return 1.0
    return math.sqrt(1.0 + math.log(context / original) / math.log(original))


def _granite_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    if not metadata.boolean("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}rope.scaling.finetuned is false: a Granite without "
            "rotary embedding, which can't be converted yet"
        )
    return {
        "attention_multiplier": metadata.number("attention.scale", values["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _stablelm_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """Older files say that blocks stand side by side where they don't; their norms tell."""
    metadata.boolean("use_parallel_residual", True)
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in metadata.stored,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in metadata.stored,
    }


def _falcon_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    two_norms, kv_heads = "blk.0.attn_norm_2.weight" in metadata.stored, values["num_key_value_heads"]
    found = {
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": values["intermediate_size"],
        "intermediate_size": None,
    }
    if kv_heads == 1 and not two_norms:
        return found
    norms = 2 if two_norms else 1
    return {**found, "new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}


def _nemotron_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    return {"mlp_bias": "blk.0.ffn_up.bias" in metadata.stored}


def _less_one(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Norms as a checkpoint stores them, less one.

    What is added again later gives the stored weights to the bit if these are float32 numbers plus one.
    """
    return norms_shifted(tensors, -1.0)


def _restored_falcon(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Where there are two norms, the first is the feed-forward's."""
    found = dict(split_attention(tensors, config))
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        for kind, norm in (("weight", name.norm), ("bias", name.norm_bias)):
            second = found.pop(f"model.layers.{layer}.attn_norm_2.{kind}", None)
            if second is not None and norm("attention_norm") in found:
                found[norm("feed_forward_norm")] = found[norm("attention_norm")]
                found[norm("attention_norm")] = second
    return found


def _flat_head_norms(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Norms of each head, which are stored as rows, one after the other."""
    found = dict(tensors)
    for layer in range(config.num_layers):
        for which in "qk":
            name = LayerNames(layer).head_norm(which)
            tensor = found.get(name)
            if isinstance(tensor, StoredTensor) and len(tensor.shape) == 2:
                found[name] = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1],))
    return found


def _restored_gemma3n(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Matrices of the copies of the residual, which are stored as one tensor, by themselves."""
    found = dict(tensors)
    for stem in ("model.altup_projections", "model.altup_unembed_projections"):
        stacked = found.pop(f"{stem}.weight", None)
        if stacked is not None:
            found |= _slices(stacked, stem, config.residual_copies - 1)
    for layer in range(config.num_layers):
        stem = f"model.layers.{layer}.altup.correct_output_scale"
        if (scale := found.pop(f"{stem}.weight", None)) is not None:
            found[stem] = scale
    return found


def _slices(tensor: SourceTensor, stem: str, count: int) -> dict[str, SourceTensor]:
    if not isinstance(tensor, StoredTensor | QuantizedTensor) or tensor.shape[:-2] != (count,):
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}; config.json asks for {count} matrices"
        )
    step = tensor.nbytes // count
    names = [f"{stem}.{i}.weight" for i in range(count)]
    return {
        name: replace(tensor, name=name, shape=tensor.shape[1:], offset=tensor.offset + i * step)
        for i, name in enumerate(names)
    }


_GEMMA = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3N_NAMES = _GEMMA2_NAMES | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
FAMILIES = {
    "llama": Family("llama", interleaved=True),
    "qwen2": Family("qwen2", bias_key=""),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", fixed=_GEMMA, restore=_less_one),
    "gemma2": Family("gemma2", fixed=_GEMMA, blocks=_GEMMA2_NAMES, keys=_gemma2_keys, restore=_less_one),
    "gemma3": Family("gemma3_text", fixed=_GEMMA, blocks=_GEMMA2_NAMES, keys=_gemma3_keys, restore=_less_one),
    "gemma3n": Family(
        "gemma3n_text",
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        blocks=_GEMMA3N_NAMES,
        wholes={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "altup_proj": "model.altup_projections",
            "altup_unembd_proj": "model.altup_unembed_projections",
        },
        keys=_gemma3n_keys,
        restore=_restored_gemma3n,
    ),
    "phi2": Family(
        "phi",
        partial=True,
        norm_key="layer_norm_eps",
        bias_key="",
        fixed={"hidden_act": "gelu_new"},
        blocks=_FUSED | _UNGATED,
        restore=split_attention,
    ),
    "phi3": Family(
        "phi3",
        partial=True,
        bias_key="",
        blocks=_FUSED | _FUSED_GATES,
        keys=_phi3_keys,
        restore=split_attention,
        factors=frozenset((LONG_FACTORS, SHORT_FACTORS)),
    ),
    "glm4": Family("glm4", partial=True, blocks=_FUSED | _FUSED_GATES, restore=split_attention),
    "smollm3": Family("smollm3", interleaved=True),
    "granite": Family("granite", interleaved=True, keys=_granite_keys),
    "olmo2": Family("olmo2"),
    "stablelm": Family(
        "stablelm",
        partial=True,
        norm_key="layer_norm_eps",
        bias_key="use_qkv_bias",
        keys=_stablelm_keys,
        restore=_flat_head_norms,
    ),
    "falcon": Family(
        "falcon",
        norm_key="layer_norm_epsilon",
        bias_key="",
        fixed={"activation": "gelu"},
        blocks=_FUSED | _UNGATED | {"attn_norm_2": "attn_norm_2"},
        keys=_falcon_keys,
        restore=_restored_falcon,
    ),
    "nemotron": Family(
        "nemotron",
        partial=True,
        norm_key="norm_eps",
        fixed={"hidden_act": "relu2"},
        blocks=_UNGATED,
        keys=_nemotron_keys,
        restore=_less_one,
    ),
}
"""By the value of `general.architecture`. A family joins with a line here when `converters/architectures`
reads its config.

Mistral's models say llama, and are marked by a sliding window where the file has one.
"""
