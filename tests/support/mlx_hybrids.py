"""Names, shapes and values that mlx-lm gives the tensors of hybrids and of models with latent attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.mlx_folders import named_by_mlx

CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
"""Ends of names of weights whose channels mlx-lm puts behind their taps."""
WHOLE_NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
"""Norms of models with delta rules that checkpoints store less one, and mlx-lm whole."""


_DENSE = re.compile(r"(.*\.feed_forward\.)(w[123])\.weight")
_OF_MLX = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""What mlx-lm calls the matrices of LFM2's dense feed-forwards beside experts."""
_UNGATED = {".switch_mlp.up_proj.": ".switch_mlp.fc1.", ".switch_mlp.down_proj.": ".switch_mlp.fc2."}
"""What it calls the stacks of experts without gates, by what others' are called."""
_HALVES = re.compile(r"(.*\.)(shared_mlp|block_sparse_moe)\.(in|out)put_linear\.weight")
_APART = {"shared_mlp": "mlp", "block_sparse_moe": "block_sparse_moe.switch_mlp"}
"""Granite's matrices of gates and ups in one, and where mlx-lm has these apart."""


def _fused_apart(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of dense Granite 4 models, which have three matrices of a feed-forward there."""
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        its = _HALVES.fullmatch(name)
        if its is None or its[2] != "shared_mlp" or config["num_local_experts"]:
            found[name] = values
            continue
        which = ("down",) if its[3] == "out" else ("gate", "up")
        for part, rows in zip(which, np.split(values, len(which)), strict=True):
            found[f"{its[1]}mlp.{part}_proj.weight"] = rows
    return found


def _falcon_factors(config: Mapping[str, Any], name: str) -> Any:
    """What Falcon-H1's weights are multiplied by: a number, or one of each row of a projection."""
    gates, outputs = config["mlp_multipliers"]
    if name.endswith("mamba.in_proj.weight"):
        inner = config["mamba_d_ssm"] or config["mamba_expand"] * config["hidden_size"]
        group = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = inner, inner, group, group, config["mamba_n_heads"]
        parts = np.repeat(np.array(config["ssm_multipliers"], np.float32), sizes)
        return config["ssm_in_multiplier"] * parts[:, None]
    ends = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "k_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gates,
        "down_proj": outputs,
    }
    return ends.get(name.split(".")[-2], 1.0) if name.endswith(".weight") else 1.0


def sanitised(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by mlx-lm's names. DeepSeek V2 keeps its fused projection there."""
    found: dict[str, np.ndarray] = {}
    stacked = config["model_type"] in ("deepseek_v3", "glm4_moe_lite")
    for name, values in _fused_apart(config, tensors).items():
        stem = name.removesuffix(".weight")
        if config["model_type"] == "falcon_h1":
            values = (values * _falcon_factors(config, name)).astype(np.float32)
        if name.endswith(CONVOLUTIONS):
            values = values.swapaxes(1, 2)
        elif "linear_num_key_heads" in config and stem.endswith(WHOLE_NORMS):
            values = values + np.float32(1)
        if config["model_type"] == "lfm2_moe" and (dense := _DENSE.fullmatch(name)) is not None:
            name = f"{dense[1]}{_OF_MLX[dense[2]]}.weight"
        if stacked and stem.endswith("kv_b_proj"):
            heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
            width = config["qk_nope_head_dim"]
            found[name.replace("kv_b_proj", "embed_q")] = heads[:, :width].swapaxes(1, 2)
            found[name.replace("kv_b_proj", "unembed_out")] = heads[:, width:]
        else:
            found[name] = values
    named = named_by_mlx(found)
    if config["model_type"] == "nemotron_h":
        for old, new in _UNGATED.items():
            named = {name.replace(old, new): values for name, values in named.items()}
    return {name: np.ascontiguousarray(values) for name, values in named.items()}


def restored(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], mlx: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The checkpoint of the values in an MLX folder, of tensors with these shapes."""
    named = dict(mlx)
    if config["model_type"] == "nemotron_h":
        for old, new in _UNGATED.items():
            named = {name.replace(new, old): values for name, values in named.items()}
    for name in shapes:
        if (its := _HALVES.fullmatch(name)) is not None and name not in mlx:
            which = ("down",) if its[3] == "out" else ("gate", "up")
            parts = [mlx[f"{its[1]}{_APART[its[2]]}.{part}_proj.weight"] for part in which]
            named[name] = np.concatenate(parts, axis=-2)
    for name, values in mlx.items():
        if name.endswith("embed_q.weight"):
            keys, heads = values.swapaxes(1, 2), mlx[name.replace("embed_q", "unembed_out")]
            both = np.concatenate([keys, heads], axis=1)
            named[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, values.shape[1])
    found = {}
    for name in shapes:
        if (dense := _DENSE.fullmatch(name)) is not None and name not in named:
            named[name] = mlx[f"{dense[1]}{_OF_MLX[dense[2]]}.weight"]
    for name, shape in shapes.items():
        stem, old = name.removesuffix(".weight"), named.get(name)
        if old is None:
            (stack,) = named_by_mlx({_first(name): np.zeros(shape, np.float32)})
            old = named[stack][_number(name)]
        if name.endswith(CONVOLUTIONS):
            old = old.swapaxes(1, 2)
        elif "linear_num_key_heads" in config and stem.endswith(WHOLE_NORMS):
            old = old - np.float32(1)
        found[name] = np.ascontiguousarray(old)
    return found


def _number(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0])


def _first(name: str) -> str:
    return name.replace(f".experts.{_number(name)}.", ".experts.0.")
