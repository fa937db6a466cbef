"""A GGUF file of a dense hybrid in Q4_0 with random codes: gated delta rules, every fourth layer attention.

The shape is that of Qwen3.5-4B.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_families import add_config

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
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def hybrid_file(config: dict[str, Any], workdir: Path) -> Path:
    """The file, re-used when present. It has no tokenizer; its head is its embedding."""
    import gguf

    path = workdir / f"hybrid-{config['hidden_size']}-q4_0.gguf"
    if path.is_file():
        return path
    workdir.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path.with_suffix(".partial"), "qwen35")
    add_config(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    matrices, plain = _tensors(config)
    quant = gguf.GGMLQuantizationType.Q4_0
    for name, (rows, cols) in matrices.items():
        stored = rows, cols // 32 * 18
        writer.add_tensor_info(f"{name}.weight", stored, np.dtype(np.uint8), rows * stored[1], quant)
    for name, values in plain.items():
        writer.add_tensor_info(name, values.shape, np.dtype(np.float32), values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for rows, cols in matrices.values():
        blocks = rng.integers(0, 256, (rows * cols // 32, 18), dtype=np.uint8)
        scales = rng.uniform(0.002, 0.008, len(blocks)).astype("<f2")
        blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
        writer.write_tensor_data(blocks.reshape(rows, -1))
    for values in plain.values():
        writer.write_tensor_data(values)
    writer.close()
    path.with_suffix(".partial").rename(path)
    return path


def _tensors(config: dict[str, Any]) -> tuple[dict[str, tuple[int, int]], dict[str, np.ndarray]]:
    """Shapes of matrices by name, without `.weight`; and values of what is stored in float32, by name."""
    rng, hidden, neurons = np.random.default_rng(1), config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    inner, width = heads * config["linear_value_head_dim"], config["head_dim"]
    channels = inner + 2 * key_heads * config["linear_key_head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * width for name in ("attention", "key_value"))
    matrices, ones = {"token_embd": (config["vocab_size"], hidden)}, {"output_norm": hidden}
    plain: dict[str, np.ndarray] = {}
    for layer, kind in enumerate(config["layer_types"]):
        name = f"blk.{layer}."
        matrices |= {f"{name}ffn_{part}": (neurons, hidden) for part in ("gate", "up")}
        matrices[f"{name}ffn_down"] = hidden, neurons
        ones |= {f"{name}attn_norm": hidden, f"{name}post_attention_norm": hidden}
        if kind == "full_attention":
            # Each query has a gate beside it.
            matrices |= {f"{name}attn_q": (2 * queries, hidden), f"{name}attn_output": (hidden, queries)}
            matrices |= {f"{name}attn_{part}": (keys, hidden) for part in "kv"}
            ones |= {f"{name}attn_{part}_norm": width for part in "qk"}
            continue
        matrices |= {f"{name}attn_qkv": (channels, hidden), f"{name}attn_gate": (inner, hidden)}
        matrices[f"{name}ssm_out"] = hidden, inner
        ones[f"{name}ssm_norm"] = config["linear_value_head_dim"]
        drawn = {
            "ssm_alpha.weight": 0.02 * rng.standard_normal((heads, hidden)),
            "ssm_beta.weight": 0.02 * rng.standard_normal((heads, hidden)),
            "ssm_conv1d.weight": 0.5 * rng.standard_normal((channels, config["linear_conv_kernel_dim"])),
            "ssm_dt.bias": rng.uniform(-4.0, 0.0, heads),
            "ssm_a": -rng.uniform(1.0, 16.0, heads),
        }
        plain |= {f"{name}{part}": values.astype(np.float32) for part, values in drawn.items()}
    return matrices, plain | {f"{name}.weight": np.ones(size, np.float32) for name, size in ones.items()}
