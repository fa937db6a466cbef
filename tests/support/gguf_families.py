"""GGUF files of random models that `transformers` saved, written as llama.cpp's converter writes
them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.gguf_hybrids import (
    add_delta,
    add_latent,
    add_mixers,
    mixer_sizes,
    moved_delta,
    moved_latent,
    moved_mixers,
    single_blocks,
)
from tests.support.gguf_models import permuted

ARCHITECTURES = {
    "phi": "phi2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "mimo_v2_flash": "mimo2",
}
"""Names of families in GGUF files, where they differ from `model_type`."""
MIXERS = ("granitemoehybrid", "nemotron_h", "falcon_h1")
"""Families with Mamba-2 mixers."""
PLAIN = ("altup_correct_coef", "altup_predict_coef", "ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
"""Matrices that are stored as float32."""
_STACKED = {
    "altup_projections": "model.altup_projections",
    "altup_unembed_projections": "model.altup_unembed_projections",
    "q_layernorm": "model.layers.{}.self_attn.q_layernorm",
    "k_layernorm": "model.layers.{}.self_attn.k_layernorm",
}
_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""Names in files of what Gemma 4's routers scale, which the package doesn't know."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MERGED = re.compile(r"(blk\.\d+\.ffn_)(\w+)_exps\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


Arrangement = Literal["as converted", "three", "two", "single"]


def saying(key: str, value: Any) -> Callable[[Any], None]:
    """A change of `write_family` that gives a key of the family's another value."""

    def change(writer: Any) -> None:
        name = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(name, None)
        add = {bool: writer.add_bool, int: writer.add_uint64, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](name, value)

    return change


def write_family(
    path: Path,
    folder: Path,
    kind: str = "F16",
    change: Callable[[Any], None] = lambda writer: None,
    experts: Arrangement = "as converted",
    whole: bool = False,
    architecture: str = "",
    in_pairs: bool = False,
) -> None:
    """Write the checkpoint `folder` as a GGUF file.

    Args:
        path: the new file.
        folder: a checkpoint.
        kind: the type of its matrices.
        change: adds metadata.
        experts: three tensors a layer, two with gates above ups, or a tensor for each matrix of an expert.
        whole: with the fused projections of delta rules and of latents in one, as older files have them.
        architecture: the name that the file says; the family's where it is empty.
        in_pairs: whether rows of queries and keys turn in pairs of neighbours, where that isn't the family's
            own way.
    """
    gguf = pytest.importorskip("gguf")
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    if name == "nemotron_h":
        config = single_blocks(config)
        name = "nemotron_h_moe" if "n_routed_experts" in config else name
    name = architecture or name
    writer = gguf.GGUFWriter(path, name)
    add_config(writer, config)
    change(writer)
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    quant = gguf.GGMLQuantizationType[kind]
    tensors = {}
    for old, values in _moved(config, load_file(folder / "model.safetensors"), whole).items():
        for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if in_pairs and f"self_attn.{which}_proj." in old:
                values = permuted(values, config[heads])
        layer = _LAYER.fullmatch(old)
        new = names.get_name(old, try_suffixes=(".weight", ".bias"))
        new = f"blk.{layer[1]}.{_SCALES[layer[2]]}" if layer and layer[2] in _SCALES else new
        assert new is not None, old
        tensors[new] = values
    for new, values in _arranged(tensors, experts).items():
        block = gguf.GGML_QUANT_SIZES[quant][0]
        is_plain = (
            values.ndim == 1
            or new.endswith(("bias", "ssm_a", "ssm_d"))
            or "norm" in new
            or any(part in new for part in PLAIN)
        )
        own = gguf.GGMLQuantizationType.F32 if is_plain or values.shape[-1] % block else quant
        writer.add_tensor(new, gguf.quants.quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    for tensor, key in (("rope_factors_long", "long_factor"), ("rope_factors_short", "short_factor")):
        if factors := config.get("rope_parameters", {}).get(key):
            writer.add_tensor(f"{tensor}.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arranged(tensors: Mapping[str, np.ndarray], experts: Arrangement) -> dict[str, np.ndarray]:
    """The tensors of a file, with merged experts in another arrangement."""
    found = dict(tensors)
    if experts == "as converted":
        return found
    for name in [name for name in tensors if name.endswith("ffn_gate_up_exps.weight")]:
        for which, part in zip(("gate", "up"), np.split(found.pop(name), 2, axis=1), strict=True):
            found[name.replace("gate_up", which)] = part
    merged = {name: match for name in found if (match := _MERGED.fullmatch(name))}
    for name, match in merged.items():
        if experts == "single":
            parts = enumerate(found.pop(name))
            found |= {f"{match[1]}{match[2]}.{expert}.weight": part for expert, part in parts}
        elif experts == "two" and match[2] == "up":
            gates = found.pop(f"{match[1]}gate_exps.weight")
            found[f"{match[1]}gate_up_exps.weight"] = np.concatenate([gates, found.pop(name)], axis=1)
    return found


def _moved(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], whole: bool
) -> dict[str, np.ndarray]:
    """The tensors with rows and values as the converter changes them, some of them stacked."""
    family = config["model_type"]
    if "linear_num_key_heads" in config:
        tensors = moved_delta(config, tensors, whole)
    if "kv_lora_rank" in config and not whole:
        tensors = moved_latent(config, tensors)
    if family in MIXERS:
        tensors = moved_mixers(config, tensors)
    moved: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        parts = name.split(".")
        module = next((part for part in parts if part in _STACKED), None)
        if module is not None and parts[-2].isdigit():
            stem = _STACKED[module].format(parts[2])
            stacks.setdefault(f"{stem}.weight", {})[int(parts[-2])] = values
            continue
        if (expert := _EXPERT.fullmatch(name)) is not None:
            # As the converter, and so the package, names LFM2's.
            stem = expert[1].removeprefix("model." if family == "lfm2_moe" else "")
            stacks.setdefault(f"{stem}.{expert[3]}.weight", {})[int(expert[2])] = values
            continue
        if name.endswith("input_linear.weight"):
            # Granite's stacks of gates above ups.
            stem = f"model.layers.{parts[2]}.mlp.experts"
            gates, ups = np.split(values, 2, axis=1)
            moved |= {f"{stem}.gate_proj.weight": gates, f"{stem}.up_proj.weight": ups}
            continue
        if family == "gpt_oss" and ".experts." in name:
            moved |= _gpt_oss_experts(name, values)
            continue
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            name = f"{name}.weight"
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        if name.endswith("e_score_correction_bias"):
            name = name.removesuffix("_bias") + ".bias"
        if family in ("smollm3", "granite", "granitemoe", "granitemoehybrid", "mixtral"):
            for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                if f"self_attn.{which}_proj." in name:
                    values = permuted(values, config[heads])
        if family == "nemotron" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if name.endswith("conv.conv.weight"):
            values = values[:, 0]
        if name.endswith(".expert_bias"):
            name = f"{name}.bias"
        if "query_key_value" in name:
            values = _grouped_apart(config, values)
        is_scale = name.endswith(("correct_output_scale", "layer_scalar", ".sinks", "attention_sink_bias"))
        moved[f"{name}.weight" if is_scale else name] = values
    if family == "gemma3n_text":
        # Published checkpoints hold them for layers too that share the keys and values of others.
        for layer in range(config["num_hidden_layers"]):
            for part in ("k_proj", "v_proj", "k_norm"):
                first = f"model.layers.0.self_attn.{part}.weight"
                moved.setdefault(first.replace("0", str(layer)), moved[first])
    for name, found in stacks.items():
        moved[name] = np.stack([found[i] for i in range(len(found))])
    return moved


def _gpt_oss_experts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Stacks of columns as stacks of rows, those of gates and ups apart; and their biases."""
    is_bias = name.endswith("_bias")
    stem, kind = name.removesuffix("_bias"), "bias" if is_bias else "weight"
    values = values if is_bias else values.swapaxes(1, 2)
    if stem.endswith("down_proj"):
        return {f"{stem}.{kind}": values}
    stem = stem.removesuffix("gate_up_proj")
    return {f"{stem}gate_proj.{kind}": values[:, ::2], f"{stem}up_proj.{kind}": values[:, 1::2]}


def _grouped_apart(config: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """Falcon's groups of queries, a key and a value in turn, as all queries, all keys and all values."""
    heads = config["num_attention_heads"]
    groups = _falcon_groups(config)
    rows = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
    parts = [rows[:, :-2], rows[:, -2], rows[:, -1]]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _falcon_groups(config: Mapping[str, Any]) -> int:
    if config["new_decoder_architecture"]:
        return int(config["num_kv_heads"])
    return 1 if config["multi_query"] else int(config["num_attention_heads"])


def add_config(writer: Any, config: Mapping[str, Any]) -> None:
    """The keys that the converter writes for the family."""
    family, width, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    is_falcon = family == "falcon"
    inner = config.get("ffn_hidden_size") if is_falcon else config.get("intermediate_size")
    kv_heads = _falcon_groups(config) if is_falcon else config["num_key_value_heads"]
    if family == "gemma4_text":
        head_dim, inner, kv_heads = _gemma4_sizes(config)
    if family.startswith("lfm2"):
        inner, kv_heads = _lfm2_sizes(config)
    if family in MIXERS:
        inner, kv_heads = mixer_sizes(config)
    if family == "mimo_v2_flash":
        kv_heads = [kv_heads * (1 + (kind == "sliding_attention")) for kind in config["layer_types"]]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    if inner is not None:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if "kv_lora_rank" in config else kv_heads)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        if key in config and not family.startswith("lfm2"):
            writer.add_layer_norm_eps(config[key])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim") and "kv_lora_rank" not in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(config["v_head_dim"] if family == "mimo_v2_flash" else head_dim)
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    whole = rope.get("full_attention", rope)
    if not is_falcon:
        share = 1.0 if whole["rope_type"] == "proportional" else whole.get("partial_rotary_factor", 1.0)
        writer.add_rope_freq_base(whole["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * share))
    if whole["rope_type"] == "yarn":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(whole["factor"])
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
    _add_experts(writer, config)
    _OWN.get(family, lambda writer, config: None)(writer, config)


def _add_experts(writer: Any, config: Mapping[str, Any]) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            writer.add_expert_count(config[key])
            used = config.get("top_k_experts") or config["num_experts_per_tok"]
            writer.add_expert_used_count(used)
            break
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_glm4_moe(writer: Any, config: Mapping[str, Any]) -> None:
    import gguf

    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _add_phi3(writer: Any, config: Mapping[str, Any]) -> None:
    rope, context = config["rope_parameters"], config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings")
    original = original or config.get("original_max_position_embeddings", context)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(context / original) / math.log(original)))


def _add_granite(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_vocab_size(config["vocab_size"])


def _add_granite_hybrid(writer: Any, config: Mapping[str, Any]) -> None:
    _add_granite(writer, config)
    add_mixers(writer, config)


def _add_gpt_oss(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _add_mimo2(writer: Any, config: Mapping[str, Any]) -> None:
    """The window is that of the authors' config, which counts the tokens before the query's own."""
    import gguf

    writer.add_sliding_window(config["sliding_window"] - 1)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config["attention_value_scale"] is not None:
        writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])


def _lfm2_sizes(config: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Neurons, and each layer's heads of keys: none where it has a convolution."""
    neurons = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        wanted = int(config["block_ffn_dim_multiplier"] * int(2 * neurons / 3))
        neurons = multiple * -(-wanted // multiple)
    heads = config["num_key_value_heads"]
    return neurons, [heads if kind == "full_attention" else 0 for kind in config["layer_types"]]


def _add_lfm2(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "lfm2_moe":
        import gguf

        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_gemma3n(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares, normal = config["activation_sparsity_pattern"], NormalDist()
    writer.add_activation_sparsity_scale(
        [normal.inv_cdf(float(np.float32(share))) if share else -math.inf for share in shares]
    )
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma4_global(config: Mapping[str, Any]) -> dict[str, int]:
    """How the heads of global layers differ from those of local ones."""
    found: dict[str, int] = config["per_layer_config"][str(config["num_hidden_layers"] - 1)]
    return found


def _gemma4_sizes(config: Mapping[str, Any]) -> tuple[int, Any, Any]:
    """Width of a global head; neurons and key heads, each a number, or one a layer where these differ."""
    layers, inner, kv_heads = (
        config[key] for key in ("num_hidden_layers", "intermediate_size", "num_key_value_heads")
    )
    if config.get("use_double_wide_mlp"):
        own = layers - config["num_kv_shared_layers"]
        inner = [inner * (1 if layer < own else 2) for layer in range(layers)]
    own_keys = _gemma4_global(config).get("num_key_value_heads")
    if own_keys is not None:
        of_kind = {"sliding_attention": kv_heads, "full_attention": own_keys}
        kv_heads = [of_kind[kind] for kind in config["layer_types"]]
    return _gemma4_global(config)["head_dim"], inner, kv_heads


def _add_gemma4(writer: Any, config: Mapping[str, Any]) -> None:
    rope, width = config["rope_parameters"], _gemma4_global(config)["head_dim"]
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    turning = int(width * rope["full_attention"].get("partial_rotary_factor", 1.0) / 2)
    factors = [1.0] * turning + [1e30] * (width // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


_OWN: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "phi3": _add_phi3,
    "granite": _add_granite,
    "granitemoe": _add_granite,
    "phimoe": _add_phi3,
    "glm4_moe": _add_glm4_moe,
    "qwen2_moe": lambda writer, config: writer.add_expert_shared_feed_forward_length(
        config["shared_expert_intermediate_size"]
    ),
    "deepseek_v2": add_latent,
    "deepseek_v3": add_latent,
    "glm4_moe_lite": add_latent,
    "qwen3_next": add_delta,
    "qwen3_5_text": add_delta,
    "qwen3_5_moe_text": add_delta,
    "gemma3n_text": _add_gemma3n,
    "lfm2": _add_lfm2,
    "lfm2_moe": _add_lfm2,
    "gpt_oss": _add_gpt_oss,
    "mimo_v2_flash": _add_mimo2,
    "gemma4_text": _add_gemma4,
    "stablelm": lambda writer, config: writer.add_parallel_residual(config["use_parallel_residual"]),
    "falcon": lambda writer, config: writer.add_tensor_data_layout("jploski"),
    "granitemoehybrid": _add_granite_hybrid,
    "nemotron_h": add_mixers,
    "falcon_h1": add_mixers,
}
