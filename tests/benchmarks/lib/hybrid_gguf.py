"""A GGUF file of a dense hybrid in Q4_0 with random codes: gated delta rules, every fourth layer attention.

The shape is that of Qwen3.5-4B. A hybrid with experts has the same mixers (`routed_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from tests.benchmarks.lib.random_model import add_vocabulary
from tests.support.gguf_families import ARCHITECTURES, add_config

BLOCK, BLOCK_BYTES = 32, 18
"""Values and bytes of a block in Q4_0."""
SMALL_PARTS = ("ssm_alpha", "ssm_beta", "ssm_conv1d")
"""Matrices in float32."""

HYBRID_4B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def hybrid_file(config: dict[str, Any], workdir: Path) -> Path:
    """The file, re-used when present. It has no tokenizer; its head is its embedding."""
    path = workdir / f"hybrid-{config['hidden_size']}-q4_0.gguf"
    if path.is_file():
        return path
    workdir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)

    def values(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        if not is_quantised(name, shape):
            return plain_values(name, shape, rng)
        return random_blocks(shape, rng)

    write_hybrid(path, config, values)
    return path


def write_hybrid(
    path: Path,
    config: dict[str, Any],
    values: Callable[[str, tuple[int, ...]], NDArray[Any]],
    tokenizer: bytes = b"",
    chat_template: str = "",
) -> None:
    """Write a file, one tensor in memory at a time. It appears when it is whole.

    values: (a tensor's name and shape) -> its float32 values, or the bytes of its blocks, a row of them for
    each of its rows. tokenizer: a sentencepiece model; without one the file has no vocabulary.
    """
    import gguf

    writer = gguf.GGUFWriter(path.with_suffix(".partial"), ARCHITECTURES[config["model_type"]])
    add_config(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, tokenizer, config["vocab_size"])
    if chat_template:
        writer.add_chat_template(chat_template)
    shapes, quant = _shapes(config), gguf.GGMLQuantizationType.Q4_0
    for name, shape in shapes.items():
        if is_quantised(name, shape):
            stored = shape[0], shape[1] // BLOCK * BLOCK_BYTES
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), stored[0] * stored[1], quant)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        writer.write_tensor_data(values(name, shape))
    writer.close()
    path.with_suffix(".partial").rename(path)


def random_blocks(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of blocks in Q4_0 with random codes and scales, as bytes."""
    rows, cols = shape
    blocks = rng.integers(0, 256, (rows * cols // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    scales = rng.uniform(0.002, 0.008, len(blocks)).astype("<f2")
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is in Q4_0."""
    return len(shape) > 1 and name.split(".")[-2] not in SMALL_PARTS


def mixer_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's norms and of its mixer, by name."""
    hidden, width = config["hidden_size"], config["head_dim"]
    parts: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "post_attention_norm": (hidden,)}
    if config["layer_types"][layer] == "full_attention":
        queries, keys = (config[f"num_{name}_heads"] * width for name in ("attention", "key_value"))
        # Each query has a gate beside it.
        parts |= {"attn_q": (2 * queries, hidden), "attn_output": (hidden, queries)}
        parts |= {"attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        parts |= {"attn_q_norm": (width,), "attn_k_norm": (width,)}
        return {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    heads, value = config["linear_num_value_heads"], config["linear_value_head_dim"]
    channels = heads * value + 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    parts |= {"attn_qkv": (channels, hidden), "attn_gate": (heads * value, hidden)}
    parts |= {"ssm_out": (hidden, heads * value), "ssm_norm": (value,)}
    parts |= {"ssm_alpha": (heads, hidden), "ssm_beta": (heads, hidden)}
    parts |= {"ssm_conv1d": (channels, config["linear_conv_kernel_dim"])}
    found = {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return found | {f"blk.{layer}.ssm_dt.bias": (heads,), f"blk.{layer}.ssm_a": (heads,)}


def plain_values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Float32:
    """What a tensor in float32 holds: norms ones, and a rule's small parts what keeps its state alive."""
    if name.endswith("ssm_a"):
        values = -rng.uniform(1.0, 16.0, shape)
    elif name.endswith("ssm_dt.bias"):
        values = rng.uniform(-4.0, 0.0, shape)
    elif len(shape) > 1:
        values = (0.5 if "conv1d" in name else 0.02) * rng.standard_normal(shape)
    else:
        values = np.ones(shape)
    return values.astype(np.float32)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, by name."""
    hidden, neurons = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        found |= mixer_shapes(config, layer)
        found |= {f"blk.{layer}.ffn_{part}.weight": (neurons, hidden) for part in ("gate", "up")}
        found[f"blk.{layer}.ffn_down.weight"] = hidden, neurons
    found["output_norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["output.weight"] = config["vocab_size"], hidden
    return found
