"""What llama.cpp's converter does to models with gated delta rules, with Mamba-2 mixers and with latent
attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def settle_decays(folder: Path) -> None:
    """Make each `A_log` of a checkpoint a number that comes back from the decay that files have of it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if not any(name.endswith("A_log") for name in tensors):
        return
    for name, logs in tensors.items():
        if name.endswith("A_log"):
            for _ in range(9):
                decays = np.exp(logs.astype(np.float32))
                logs = np.log(decays.astype(np.float64)).astype(np.float32)
            tensors[name] = logs
    save_file(tensors, path, {"format": "pt"})


def moved_delta(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], whole: bool
) -> dict[str, np.ndarray]:
    """The tensors of a model with delta rules, with rows and values as the converter changes them.

    whole: with one fused projection for queries, keys, values and z, as files of 2025 have it.
    """
    moved: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        prefix, _, part = name.partition("linear_attn.")
        if name.endswith("norm.weight") and part != "norm.weight":
            values = values + np.float32(1)
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gates, ups = np.split(values, 2, axis=1)
            moved |= {f"{stem}gate_proj.weight": gates, f"{stem}up_proj.weight": ups}
            continue
        if not part:
            moved[name] = values
        elif part == "in_proj_qkvz.weight" and not whole:
            moved |= {f"{prefix}linear_attn.{it}": rows for it, rows in _apart(config, values).items()}
        else:
            tiled = config["model_type"] != "qwen3_next"
            values = _tiled(config, part, values) if tiled else values
            moved |= {f"{prefix}linear_attn.{_NAMES.get(part, part)}": _changed(part, values)}
    return moved


_NAMES = {"dt_bias": "dt_proj.bias"}


def _changed(part: str, values: np.ndarray) -> np.ndarray:
    if part == "A_log":
        return -np.exp(values.astype(np.float32))
    return values[:, 0] if part == "conv1d.weight" else values


def _apart(config: Mapping[str, Any], values: np.ndarray) -> dict[str, np.ndarray]:
    """All heads' queries, keys and values as one projection, and all z as another."""
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    inner = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    heads = values.reshape(keys, -1, values.shape[-1])
    parts = np.split(heads, np.cumsum([width, width, inner]), axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
    return {"in_proj_qkv.weight": np.concatenate([q, k, v]), "in_proj_z.weight": z}


def _tiled(config: Mapping[str, Any], part: str, values: np.ndarray) -> np.ndarray:
    """Value heads in another order: the first of every key head, then the second of every one, and so on."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    inner = heads * config["linear_value_head_dim"]

    def tiled(rows: np.ndarray) -> np.ndarray:
        grouped = rows.reshape(keys, heads // keys, -1)
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if part == "out_proj.weight":
        return tiled(values.T).T
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([values[:-inner], tiled(values[-inner:])])
    return values if part == "norm.weight" else tiled(values)


def add_delta(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    kinds = config["layer_types"]
    interval = kinds.index("full_attention") + 1
    if kinds == ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(len(kinds))]:
        writer.add_full_attention_interval(interval)
    else:
        recurrent = [kind == "linear_attention" for kind in kinds]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] != "qwen3_next":
        pairs = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2
        third = pairs // 3
        writer.add_rope_dimension_sections([pairs - 2 * third, third, third, 0])


def moved_latent(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with keys' and values' rows of a latent's projection apart, the keys' turned over."""
    moved: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            moved[name] = values
            continue
        heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
        width = config["qk_nope_head_dim"]
        moved[name.replace("kv_b", "k_b")] = np.ascontiguousarray(heads[:, :width].swapaxes(1, 2))
        moved[name.replace("kv_b", "v_b")] = np.ascontiguousarray(heads[:, width:])
    return moved


def add_latent(writer: Any, config: Mapping[str, Any]) -> None:
    import gguf

    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    rope = config["rope_parameters"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + turning)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turning)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.kv_data[0].pop(f"{writer.arch}.rope.dimension_count", None)
    writer.add_rope_dimension_count(turning)
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    kinds = config.get("mlp_layer_types")
    dense = kinds.count("dense") if kinds else config["first_k_dense_replace"]
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_shared_count(config["n_shared_experts"])
    sigmoid = config["model_type"] != "deepseek_v2"
    kind = gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
    writer.add_expert_gating_func(kind)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
    writer.add_expert_group_count(config.get("n_group") or 1)
    writer.add_expert_group_used_count(config.get("topk_group") or 1)


def single_blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nemotron-H's config with a number of blocks, and without what only blocks with experts have."""
    kinds = config["layers_block_type"]
    without = () if "moe" in kinds else ("n_routed_experts", "moe_intermediate_size")
    return {**{key: config[key] for key in config if key not in without}, "num_hidden_layers": len(kinds)}


def moved_mixers(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a model with Mamba-2 mixers, with names, values and shapes as the converter has them."""
    groups = config.get("mamba_n_groups") or config["n_groups"]
    shared = "mlp.shared_expert" if config.get("num_local_experts") else "mlp"
    moved: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if name.endswith(".A_log"):
            values = -np.exp(values.astype(np.float32))[:, None]
        elif name.endswith(".D"):
            values = values[:, None]
        elif name.endswith(".dt_bias"):
            name = name.removesuffix("dt_bias") + "dt_proj.bias"
        elif name.endswith(".conv1d.weight"):
            values = values[:, 0]
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            values = values.reshape(groups, -1)
        elif name.endswith("shared_mlp.input_linear.weight"):
            stem = name.removesuffix("shared_mlp.input_linear.weight") + shared
            gates, ups = np.split(values, 2)
            moved |= {f"{stem}.gate_proj.weight": gates, f"{stem}.up_proj.weight": ups}
            continue
        elif name.endswith("shared_mlp.output_linear.weight"):
            name = name.removesuffix("shared_mlp.output_linear.weight") + f"{shared}.down_proj.weight"
        elif ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        moved[name] = values
    return moved


def mixer_sizes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Neurons, and heads of keys, each a number, or one for each layer where layers differ."""
    heads, neurons = config["num_key_value_heads"], config["intermediate_size"]
    if config["model_type"] == "falcon_h1":
        return neurons, heads
    kinds = config.get("layers_block_type") or config["layer_types"]
    heads = [heads if kind == "full_attention" else 0 for kind in kinds]
    if config["model_type"] == "granitemoehybrid":
        return neurons if config["num_local_experts"] else config["shared_intermediate_size"], heads
    sparse = "moe" in kinds
    inner = config["moe_intermediate_size"] if sparse else neurons
    return [inner if kind == ("moe" if sparse else "mlp") else 0 for kind in kinds], heads


def add_mixers(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv") or config["conv_kernel"])
    writer.add_ssm_state_size(config.get("mamba_d_state") or config["ssm_state_size"])
    writer.add_ssm_group_count(config.get("mamba_n_groups") or config["n_groups"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * (config.get("mamba_d_head") or config["mamba_head_dim"]))
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["model_type"] == "nemotron_h":
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        if "n_routed_experts" in config:
            writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
            writer.add_expert_shared_count(config["n_shared_experts"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_group_count(config["n_group"])
