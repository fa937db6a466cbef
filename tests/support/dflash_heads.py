"""DFlash and DSpark heads of random weights, and their arithmetic in plain PyTorch.

The twin is written from the papers and the authors' names of tensors. It has no cache, and computes the whole
text anew for each block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]


def dflash_config(**options: Any) -> dict[str, Any]:
    """A `config.json` as z-lab writes it, that goes with `write_chat_checkpoint`'s models."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"mask_token_id": 271, "target_layer_ids": [-1, 1, 0]},
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 24,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 256,
        "max_window_layers": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 3,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 272,
    } | options


def dspark_config(**options: Any) -> dict[str, Any]:
    """A `config.json` as deepseek-ai/DeepSpec writes it."""
    config = dflash_config(tie_word_embeddings=False)
    del config["auto_map"], config["dflash_config"]
    return (
        config
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 5,
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": 48,
            "mask_token_id": 270,
            "num_anchors": 512,
            "target_layer_ids": [0, 1],
        }
        | options
    )


def dflash_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random weights, float16, as the authors name them; of DSpark also copies that aren't read."""
    rng = np.random.default_rng(seed)
    width, head, neurons = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    vocabulary, rank = config["vocab_size"], config.get("markov_rank", 0)
    taps = {**config, **config.get("dflash_config", {})}["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(taps) * width)}
    shapes |= {name: (width,) for name in ("hidden_norm.weight", "norm.weight")}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (queries, width),
                "self_attn.k_proj": (keys, width),
                "self_attn.v_proj": (keys, width),
                "self_attn.o_proj": (width, queries),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "mlp.gate_proj": (neurons, width),
                "mlp.up_proj": (neurons, width),
                "mlp.down_proj": (width, neurons),
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
            }.items()
        }
    if rank:
        shapes |= {f"markov_head.markov_w{which}.weight": (vocabulary, rank) for which in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, width + rank), "confidence_head.proj.bias": (1,)}
        shapes |= {name: (vocabulary, width) for name in ("embed_tokens.weight", "lm_head.weight")}
    found: Tensors = {}
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else 2.0 / np.sqrt(shape[1])
        found[name] = (rng.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float16)
    return found


def write_dflash_head(folder: Path, config: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    """A folder with a head of random weights, or of `tensors`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors or dflash_tensors(config), folder / "model.safetensors")
    return folder


def dflash_twin(
    tensors: Tensors,
    config: Mapping[str, Any],
    table: np.ndarray,
    head: np.ndarray,
    token: int,
    entering: Sequence[np.ndarray],
) -> tuple[np.ndarray, list[int]]:
    """Logits (places, V) of a block, each after the likeliest token before it, and these tokens, in float64.

    table, head: (V, D) of the target. token: the text's last. entering: (P, D) hidden states of the tokens
    before it, of each of `target_layer_ids`.
    """
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    w = {name: torch.from_numpy(np.asarray(it, np.float64)) for name, it in tensors.items()}
    facts = {**config, **config.get("dflash_config", {})}
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    block, markov = facts["block_size"], config.get("markov_rank", 0) > 0

    def norm(x: Any, name: str) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    text = norm(
        torch.from_numpy(np.concatenate(entering, 1).astype(np.float64)) @ w["fc.weight"].T, "hidden_norm"
    )
    places = torch.arange(len(text) + block)
    angles = places[:, None] / config["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = torch.cos(angles).repeat(1, 2), torch.sin(angles).repeat(1, 2)

    def turned(x: Any, first: int) -> Any:
        return x * cos[first:] + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin[first:]

    ids = [token, *[facts["mask_token_id"]] * (block - 1)]
    x = torch.from_numpy(np.asarray(table[ids], np.float64))
    for layer, kind in enumerate(config["layer_types"]):
        own = f"layers.{layer}."
        inner = norm(x, f"{own}input_layernorm")

        def projected(rows: Any, which: str, count: int, own: str = own) -> Any:
            product = rows @ w[f"{own}self_attn.{which}_proj.weight"].T
            return product.reshape(len(rows), count, size).transpose(0, 1)

        q = turned(norm(projected(inner, "q", heads), f"{own}self_attn.q_norm"), len(text))
        both = torch.cat([text, inner])
        k = turned(norm(projected(both, "k", groups), f"{own}self_attn.k_norm"), 0)
        v = projected(both, "v", groups)
        k, v = (it.repeat_interleave(heads // groups, 0) for it in (k, v))
        visible = torch.ones(block, len(both), dtype=torch.bool)
        if kind == "sliding_attention":
            visible = places[None, :] > places[len(text) :, None] - config["sliding_window"]
        seen = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)[0]
        x = x + seen.transpose(0, 1).reshape(block, -1) @ w[f"{own}self_attn.o_proj.weight"].T
        inner = norm(x, f"{own}post_attention_layernorm")
        gate = functional.silu(inner @ w[f"{own}mlp.gate_proj.weight"].T)
        x = x + (gate * (inner @ w[f"{own}mlp.up_proj.weight"].T)) @ w[f"{own}mlp.down_proj.weight"].T
    logits = (norm(x, "norm") @ torch.from_numpy(np.asarray(head, np.float64)).T).numpy()
    logits = logits if config["architectures"] != ["DFlashDraftModel"] else logits[1:]
    drafted = [token]
    for row in logits:
        if markov:
            latent = w["markov_head.markov_w1.weight"][drafted[-1]]
            row += (w["markov_head.markov_w2.weight"] @ latent).numpy()
        drafted.append(int(np.argmax(row)))
    return logits, drafted[1:]
