"""Names and shapes that mlx-lm gives the tensors of hybrids and of models with latent attention."""

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


def sanitised(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by mlx-lm's names. DeepSeek V2 keeps its fused projection there."""
    found: dict[str, np.ndarray] = {}
    stacked = config["model_type"] in ("deepseek_v3", "glm4_moe_lite")
    for name, values in tensors.items():
        stem = name.removesuffix(".weight")
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
    return {name: np.ascontiguousarray(values) for name, values in named_by_mlx(found).items()}


def restored(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], mlx: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The checkpoint of the values in an MLX folder, of tensors with these shapes."""
    named = dict(mlx)
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
            old = mlx[stack][_number(name)]
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
